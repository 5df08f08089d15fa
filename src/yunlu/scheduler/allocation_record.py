"""Allocation record of a run: devices it holds, pending action, failures, usage.

An intention is written before it is carried out, and is struck out only when the run itself shows
that it has come true or will not. A service that is killed in between leaves it to the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from yunlu.core.value import Value
from yunlu.hardware.fleet import Placement
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.scheduler.run_status import RunObservation

MOST_FAILURES = 3
"""Consecutive failures without a new step after which the run is given up."""
STALLED = "stalled"
"""Reason of the stop of a stalled run; counted as a failure."""
_FIRST_WAIT_S, _MORE, _LONGEST_WAIT_S = 5.0, 4.0, 600.0

Shares = tuple[tuple[str, int], ...]


class PendingAction(Value):
    """Action that is about to be executed."""

    kind: Literal["start", "resize", "stop"]
    shares: Shares = ()
    """Devices it holds afterwards, by node."""
    reason: str = ""
    by: str = ""
    """Service that planned it."""


class RecordedTiming(Value):
    """Step times in one configuration; kept for similar runs."""

    device_type: str
    nodes: int
    devices: int
    local_batch: int
    accumulate_s: float
    step_s: float


class AllocationRecord(Value):
    """Everything the pool stores about one run."""

    ticket: int = 0
    """Ticket of the queue entry that this record belongs to."""
    shares: Shares = ()
    """Devices it holds, by node; a device is held until no process uses it any more."""
    held_since: float | None = None
    pending: PendingAction | None = None
    failures: int = 0
    """Consecutive failures, without a new step between them."""
    failed_at: float | None = None
    failed_step: int = 0
    failure: str = ""
    given_up: str = ""
    """Why it is not retried."""
    restarts: int = 0
    served_device_s: float = 0.0
    spent_dollars: float = 0.0
    seen: tuple[RecordedTiming, ...] = ()

    @property
    def placement(self) -> Placement:
        """What it holds."""
        return Placement(self.shares)

    @property
    def claims(self) -> dict[str, int]:
        """Reserved devices: those it holds and, while it is resized, those it will hold."""
        claims = dict(self.shares)
        for name, count in self.pending.shares if self.pending else ():
            claims[name] = max(count, claims.get(name, 0))
        return claims

    def wait_s(self) -> float:
        """Back-off time after the last failure."""
        if not self.failures:
            return 0.0
        return min(_FIRST_WAIT_S * _MORE ** (self.failures - 1), _LONGEST_WAIT_S)

    def is_backing_off(self, now: float) -> bool:
        """Whether it is too early to retry. A clock that was set back ends the wait."""
        if self.failed_at is None:
            return False
        return 0 <= now - self.failed_at < self.wait_s()


def read_allocation(run: RunStore) -> AllocationRecord:
    """The stored record; an empty one if it is missing or unreadable: it can be rebuilt."""
    try:
        content = run.read(Document.ALLOCATION)
        return (
            AllocationRecord() if content is None else AllocationRecord.model_validate_json(content)
        )
    except (OSError, ValidationError):
        return AllocationRecord()


def write_allocation(
    run: RunStore, allocation: AllocationRecord, *, is_pending: bool = False
) -> None:
    """Write the record; a pending action is on disk before it is executed."""
    run.write(Document.ALLOCATION, allocation.model_dump_json(), durable=is_pending)


def reconcile(
    entry: QueueEntry,
    allocation: AllocationRecord,
    observation: RunObservation,
    *,
    now: float,
    nodes: AbstractSet[str],
    service: str = "",
) -> AllocationRecord:
    """The record updated by an observation of the run. Pure and idempotent.

    Args:
        entry: What is wanted of it.
        allocation: Record before the observation.
        observation: Observed state of the run.
        now: On the pool's clock.
        nodes: Machines that are there.
        service: Who asks: what another one meant to do may have been cut short.
    """
    if entry.ticket != allocation.ticket:
        fresh = {"failures": 0, "failed_at": None, "given_up": "", "ticket": entry.ticket}
        allocation = allocation.model_copy(update=fresh)
    if observation.is_alive:
        return _resolve_alive(allocation, observation, now, service)
    if not allocation.shares and allocation.pending is None:
        return allocation
    if observation.state.is_active and (
        observation.has_begun or observation.state is not RunState.PENDING
    ):
        return allocation  # its end has not been recorded yet
    freed = allocation.model_copy(update={"shares": (), "pending": None, "held_since": None})
    if _is_nobodys_fault(entry, allocation, observation, nodes, service):
        moved = allocation.held_since is not None and observation.state is not RunState.FINISHED
        return freed.model_copy(update={"restarts": allocation.restarts + moved})
    return _count_failure(freed, observation, now)


def _resolve_alive(
    allocation: AllocationRecord, observation: RunObservation, now: float, service: str
) -> AllocationRecord:
    shares, pending, since = allocation.shares, allocation.pending, allocation.held_since
    kind = pending.kind if pending is not None else None
    wanted = pending.shares if pending is not None else ()
    if kind == "start":
        shares, pending = wanted, None
    elif kind == "resize" and _takes(observation, wanted):
        shares, pending, since = wanted, None, now
    elif kind == "resize" and (observation.is_settled or _is_of_another(pending, service)):
        pending = None  # interrupted, or ended differently
    if pending is None and observation.devices and not _takes(observation, shares):
        # Another process started or resized it: what it uses, it holds.
        shares, since = (
            observation.shares or _with_devices(shares, observation.devices, observation.node),
            now,
        )
    elif pending is None and observation.shares:
        shares = observation.shares  # the same; the coordinator's node first
    restarts = allocation.restarts + (
        since != allocation.held_since and allocation.held_since is not None
    )
    changes = {
        "shares": shares,
        "pending": pending,
        "held_since": now if since is None else since,
        "restarts": restarts,
    }
    return allocation.model_copy(update=changes)


def _is_nobodys_fault(
    entry: QueueEntry,
    allocation: AllocationRecord,
    observation: RunObservation,
    nodes: AbstractSet[str],
    service: str,
) -> bool:
    """Whether the end of a run is not its own failure."""
    if observation.state is RunState.FINISHED or entry.wish != "run":
        return True
    if observation.lost_nodes or any(name not in nodes for name, _ in allocation.shares):
        return True  # its machine is gone
    pending = allocation.pending
    if pending is not None and pending.kind == "stop":
        return pending.reason != STALLED
    if observation.state is RunState.STOPPED and observation.step > allocation.failed_step:
        return True  # it made progress, and was stopped by somebody who has resumed it since
    if pending is None:
        return False
    is_unborn = pending.kind == "start" and not observation.has_begun
    is_cut_short = is_unborn and observation.state is not RunState.FAILED
    return is_cut_short and _is_of_another(pending, service)


def _count_failure(
    allocation: AllocationRecord, observation: RunObservation, now: float
) -> AllocationRecord:
    has_moved = observation.step > allocation.failed_step
    failures = 1 if has_moved else allocation.failures + 1
    why = observation.error or f"it ended as {observation.state}"
    given_up = ""
    if observation.is_hopeless:
        given_up = f"it would fail again: {why}"
    elif failures >= MOST_FAILURES:
        given_up = f"it failed {failures} times in a row without a new step; the last time: {why}"
    changes = {
        "failures": failures,
        "failed_at": now,
        "failed_step": max(observation.step, allocation.failed_step),
        "failure": why,
        "given_up": given_up,
        "restarts": allocation.restarts + 1,
    }
    return allocation.model_copy(update=changes)


def _is_of_another(pending: PendingAction | None, service: str) -> bool:
    """Whether the action was planned by a service that no longer runs."""
    return pending is not None and pending.by != service


def _takes(observation: RunObservation, shares: Shares) -> bool:
    """Whether a run uses exactly these devices: on each node, where that is known."""
    if observation.shares:
        return dict(observation.shares) == dict(shares)
    return observation.devices == Placement(shares).devices


def _with_devices(shares: Shares, devices: int, node: str) -> Shares:
    """The same nodes with another number of devices; the difference is on the first node."""
    more = devices - Placement(shares).devices
    first, rest = (shares[0], shares[1:]) if shares else ((node, 0), ())
    if first[1] + more > 0:
        return ((first[0], first[1] + more), *rest)
    return ((first[0], devices),)
