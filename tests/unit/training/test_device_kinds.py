"""What each kind of device can do, as far as its driver's answers decide it; and who may ask."""

from __future__ import annotations

import pytest
import torch

from yunlu.training.device import (
    CPU,
    accelerator_kind,
    can_pin,
    group_backends,
    kind_of,
    max_memory_bytes,
    open_device,
    random_state,
    used_kind,
)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), ("fp32", "fp16")),
        ((7, 5), ("fp32", "fp16")),
        ((8, 6), ("fp32", "tf32", "bf16", "fp16")),
        ((9, 0), ("fp32", "tf32", "bf16", "fp16", "fp8")),
    ],
)
def test_a_card_is_fast_in_what_its_tensor_cores_have(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    cuda = kind_of("cuda")
    assert cuda.fast_precisions(0) == expected
    assert cuda.has_bf16(0) is ("bf16" in expected), "emulation does not count"
    assert (cuda.fp8_problem(0) is None) is ("fp8" in expected)


def test_an_unknown_kind_gets_what_every_accelerator_can_do() -> None:
    gadget = kind_of("gadget")
    assert gadget.name == "gadget"
    assert gadget.has_groups
    assert gadget.fp8_problem(0) == "this device is gadget"
    assert gadget.compiler_problem() is not None


def test_without_an_accelerator_nothing_of_one_is_asked_for() -> None:
    assert accelerator_kind() is None
    assert used_kind() is None
    assert random_state() is None
    assert open_device("cpu", 3) == CPU
    assert group_backends(CPU) == "gloo"
    assert not can_pin([CPU])
    assert max_memory_bytes(CPU) is None
