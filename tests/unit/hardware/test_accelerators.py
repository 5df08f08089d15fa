"""Accelerators are counted without their drivers, and hidden by the variables that these obey."""

from __future__ import annotations

from pathlib import Path

import pytest

from yunlu.core.errors import YunluError
from yunlu.hardware.accelerators import (
    ACCELERATORS,
    VisibleDevices,
    deterministic_defaults,
    find_devices,
    worker_defaults,
)


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def test_nothing_is_found_on_a_machine_without_any(tmp_path: Path) -> None:
    assert find_devices({}, root=tmp_path) == VisibleDevices()
    assert len(VisibleDevices()) == 0


def test_cards_of_each_maker_are_counted(tmp_path: Path) -> None:
    nvidia = make(
        tmp_path / "n", *(f"proc/driver/nvidia/gpus/0000:0{slot}:00.0/x" for slot in "12")
    )
    assert find_devices({}, root=nvidia) == VisibleDevices("cuda", ("0", "1"))
    ascend = make(tmp_path / "a", "dev/davinci0", "dev/davinci1", "dev/davinci_manager")
    assert find_devices({}, root=ascend) == VisibleDevices("npu", ("0", "1"))
    amd = tmp_path / "r"
    for node, units in enumerate((0, 304, 304)):  # the first one is the processor
        folder = amd / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 1\nsimd_count {units}\n")
    assert find_devices({}, root=amd) == VisibleDevices("cuda", ("0", "1"))
    intel = tmp_path / "i"
    for card, (vendor, group) in enumerate((("0x8086", "0x038000"), ("0x8086", "0x030000"))):
        folder = intel / f"sys/class/drm/renderD{128 + card}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{group}\n")
    assert find_devices({}, root=intel) == VisibleDevices("xpu", ("0",))


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", "2,3", ("2", "3")),
        ("CUDA_VISIBLE_DEVICES", "GPU-4a1f", ("GPU-4a1f",)),
        ("CUDA_VISIBLE_DEVICES", "", ()),
        ("CUDA_VISIBLE_DEVICES", "-1", ()),
        ("CUDA_VISIBLE_DEVICES", "1,9,0", ("1",)),  # drivers stop at the first that there is not
        ("HIP_VISIBLE_DEVICES", "0", ("0",)),
        ("ASCEND_RT_VISIBLE_DEVICES", "0", ("0", "1", "2", "3")),  # of another kind
    ],
)
def test_only_devices_that_the_user_shows_are_used(
    variable: str, value: str, expected: tuple[str, ...]
) -> None:
    assert find_devices({variable: value}, declared="cuda:4").names == expected


def test_a_process_gets_the_devices_of_its_lease_by_their_own_names() -> None:
    visible = find_devices({"ASCEND_RT_VISIBLE_DEVICES": "1,3,5"}, declared="npu:8")
    assert visible.hide_all_but((0, 2)) == {"ASCEND_RT_VISIBLE_DEVICES": "1,5"}
    assert visible.hide_all_but(()) == {}
    assert VisibleDevices("gadget", ("0", "1")).hide_all_but((1,)) == {}


def test_a_lease_goes_before_the_variable_that_amd_prefers() -> None:
    shown = {"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0"}
    visible = find_devices(shown, declared="cuda:8")
    assert visible.names == ("4", "5")
    assert find_devices(shown | visible.hide_all_but((1,)), declared="cuda:8").names == ("5",)


def test_what_the_amd_driver_leaves_is_numbered_anew() -> None:
    hidden = {"ROCR_VISIBLE_DEVICES": "4,6,7"}
    assert find_devices(hidden, declared="cuda:8").names == ("0", "1", "2")
    both = hidden | {"HIP_VISIBLE_DEVICES": "2,1,5"}
    assert find_devices(both, declared="cuda:8").names == ("2", "1")


def test_a_declaration_replaces_counting(tmp_path: Path) -> None:
    nvidia = make(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/x")
    assert find_devices({}, declared="cpu", root=nvidia) == VisibleDevices()
    assert len(find_devices({}, declared="npu:8", root=nvidia)) == 8


@pytest.mark.parametrize("declared", ["npu:x", "npu:0", "npu:-3", ":2", "8", "npu:2,3"])
def test_a_declaration_that_says_nothing_is_refused(declared: str) -> None:
    with pytest.raises(YunluError, match=r"YUNLU_ACCELERATORS is .*, not a kind of accelerator"):
        find_devices({}, declared=declared)


def test_each_kind_hides_devices_by_a_variable_of_its_own() -> None:
    variables = [variable for kind in ACCELERATORS for variable in kind.visible]
    assert len(variables) == len(set(variables))
    assert worker_defaults()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert deterministic_defaults()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
