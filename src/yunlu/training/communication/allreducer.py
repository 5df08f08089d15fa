"""The engine's door to sums over all workers: begun while the backward pass runs, waited for after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from yunlu.training.communication.transport import LinkLostError, Traffic, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["AllReducer", "PendingAllReduce", "ThreadedAllReducer", "TorchAllReducer", "Traffic"]

_NUMPY_DTYPES = (torch.float32, torch.float64)


class PendingAllReduce(Protocol):
    """A sum under way."""

    def wait(self) -> None:
        """Return when the tensor holds the sum over all workers; raise what went wrong."""
        ...


class AllReducer(Protocol):
    """How gradients are added up over the workers."""

    is_exact: bool
    """Whether a sum is that of what was given, but for rounding; with a key below zero all are."""

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:
        """Start to add up a tensor in place, which nobody touches until the sum has been waited for.

        Args:
            flat: One-dimensional, as long on every worker.
            key: Which of the step's tensors this is; every worker begins them in the same order.
        """
        ...

    def traffic(self) -> Traffic:
        """What was sent so far."""
        ...

    def commit(self) -> None:
        """The step that the last sums were for was taken: what they left out is still to be sent."""
        ...

    def revert(self) -> None:
        """It was not: what was left out before it still is."""
        ...

    def error(self) -> float | None:
        """What the last sums left out, relative to what they were given; none where exact."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What is kept from step to step, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave."""
        ...

    def abort(self) -> None:
        """End every wait with an error; from any thread."""
        ...

    def close(self) -> None:
        """Let go of the connections."""
        ...


class TorchAllReducer:
    """Sums by torch's own backend: gloo or NCCL.

    Args:
        group: Over whom to add.
        wait_for: Waits for a sum that is under way.
        cut: Ends the group's waits, from any thread.
    """

    is_exact = True

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

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:  # noqa: ARG002 - it keeps nothing by key
        """See ``AllReducer``."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        size = self._group.size()
        # The backends do not count: this is what a ring needs, and both of them use rings.
        moved_bytes = 2 * (size - 1) * flat.nbytes // size
        self._traffic.sent_bytes += moved_bytes
        self._traffic.received_bytes += moved_bytes
        self._traffic.messages += 2 * (size - 1)
        return _TorchPending(work, self._wait_for)

    def traffic(self) -> Traffic:
        """What a ring sends for the sums so far."""
        return self._traffic

    def commit(self) -> None:
        """Nothing was left out."""

    def revert(self) -> None:
        """Nothing was left out."""

    def error(self) -> float | None:
        """None: exact."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """See ``AllReducer``."""
        self._cut()

    def close(self) -> None:
        """Nothing: the group belongs to who made it."""


@dataclass(frozen=True, slots=True)
class _TorchPending:
    work: dist.Work
    wait_for: Callable[[dist.Work], object]

    def wait(self) -> None:
        self.wait_for(self.work)


@dataclass(slots=True, eq=False)
class _Task:
    """One sum for the thread; also what its beginner waits with."""

    given: Tensor
    flat: Tensor
    """What travels: the given tensor, or a copy in a kind of memory that can."""
    key: int
    tag: int
    done: Event = field(default_factory=Event)
    failure: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            raise self.failure
        if self.flat is not self.given:
            self.given.copy_(self.flat)


class ThreadedAllReducer:
    """Sums over a wire by one thread of its own, in the order in which they were begun.

    Args:
        wire: Closed with this.
        run: ``run(wire, flat, key, tag)`` leaves the sum over all workers in ``flat``.
    """

    is_exact = True

    def __init__(
        self, transport: Transport, run: Callable[[Transport, Tensor, int, int], None]
    ) -> None:
        self._transport = transport
        self._run = run
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._begun = 0
        self._failure: BaseException | None = None
        self._lock = Lock()
        self._is_closed = False
        self._thread = Thread(target=self._serve, name="summation", daemon=True)
        self._thread.start()

    def begin(self, flat: Tensor, *, key: int) -> PendingAllReduce:
        """See ``AllReducer``; a tensor on a device or in 16 bits travels as a copy in 32."""
        can_travel = flat.device.type == "cpu" and flat.dtype in _NUMPY_DTYPES
        moving = flat if can_travel else flat.to("cpu", torch.float32)
        task = _Task(flat, moving, key, self._begun)
        self._begun += 1
        with self._lock:
            if self._is_closed:
                raise LinkLostError(self._transport.rank, "the exchange was closed")
            self._tasks.put(task)
        return task

    def traffic(self) -> Traffic:
        """See ``AllReducer``."""
        return self._transport.traffic

    def commit(self) -> None:
        """Nothing was left out."""

    def revert(self) -> None:
        """Nothing was left out."""

    def error(self) -> float | None:
        """None: exact."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """See ``AllReducer``."""
        self._transport.abort()

    def close(self) -> None:
        """End what is under way with an error, and hang up."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tasks.put(None)
        self._transport.abort()
        self._thread.join()
        self._transport.close()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._failure is None:
                try:
                    self._run(self._transport, task.flat, task.key, task.tag)
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    self._failure = error
                    self._transport.abort()  # the others wait for what will not come
            task.failure = self._failure
            task.done.set()
