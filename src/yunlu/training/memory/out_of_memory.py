"""When memory runs out: know it, take the failed attempt back, and go on with less at a time."""

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

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from yunlu.hardware.machine import Machine
    from yunlu.spec.job import Job

T = TypeVar("T")

_copy_all: Any = cast("Any", torch)._foreach_copy_  # one call for many small tensors

# How torch, its libraries and C++ say it, where the error has no type of its own.
_WORDS = (
    "can't allocate memory",  # torch on the CPU
    "not enough memory",  # torch on the CPU, Windows
    "Cannot allocate memory",  # the operating system
    "out of memory",  # CUDA, ROCm, MPS, XPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# How oneDNN says it; it also says so where it lacks a kernel.
_VAGUE_WORDS = ("could not create a primitive", "could not create a memory object")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what caused it, is memory running out on any device."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) and _tells_of_shortage(str(cause)):
            return True
        cause = cause.__cause__
    return False


def _tells_of_shortage(message: str) -> bool:
    if any(words in message for words in _WORDS):
        return True
    # Without a limit Linux refuses no memory, so then it is the kernel that is missing.
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return is_limited and any(words in message for words in _VAGUE_WORDS)


def smaller(micro_batch: int) -> int | None:
    """The next micro-batch to try: half, rounded up so that the pieces stay even; none below 1."""
    return None if micro_batch <= 1 else -(-micro_batch // 2)


def with_less_memory(
    attempt: Callable[[int], T],
    micro_batch: int,
    *,
    undo: Callable[[], None],
    told: Callable[[int, str], None],
) -> tuple[T, int]:
    """What ``attempt`` returns, and the micro-batch that was small enough for it.

    Args:
        attempt: Does the work with a micro-batch; must not keep tensors outside its own frames.
        micro_batch: The first to try; halved as long as memory runs out.
        undo: Takes back what the failed attempt changed.
        told: Learns the next micro-batch and what the failed one died of.
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
        told(next_size, message)
        micro_batch = next_size


def release_references(error: BaseException) -> None:
    """Forget the variables of the frames that an error passed through: they hold its tensors."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def free_memory() -> None:
    """Give back what nobody holds: cycles of objects, and what a device's allocator hoards."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


class StepRestorePoint:
    """What a step may change before its update, as it stood when the step began.

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
        """The step begins now."""
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        if self._buffers:
            _copy_all(self._copies, self._buffers)

    @torch.no_grad()
    def bring_back(self) -> None:
        """As if the step had not begun: gradients are dropped too."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)
        self.bring_back_buffers()

    @torch.no_grad()
    def bring_back_buffers(self) -> None:
        """Only the running averages: a step that is left out must leave nothing of itself there."""
        if self._buffers:
            _copy_all(self._buffers, self._copies)


def cap_of_worker(
    job: Job, machine: Machine, device: torch.device, *, workers: int
) -> float | None:
    """What one of the workers that share the memory of a machine may take; none for no limit."""
    cap = cap_bytes(job, machine)
    return None if cap is None or device.type != "cpu" else cap / workers


@contextmanager
def memory_capped(more_bytes: float | None) -> Generator[None]:
    """Let this process take so much more memory, and then get errors instead of being killed.

    Linux promises more memory than there is and kills who uses it; a process can only survive a
    shortage that it set itself. Does nothing for ``None``, and on systems that keep no such limit.
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
