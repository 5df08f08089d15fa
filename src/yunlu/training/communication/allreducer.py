"""All-reduce for the engine: started during the backward pass, waited for after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from yunlu.training.communication.transport import LinkLostError, Traffic, Transport
from yunlu.training.device import has_streams, record_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn


__all__ = ["AllReducer", "PendingAllReduce", "ThreadedAllReducer", "TorchAllReducer", "Traffic"]

_NUMPY_DTYPES = (torch.float32, torch.float64)


class PendingAllReduce(Protocol):
    """An all-reduce in flight."""

    def wait(self) -> None:
        """Wait until the tensor holds the sum over all workers; raises its error."""
        ...


class AllReducer(Protocol):
    """All-reduces gradients over the workers."""

    is_exact: bool
    """Whether the sum is exact but for rounding; with a negative key it always is."""

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:
        """Start to all-reduce a tensor in place; it must not be touched before ``wait``.

        Args:
            flat: One-dimensional, of the same length on every worker.
            key: Index of the tensor in the step; all workers start them in the same order.
        """
        ...

    def traffic(self) -> Traffic:
        """Bytes sent so far."""
        ...

    def commit(self) -> None:
        """The step was applied: keep the residuals of the last sums."""
        ...

    def revert(self) -> None:
        """The step was discarded: return to the residuals before it."""
        ...

    def error(self) -> float | None:
        """Relative compression error of the last sums; None if exact."""
        ...

    def state(self) -> dict[str, Tensor]:
        """State to checkpoint."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state``."""
        ...

    def abort(self) -> None:
        """End every wait with an error; from any thread."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class _Exact:
    """Of an all-reducer whose sums are exact: no residuals, hence no state."""

    is_exact = True

    def commit(self) -> None:
        """Exact: no residual."""

    def revert(self) -> None:
        """Exact: no residual."""

    def error(self) -> float | None:
        """None: exact."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Stateless."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Stateless."""


class TorchAllReducer(_Exact):
    """All-reduce by torch's backend: gloo or NCCL.

    Args:
        group: The process group.
        wait_for: Waits for an operation in flight.
        cut: Aborts the group's operations, from any thread.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wait_for: Callable[[dist.Work], object] = dist.Work.wait,
        *,
        cut: Callable[[], object] | None = None,
    ) -> None:
        self._group = group
        self._wait_for = wait_for
        self._cut = cut or group.abort
        self._traffic = Traffic()

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:  # noqa: ARG002 - stateless
        """See ``AllReducer``."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        size = self._group.size()
        # The backends do not count bytes: this is the cost of a ring, which both use.
        moved_bytes = 2 * (size - 1) * flat.nbytes // size
        self._traffic.sent_bytes += moved_bytes
        self._traffic.received_bytes += moved_bytes
        self._traffic.messages += 2 * (size - 1)
        return _TorchPending(work, self._wait_for)

    def traffic(self) -> Traffic:
        """Bytes a ring sends for the sums so far."""
        return self._traffic

    def abort(self) -> None:
        """See ``AllReducer``."""
        self._cut()

    def close(self) -> None:
        """The group belongs to its creator."""


@dataclass(frozen=True, slots=True)
class _TorchPending:
    work: dist.Work
    wait_for: Callable[[dist.Work], object]

    def wait(self) -> None:
        self.wait_for(self.work)


@dataclass(slots=True, eq=False)
class _Task:
    """One all-reduce of the thread, and its handle."""

    target: Tensor
    flat: Tensor
    """The target tensor, or a CPU copy of it."""
    key: int
    tag: int
    arrival: torch.Event | None = None
    """When the copy is complete, if the tensor is on an accelerator."""
    done: Event = field(default_factory=Event)
    failure: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            raise self.failure
        if self.flat is not self.target:
            # From pinned memory the device copies after the work it has: the host need not wait.
            self.target.copy_(self.flat, non_blocking=self.arrival is not None)


class ThreadedAllReducer(_Exact):
    """All-reduces on a transport in a thread of its own, in the order in which they were started.

    Args:
        transport: Closed with this.
        run: ``run(transport, flat, key, tag)`` leaves the sum over all workers in ``flat``.
    """

    def __init__(
        self, transport: Transport, run: Callable[[Transport, Tensor, int, int], None]
    ) -> None:
        self._transport = transport
        self._run = run
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._next_tag = 0
        self._failure: BaseException | None = None
        self._lock = Lock()
        self._is_closed = False
        self._stream: torch.Stream | None = None
        self._thread = Thread(target=self._run_tasks, name="all-reduce", daemon=True)
        self._thread.start()

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:
        """See ``AllReducer``; tensors on a device or in 16 bits are sent as fp32 copies."""
        is_sendable = flat.device.type == "cpu" and flat.dtype in _NUMPY_DTYPES
        buffer, arrival = (flat, None) if is_sendable else self._copy_to_host(flat)
        task = _Task(flat, buffer, key, self._next_tag, arrival)
        self._next_tag += 1
        with self._lock:
            if self._is_closed:
                raise LinkLostError(self._transport.rank, "the all-reducer was closed")
            self._tasks.put(task)
        return task

    def _copy_to_host(self, flat: Tensor) -> tuple[Tensor, torch.Event | None]:
        """A copy in FP32; on an accelerator it is made beside the backward pass, which goes on."""
        if not has_streams(flat.device):
            return flat.to("cpu", torch.float32), None
        ready = record_event(flat.device)
        if self._stream is None or self._stream.device != flat.device:
            self._stream = torch.Stream(flat.device)
        self._stream.wait_event(ready)
        buffer = torch.empty(flat.shape, dtype=torch.float32, pin_memory=True)
        with self._stream:
            buffer.copy_(flat, non_blocking=True)
            return buffer, record_event(flat.device)

    def traffic(self) -> Traffic:
        """See ``AllReducer``."""
        return self._transport.traffic

    def abort(self) -> None:
        """See ``AllReducer``."""
        self._transport.abort()

    def close(self) -> None:
        """Abort what is in flight and close the connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tasks.put(None)
        self._transport.abort()
        self._thread.join()
        self._transport.close()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._failure is None:
                try:
                    if task.arrival is not None:
                        task.arrival.synchronize()
                    self._run(self._transport, task.flat, task.key, task.tag)
                except BaseException as error:  # noqa: BLE001 - raised by ``wait``
                    self._failure = error
                    self._transport.abort()  # the peers would wait forever
            task.failure = self._failure
            task.done.set()


