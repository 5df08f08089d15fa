"""What ``yunlu doctor`` says of accelerators: read from a made file system, judged by a pure function."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from yunlu import __version__
from yunlu.jobs import accelerator_facts
from yunlu.jobs.accelerator_facts import AcceleratorFacts, read_accelerator_facts
from yunlu.jobs.doctor import (
    MachineFindings,
    StoreState,
    TorchState,
    find_accelerator_problems,
    list_advice,
)
from yunlu.render.terminal.machine_page import doctor_page


def make_files(root: Path, **files: str) -> None:
    """Files below the root by their path, with ``__`` for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def ascend(tmp_path: Path) -> Path:
    """A machine with two Ascend NPUs and an installed CANN."""
    make_files(
        tmp_path,
        dev__davinci0="",
        dev__davinci1="",
        dev__davinci_manager="",
        dev__hisi_hdc="",
        **{
            "usr/local/Ascend/driver/version.info": "package_version=x\nVersion=25.5.1\n",
            "usr/local/Ascend/cann/set_env.sh": "",
            "usr/local/Ascend/cann/x86_64-linux/ascend_toolkit_install.info": "version=9.2.0\n",
        },
    )
    return tmp_path


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of the packages that are there."""
    versions = {"torch_npu": "2.13.0"}

    def requirements(package: str) -> list[str]:
        return [f"torch=={versions[package]}.*", "numpy"] if package in versions else []

    monkeypatch.setattr(accelerator_facts, "_version_of", versions.get)
    monkeypatch.setattr(accelerator_facts, "_requirements_of", requirements)
    return versions


CANN = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann"}
WORKS = {"torch": "2.13.0+cpu", "builds": ("npu",), "seen": ("npu", "npu")}


def problems_of(facts: AcceleratorFacts) -> list[tuple[str, str]]:
    return [(found.problem, found.advice) for found in find_accelerator_problems(facts)]


def test_ascend_that_torch_can_use_has_no_problem(ascend: Path, packages: dict[str, str]) -> None:
    facts = read_accelerator_facts(CANN, root=ascend, **WORKS)
    (driver,) = facts.drivers
    assert (driver.title, driver.devices, driver.visible) == ("Ascend NPU", 2, 2)
    assert (driver.version, facts.ascend.cann) == ("25.5.1", "9.2.0")
    assert facts.ascend.needs_torch == packages["torch_npu"] == "2.13.0"
    assert problems_of(facts) == []


def test_ascend_without_its_software_is_told_what_to_install(
    ascend: Path, packages: dict[str, str]
) -> None:
    packages.clear()
    facts = read_accelerator_facts({}, root=ascend, torch="2.13.0+cpu", builds=())
    assert problems_of(facts) == [
        ("torch_npu is not installed.", "pip install torch_npu==2.13.0"),
        (
            "CANN is installed, but not in this environment: ASCEND_HOME_PATH is not set.",
            "source /usr/local/Ascend/cann/set_env.sh",
        ),
    ]
    (ascend / "usr/local/Ascend/cann/set_env.sh").unlink()
    facts = read_accelerator_facts({}, root=ascend, torch="2.13.0+cpu", builds=())
    assert "CANN was not found" in problems_of(facts)[1][0]


def test_torch_npu_must_match_torch_and_stand_beside_a_cpu_build(
    ascend: Path, packages: dict[str, str]
) -> None:
    packages["torch_npu"] = "2.14.0"
    facts = read_accelerator_facts(CANN, root=ascend, torch="2.13.0+cu130", builds=("cuda",))
    (build, version) = problems_of(facts)
    assert "torch_npu refuses to load" in build[0]
    assert build[1].startswith("Install the CPU build of torch 2.13.0 ")
    assert version == (
        "torch_npu 2.14.0 is for torch 2.14.0, here is 2.13.0+cu130.",
        "pip install torch_npu==2.13.0",
    )


def test_torch_that_does_not_load_plugins_is_found(ascend: Path, packages: dict[str, str]) -> None:
    assert packages
    environment = {**CANN, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    facts = read_accelerator_facts(environment, root=ascend, torch="2.13.0", builds=())
    assert [advice for _, advice in problems_of(facts)] == ["unset TORCH_DEVICE_BACKEND_AUTOLOAD"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "ASCEND_RT_VISIBLE_DEVICES='' hides all 2 of them."),
        ("7", "ASCEND_RT_VISIBLE_DEVICES='7' hides all 2 of them."),
        ("0, 1", "ASCEND_RT_VISIBLE_DEVICES is '0, 1': the driver stops reading"),
    ],
)
def test_a_variable_that_hides_devices_is_named(
    ascend: Path, packages: dict[str, str], value: str, problem: str
) -> None:
    assert packages
    environment = {**CANN, "ASCEND_RT_VISIBLE_DEVICES": value}
    facts = read_accelerator_facts(environment, root=ascend, torch="2.13.0", builds=("npu",))
    assert problems_of(facts)[0][0].startswith(problem)
    one = read_accelerator_facts(
        {**CANN, "ASCEND_RT_VISIBLE_DEVICES": "1"},
        root=ascend, torch="2.13.0", builds=("npu",), seen=("npu",),
    )  # fmt: skip
    assert problems_of(one) == []


def test_declaring_none_is_a_finding(ascend: Path, packages: dict[str, str]) -> None:
    assert packages
    facts = read_accelerator_facts(
        CANN, declared="cpu", root=ascend, torch="2.13.0", builds=("npu",)
    )
    assert problems_of(facts)[0][1] == "unset YUNLU_ACCELERATORS"


def test_files_that_may_not_be_opened_are_named_with_their_group(
    ascend: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packages
    # Root may open everything: what the kernel would answer another user is made.
    monkeypatch.setattr(accelerator_facts.os, "access", lambda path, _: "davinci" not in path.name)
    monkeypatch.setattr(accelerator_facts.Path, "group", lambda _: "HwHiAiUser")
    facts = read_accelerator_facts(CANN, root=ascend, torch="2.13.0", builds=("npu",))
    ((problem, advice),) = problems_of(facts)
    assert problem == "you may not open /dev/davinci0 and 2 more files."
    assert advice.startswith("sudo usermod -aG HwHiAiUser $USER, then log in again")


@pytest.mark.parametrize(
    ("files", "title", "build", "install"),
    [
        (
            {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/gpus/0000:01:00.0/x": "",
             "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  x"},
            "NVIDIA GPU", "cuda", "PyPI's build is for CUDA",
        ),
        (
            {"dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 256\n"},
            "AMD GPU", "rocm", "build for ROCm",
        ),
        (
            {"dev/dri/renderD128": "", "sys/class/drm/renderD128/device/vendor": "0x8086\n",
             "sys/class/drm/renderD128/device/class": "0x038000\n"},
            "Intel GPU", "xpu", "build for XPU",
        ),
    ],
)  # fmt: skip
def test_a_build_of_torch_without_the_kind_is_found(
    tmp_path: Path, files: dict[str, str], title: str, build: str, install: str
) -> None:
    make_files(tmp_path, **files)
    facts = read_accelerator_facts({}, root=tmp_path, torch="2.13.0+cpu", builds=())
    (found,) = find_accelerator_problems(facts)
    assert found.title == title
    assert found.problem == f"torch 2.13.0+cpu is built without {build}."
    assert install in found.advice
    kind = facts.drivers[0].kind
    good = read_accelerator_facts({}, root=tmp_path, torch="2", builds=(build,), seen=(kind,))
    assert problems_of(good) == []
    old = read_accelerator_facts({}, root=tmp_path, torch="2", builds=(build,))
    assert problems_of(old)[0][0] == "torch can use 0 of 1."


def test_a_device_on_the_bus_without_a_driver_is_found(tmp_path: Path) -> None:
    for slot, (vendor, kind) in enumerate([("0x19e5", "0x120000"), ("0x8086", "0x030000")]):
        make_files(
            tmp_path,
            **{
                f"sys/bus/pci/devices/{slot}/vendor": f"{vendor}\n",
                f"sys/bus/pci/devices/{slot}/class": f"{kind}\n",
            },
        )
    facts = read_accelerator_facts({}, root=tmp_path, torch="2.13.0", builds=())
    assert "1 on the PCI bus, but their driver is not loaded." in problems_of(facts)[0][0]
    assert [driver.title for driver in facts.drivers] == ["Ascend NPU"]


def test_another_kind_beside_the_one_that_torch_uses_is_left_alone(
    ascend: Path, packages: dict[str, str]
) -> None:
    packages.clear()
    facts = read_accelerator_facts({}, root=ascend, torch="2", builds=("cuda",), seen=("cuda",))
    assert problems_of(facts) == []


def test_a_machine_without_accelerators_has_nothing_to_say(tmp_path: Path) -> None:
    facts = read_accelerator_facts({}, root=tmp_path, torch="2.13.0+cpu", builds=())
    assert facts.drivers == ()
    assert problems_of(facts) == []


def test_the_page_shows_what_is_missing_within_eighty_columns(
    ascend: Path, packages: dict[str, str]
) -> None:
    packages.clear()
    facts = read_accelerator_facts({}, root=ascend, torch="2.13.0+cpu", builds=())
    problems = tuple(find_accelerator_problems(facts))
    torch = TorchState(version=None, problem="cannot be used: ImportError: libhccl.so")
    store = StoreState(path="/runs", exists=True, problem=None, free_bytes=1 << 30)
    advice = list_advice(torch, store, problems)
    assert advice == (f"torch {torch.problem}. pip install torch_npu==2.13.0",)
    findings = MachineFindings(
        yunlu=__version__, python="3.11", machine=None, torch=TorchState(version="2.13.0"),
        store=store, parts=(), can_train=True, advice=(), accelerators=facts,
        accelerator_problems=problems,
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(doctor_page(findings))
    shown = console.file.getvalue()
    assert "✗  Ascend NPU  2 by its driver 25.5.1 · CANN not found" in shown
    assert "→ source /usr/local/Ascend/cann/set_env.sh" in shown
    assert "✓ This machine can train, on its CPU only." in shown
    assert max(map(len, shown.splitlines())) <= 80
