"""Out-of-memory errors: detect them, undo the failed attempt, retry with a smaller micro-batch."""

from __future__ import annotations

import errno
import gc
import resource
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import torch

from yunlu.core.errors import TrainingError
from yunlu.planning.planner import cap_bytes
from yunlu.training.device import free_cache, random_state, restore_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.spec.job import Job

T = TypeVar("T")

_copy_all: Any = cast("Any", torch)._foreach_copy_  # one call for many small tensors

# Messages of torch, its libraries and C++, where the error has no type of its own.
_MESSAGES = (
    "can't allocate memory",  # torch on the CPU
    "not enough memory",  # torch on the CPU, Windows
    "Cannot allocate memory",  # the operating system
    "out of memory",  # most accelerators
    "EL0004",  # Ascend
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# Messages of oneDNN; also raised for a missing kernel.
_AMBIGUOUS_MESSAGES = ("could not create a primitive", "could not create a memory object")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what caused it, is memory running out on any device."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) and _is_allocation_message(str(cause)):
            return True
        cause = cause.__cause__
    return False


def _is_allocation_message(message: str) -> bool:
    if any(phrase in message for phrase in _MESSAGES):
        return True
    # Without a limit Linux never refuses memory: then a kernel is missing.
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return is_limited and any(phrase in message for phrase in _AMBIGUOUS_MESSAGES)


def smaller(micro_batch: int) -> int | None:
    """The next micro-batch to try: half, rounded up; None below 1."""
    return None if micro_batch <= 1 else -(-micro_batch // 2)


def with_less_memory(
    attempt: Callable[[int], T],
    micro_batch: int,
    *,
    undo: Callable[[], None],
    on_shrink: Callable[[int, str], None],
) -> tuple[T, int]:
    """The result of ``attempt``, and the micro-batch that was small enough for it.

    Args:
        attempt: Runs with a micro-batch; must not keep tensors outside its own frames.
        micro_batch: The first to try; halved as long as memory runs out.
        undo: Reverts the changes of the failed attempt.
        on_shrink: Receives the next micro-batch and the error message.
    """
    while True:
        try:
            return attempt(micro_batch), micro_batch
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = _first_line(error)
            next_size = smaller(micro_batch)
            if next_size is None:
                raise TrainingError(
                    f"Memory ran out with a micro-batch of one sample: {message}",
                    hint="Set train.recompute to full, train.optimizer.state to 8bit, shorten "
                    "data.max_length, take a smaller model, or raise train.memory_gb.",
                ) from error
            release_references(error)
        undo()
        free_memory()
        on_shrink(next_size, message)
        micro_batch = next_size


def release_references(error: BaseException) -> None:
    """Clear the local variables of an error's frames: they hold tensors."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def free_memory() -> None:
    """Collect garbage, and empty the device's allocator cache."""
    gc.collect()
    free_cache()


class StepRestorePoint:
    """State that a step may change before its update, saved when the step began.

    Cheap enough for every step: random numbers, and the running averages of norms. Not for
    gradient release, which changes weights before a step can fail.
    """

    def __init__(self, *parts: nn.Module) -> None:
        self._parts = parts
        self._buffers: list[torch.Tensor] = []
        for part in parts:
            names = set(part.state_dict())
            # Those outside the state dict are tables, not state.
            self._buffers += [buffer for name, buffer in part.named_buffers() if name in names]
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self.mark()

    @torch.no_grad()
    def mark(self) -> None:
        """Save the state at the beginning of a step."""
        self._random = torch.get_rng_state()
        self._device_random = random_state()
        if self._buffers:
            _copy_all(self._copies, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state of ``mark``, and drop the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        torch.set_rng_state(self._random)
        restore_random_state(self._device_random)
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore only the buffers: a skipped step must not change running averages."""
        if self._buffers:
            _copy_all(self._buffers, self._copies)


def cap_of_worker(
    job: Job, machine: Machine, device: torch.device, *, workers: int
) -> float | None:
    """Memory limit of one of the workers that share a machine; None for no limit."""
    cap = cap_bytes(job, machine)
    return None if cap is None or device.type != "cpu" else cap / workers


@contextmanager
def memory_capped(more_bytes: float | None) -> Generator[None]:
    """Limit this process to ``more_bytes`` more memory: beyond, allocations raise errors.

    Linux overcommits memory and kills processes that use it; only a self-imposed limit raises an
    error instead. Does nothing for ``None``, and on systems without such a limit.
    """
    if more_bytes is None or sys.platform != "linux":
        yield
        return
    with _cap_lock:
        _caps.append(resource.getrlimit(resource.RLIMIT_DATA))
        soft, hard = _caps[0]
        # Private writable memory, which weights and activations are; files and libraries are not,
        # nor the address space that GPU drivers reserve, which RLIMIT_AS would count.
        cap = psutil.Process().memory_info().data + int(more_bytes)
        allowed = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([cap, *allowed]), hard))
    try:
        yield
    finally:
        with _cap_lock:
            before = _caps[0]
            _caps.pop()
            if not _caps:  # runs in other threads may still need theirs
                resource.setrlimit(resource.RLIMIT_DATA, before)


_cap_lock = threading.Lock()
_caps: list[tuple[int, int]] = []


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
