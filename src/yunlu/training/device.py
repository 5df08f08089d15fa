"""The device that trains: every question about it goes through here.

Torch's generic interface answers for any accelerator (``torch.accelerator``, ``torch.get_device_module``);
what is specific to a kind stands in ``device_kinds/``, one file each. Nowhere else is a kind named.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from yunlu.core.settings import read_accelerators
from yunlu.training.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import Tensor, nn

CPU = torch.device("cpu")
_KINDS = {"cuda": "CudaKind", "npu": "NpuKind", "xpu": "XpuKind", "mps": "MpsKind"}


@cache
def kind_of(name: str) -> DeviceKind:
    """What is specific to a kind of accelerator, by torch's name for it."""
    if name not in _KINDS:
        return DeviceKind(name)
    return getattr(import_module(f"yunlu.training.device_kinds.{name}"), _KINDS[name])(name)


def accelerator_kind() -> str | None:
    """The kind of accelerator that torch can use here; None if there is only the CPU.

    Opens no context: workers are forked from processes that ask this (``AcceleratorKind.worker``).
    """
    if read_accelerators()[0].strip() == "cpu":  # YUNLU_ACCELERATORS: use none of them
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def is_accelerator(device: torch.device) -> bool:
    """Whether it is anything but the CPU."""
    return device.type != "cpu"


def open_device(kind: str, slot: int = 0) -> torch.device:
    """This process's device, made current: code that only names the kind uses it, too.

    Some launchers show only its own device to each worker, hence the remainder.
    """
    if kind == "cpu" or not kind_of(kind).has_groups:
        return torch.device(kind)
    device = torch.device(kind, slot % max(1, torch.accelerator.device_count()))
    torch.accelerator.set_device_index(device.index)
    return device


def use_device(device: torch.device) -> None:
    """Make it the current device of this thread: each thread begins with the first one."""
    index = cast("int | None", device.index)
    if is_accelerator(device) and index is not None:
        torch.accelerator.set_device_index(index)


def sum_type(device: torch.device) -> torch.dtype:
    """The type of sums of many numbers: accelerators have no float64, or a very slow one."""
    return torch.float32 if is_accelerator(device) else torch.float64


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all that was asked of it."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies can be made beside the computation, from and to pinned memory."""
    return device.type == accelerator_kind() and kind_of(device.type).has_pinned_memory


def record_event(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """An event after all that this thread has asked of the device so far."""
    event = torch.Event(device, enable_timing=is_timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def elapsed_s(begin: torch.Event, end: torch.Event) -> float:
    """Seconds of the device between two timed events; 0 if it has not reached the second."""
    return begin.elapsed_time(end) / 1e3 if end.query() else 0.0


def can_pin(devices: Iterable[torch.device]) -> bool:
    """Whether pinned memory makes copies from these devices faster: not for a job that uses none."""
    return any(
        is_accelerator(device) and kind_of(device.type).has_pinned_memory for device in devices
    )


def group_backends(device: torch.device) -> str:
    """Backends of a process group: the device's own, and gloo for numbers that stay on the host."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{backend_of(device)}"


def backend_of(device: torch.device) -> str:
    """The backend that moves tensors of this device."""
    return dist.get_default_backend_for_device(device.type) if is_accelerator(device) else "gloo"


def bound_device(device: torch.device) -> torch.device | None:
    """The device to name when the groups of a world are formed; None if they connect when first used.

    With it a library connects all workers once, and divides that group into those of the axes. Without it
    each group connects in its first message, and a fault of the network shows in the middle of a step.
    """
    is_known = is_accelerator(device) and kind_of(device.type).connects_at_once
    return device if is_known else None


def message_device(group: Any) -> torch.device:
    """Where the tensors of messages are for this group: the host wherever it has a backend for it."""
    try:
        group_of_all: Any = group or dist.group.WORLD
        group_of_all._get_backend(CPU)
    except RuntimeError:
        kind = accelerator_kind()
        assert kind is not None
        return torch.device(kind, torch.accelerator.current_device_index())
    return CPU


def abort_groups(device: torch.device, groups: Iterable[Any]) -> None:
    """End the collectives that wait on the device for other workers: no socket of ours ends those."""
    if not is_accelerator(device):
        return
    for group in groups:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # a group of the host
            continue
        kind_of(device.type).abort(backend)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator of this device."""
    if is_accelerator(device):
        kind_of(device.type).module.manual_seed(seed)


def max_memory_bytes(device: torch.device) -> int | None:
    """Most bytes of tensors that this device held so far; None where nobody counts."""
    return kind_of(device.type).max_memory_bytes(device) if is_accelerator(device) else None


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device. Weights that its modules share stay shared.

    Torch replaces the parameters of a model that it moves to a device of another maker (PrivateUse1),
    each for itself.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(weight, []).append((module, name))
    model.to(device)
    for (first, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, first.get_parameter(first_name))
    return model


def used_kind() -> str | None:
    """The kind of accelerator that this process has begun to use; None if it uses none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    ask = getattr(kind_of(accelerator.type).module, "is_initialized", None)
    return accelerator.type if ask is None or ask() else None


def random_state() -> Tensor | None:
    """State of the current device's generator; None if this process uses no accelerator."""
    kind = used_kind()
    return None if kind is None else kind_of(kind).module.get_rng_state()


@contextmanager
def random_kept() -> Generator[None]:
    """Draw random numbers inside the block without changing those after it.

    ``torch.random.fork_rng`` initialises every device of the machine.
    """
    on_host, on_device = torch.get_rng_state(), random_state()
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        restore_random_state(on_device)


def restore_random_state(state: Tensor | None) -> None:
    """Restore what ``random_state`` returned, on whatever accelerator this process uses now."""
    kind = used_kind()
    if state is not None and kind is not None:
        kind_of(kind).module.set_rng_state(state)


def free_cache() -> None:
    """Give cached memory back to the device."""
    kind = used_kind()
    if kind is not None:
        kind_of(kind).module.empty_cache()