_ALIGNED_BYTES = 64


def _identity(weight: Tensor) -> Tensor:
    return weight


def split_buckets(
    weights: Sequence[nn.Parameter],
    bucket_bytes: int,
    *,
    local: Callable[[Tensor], Tensor] = _identity,
) -> list[list[nn.Parameter]]:
    """Weights of one dtype and device together, in reverse order: their gradients are ready first.

    Args:
        weights: In the order in which the model uses them.
        bucket_bytes: Bytes per bucket; larger gradients have their own.
        local: The local part of a weight.
    """
    full: list[tuple[int, list[nn.Parameter]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, list[nn.Parameter]]] = {}
    for position, weight in enumerate(reversed(weights)):
        here = local(weight)
        kind = (here.dtype, here.device)
        size, group = filling.pop(kind, (0, []))
        if group and size + here.nbytes > bucket_bytes:
            full.append((position, group))
            size, group = 0, []
        filling[kind] = (size + here.nbytes, [*group, weight])
    partial = [(len(weights), group) for _, group in filling.values()]
    return [group for _, group in sorted([*full, *partial], key=lambda item: item[0])]


def starts_of(
    group: Sequence[nn.Parameter], *, local: Callable[[Tensor], Tensor] = _identity
) -> tuple[list[int], int]:
    """Offset of each weight's gradient in its bucket, and the end."""
    starts: list[int] = []
    end = 0
    for weight in group:
        starts.append(end)
        aligned = max(1, _ALIGNED_BYTES // weight.element_size())
        end += -(-local(weight).numel() // aligned) * aligned
    return starts, end
