"""A pretend accelerator for tests; torch loads it by itself when this folder is on the path.

The environment decides, when torch is imported:

PRETEND_NAME: the device's name in torch ("npu").
PRETEND_DEVICES: how many there are in this machine (2).
PRETEND_VISIBLE_DEVICES, or ASCEND_RT_VISIBLE_DEVICES for "npu": which of them this process sees.
PRETEND_MEMORY: bytes a device (4 GiB).
PRETEND_RACES: "raise" (an error where it happens), "warn" or "off".
PRETEND_RACE_LOG: a file to which all processes add the races they find, one a line.
PRETEND_NO_FLOAT64=1: no float64 on the device, as on MPS.
PRETEND_POISON=1: fresh memory holds NaN.
PRETEND_AVAILABLE_POISONS=1: asking whether there is a device spoils later forks, as cuInit does.
PRETEND_COUNT_KERNELS=1: count kernels by name too (`kernel_counts`).
PRETEND_BACKEND: the name of its process group ("hccl" for "npu", else the name + "cl").
PRETEND_BACKWARD_LOG: a file to which all processes add the kinds of device on which they ran a backward pass.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pretend_accelerator import _device
from pretend_accelerator.device_module import make_module

NAME: str = _device.device_name()
BACKEND: str = _device.backend_name()

# counters(): kernels, copies_to_host, copies_from_host, copies_late (from or to pinned memory, not waited for),
# collectives, races, synchronizations (waits of the host) and these by their reason: waits_item, ...
counters, reset_counters = _device.counters, _device.reset_counters
kernel_counts = _device.kernel_counts
races = _device.races  # what the first 100 races were
contexts = _device.contexts  # the devices that this process has a context on
set_sync_mode = _device.set_sync_mode  # "error": a wait of the host raises where it happens

module = make_module(NAME)


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Fill a dictionary with what was counted within."""
    before, counted = counters(), {}
    try:
        yield counted
    finally:
        counted.update({name: count - before[name] for name, count in counters().items()})


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
    return _device.Group(gloo, rank, size)


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, module)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
)
if torch.distributed.is_available():
    torch.distributed.Backend.register_backend(BACKEND, _make_group, devices=[NAME])

_backwards: set[str] = set()
forget_backwards = _backwards.clear


def _note_backwards(log: str) -> None:
    """Note once, a line in a file of all processes, that a backward pass ran on a kind of device."""
    run = torch.autograd._engine_run_backward

    def noted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            is_real = not isinstance(output, torch._subclasses.FakeTensor)
            if is_real and output.device.type not in _backwards:
                _backwards.add(output.device.type)
                with Path(log).open("a") as file:
                    file.write(f"{output.device.type}\n")
        return run(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = noted


if "PRETEND_BACKWARD_LOG" in os.environ:
    _note_backwards(os.environ["PRETEND_BACKWARD_LOG"])
