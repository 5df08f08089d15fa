"""The device's module, as ``torch.cuda`` is CUDA's: ``torch.get_device_module("npu")``."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from pretend_accelerator import _device

accelerator = torch.accelerator


def index_of(device: Any = None) -> int:
    """The number of a device given by name, number or nothing."""
    if device is None:
        return accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return accelerator.current_device_index() if index is None or index < 0 else index


class Properties:
    """What the device says of itself."""

    multi_processor_count = 1
    major, minor = 9, 0

    def __init__(self, index: int) -> None:
        self.name = f"Pretend {_device.device_name()} {_device.visible_devices()[index]}"
        self.total_memory = accelerator.get_memory_info(index)[1]


def make_module(name: str) -> types.ModuleType:
    """Build the module; torch's generic functions do most of the work."""
    module = types.ModuleType(f"torch.{name}")

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
            return torch.Stream(torch.device(name, index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> torch.Event:
            return torch.Event(name, enable_timing=enable_timing)

    class device(accelerator.device_index):  # noqa: N801 - as torch.cuda.device
        def __init__(self, device: Any) -> None:
            super().__init__(index_of(device))

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with accelerator.device_index(stream.device.index):
            before = accelerator.current_stream(stream.device)
            accelerator.set_stream(stream)
            try:
                yield
            finally:
                accelerator.set_stream(before)

    def default_stream(device: Any = None) -> torch.Stream:
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return torch.Stream(stream_id=0, device_index=index_of(device), device_type=kind)

    def generator(device: Any = None) -> torch.Generator:
        return _device.default_generator(index_of(device))

    def all_devices() -> range:
        return range(_device.device_count())

    def manual_seed_all(seed: int) -> None:
        for index in all_devices():
            generator(index).manual_seed(int(seed))

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            generator(index).set_state(state)

    def memory(function: str) -> Any:
        return lambda device=None: getattr(accelerator, function)(index_of(device))

    vars(module).update(
        Stream=Stream,
        Event=Event,
        device=device,
        stream=stream,
        StreamContext=stream,
        default_stream=default_stream,
        is_available=lambda: _device.device_count() > 0,
        device_count=_device.device_count,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(index_of(device)),
        synchronize=lambda device=None: accelerator.synchronize(index_of(device)),
        init=_device.init,
        _lazy_init=_device.init,
        is_initialized=_device.is_initialized,
        _is_in_bad_fork=_device.is_in_bad_fork,
        current_stream=lambda device=None: accelerator.current_stream(index_of(device)),
        set_stream=accelerator.set_stream,
        is_current_stream_capturing=lambda: False,
        empty_cache=accelerator.empty_cache,
        mem_get_info=memory("get_memory_info"),
        get_device_properties=lambda device=None: Properties(index_of(device)),
        get_device_name=lambda device=None: Properties(index_of(device)).name,
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *_: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: generator(device).get_state(),
        set_rng_state=lambda state, device=None: generator(device).set_state(state),
        get_rng_state_all=lambda: [generator(index).get_state() for index in all_devices()],
        set_rng_state_all=set_rng_state_all,
        manual_seed=lambda seed: generator().manual_seed(int(seed)),
        manual_seed_all=manual_seed_all,
        initial_seed=lambda: generator().initial_seed(),
        **{
            function: memory(function)
            for function in (
                "memory_stats",
                "memory_allocated",
                "max_memory_allocated",
                "memory_reserved",
                "max_memory_reserved",
                "reset_peak_memory_stats",
                "reset_accumulated_memory_stats",
            )
        },
    )
    return module
