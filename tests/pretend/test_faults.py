"""What goes wrong in code that never ran on an accelerator, and the test that fails where it does again.

| fault | cure | test |
|---|---|---|
| 0 a thread waits for its own current device: torn checkpoints | ``checkpoint/host_copy.py`` | ``faults.py``: own device |
| 1 numbers of the host in a group of the device only | ``device.py``: ``group_backends`` | ``workers.py``: numbers of the host |
| 2 a device is used before workers are forked | ``prepare.py``, ``hardware/accelerators.py``: ``worker`` | ``faults.py``: fp8; below |
| 3 a dead peer is waited for without end | ``parallel/world.py``: ``disconnect`` | ``workers.py``: dead peer |
| 4 contexts on devices of other workers | ``probe.py``; ``device.py``: ``random_kept`` | ``faults.py``: own device gets a context |
| 5 a zero of the host among tensors of the device | ``clipping.py`` | ``faults.py``: without gradients |
| 6 deterministic, but for cuBLAS and HCCL | ``determinism.py`` | below |
| 7 a job on the CPU opens contexts and pins memory | ``device.py``: ``used_kind``, ``can_pin`` | ``faults.py``: job on the CPU |
| 8 only CUDA's copies are waited for | ``checkpoint/host_copy.py`` | ``faults.py``: own device |
| 9 timers and generators of CUDA only | ``device.py``; ``autotune/timer.py`` | ``faults.py``: generator, timers |
| 10 waits measured as zero | ``step_clock.py``, ``gradient_allreduce.py``: ``ExchangeClock`` | ``workers.py``: sent; ``steps.py`` |
| 11 groups guess their device | ``parallel/world.py``: ``use_device`` | ``workers.py``: current device |
| 12 emulated bf16 counts as support | ``device_kinds/cuda.py``, ``xpu.py`` | below; ``test_device_kinds.py`` |
| 13 ``numpy`` of tensors of the device | ``communication/allreducer.py`` | ``workers.py``: sums by a thread |
| 14 batches neither pinned nor ahead; fragmentation | ``device_feed.py``; ``accelerators.py`` | ``test_speed.py``; below |

The programs are in ``tests/pretend/programs``: many checks in one process, whose import of torch is the cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from yunlu.hardware.accelerators import (
    find_devices,
    is_shared_variable,
    worker_defaults,
)
from yunlu.training.determinism import set_deterministic
from yunlu.training.device_kinds.xpu import XpuKind

PROGRAMS = Path(__file__).parent / "programs"


def test_one_worker_uses_its_device_and_no_other(on_pretend: Callable[..., str]) -> None:
    on_pretend([PROGRAMS / "faults.py"], PRETEND_NO_FLOAT64="1")


def test_workers_neither_mix_host_and_device_nor_hang(on_pretend: Callable[..., str]) -> None:
    told = on_pretend([PROGRAMS / "workers.py"], PRETEND_NO_FLOAT64="1")
    assert "check_a_dead_peer_ends_by_abort: rank 0" in told


def test_workers_start_with_what_their_drivers_need() -> None:
    variables = worker_defaults()
    # To ask whether there is a device must not spoil the fork; freed memory serves any size.
    assert variables["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert variables["PYTORCH_HAL_BASED_NPU_CHECK"] == "1"
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert variables["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"


def test_deterministic_training_configures_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    was = torch.are_deterministic_algorithms_enabled()
    try:
        set_deterministic(True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["HCCL_DETERMINISTIC"] == "true"
    finally:
        set_deterministic(was)


@pytest.mark.parametrize("has_it", [True, False])
def test_an_intel_gpu_that_emulates_bf16_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    properties = SimpleNamespace(has_bfloat16_conversions=has_it)
    module = SimpleNamespace(
        get_device_properties=lambda _: properties, is_bf16_supported=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert XpuKind("xpu").has_bf16(0) is has_it
    assert ("bf16" in XpuKind("xpu").fast_precisions(0)) is has_it


def test_which_devices_are_hidden_here_is_not_told_to_other_machines() -> None:
    shared = ("HCCL_BUFFSIZE", "ASCEND_LAUNCH_BLOCKING", "NCCL_DEBUG", "ZE_FLAT_DEVICE_HIERARCHY")
    hiding = ("ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "CUDA_VISIBLE_DEVICES")
    assert all(map(is_shared_variable, shared))
    assert not any(map(is_shared_variable, hiding))


def test_devices_that_rocr_hides_are_counted_anew() -> None:
    seen = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    assert find_devices(seen, declared="cuda:4").names == ("1",)
    assert len(find_devices({"ROCR_VISIBLE_DEVICES": "2,3"}, declared="cuda:4")) == 2
