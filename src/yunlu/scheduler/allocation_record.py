"""The pool's notes on a run: what it was given, and what is about to happen to it.

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
    from yunlu.scheduler.observation import RunObservation
    from yunlu.scheduler.queue import QueueEntry

MOST_FAILURES = 3
"""Faults in a row without one new step, after which the run is given up."""
STALLED = "stalled"
"""Why a run is stopped that does nothing with what it holds: a fault of its own."""
_FIRST_WAIT_S, _MORE, _LONGEST_WAIT_S = 5.0, 4.0, 600.0

Shares = tuple[tuple[str, int], ...]


class PendingAction(Value):
    """What is about to happen."""

    kind: Literal["start", "resize", "stop"]
    shares: Shares = ()
    """What it is to hold then."""
    reason: str = ""
    by: str = ""
    """Which service meant to."""


class StepTiming(Value):
    """How long steps took in one configuration; kept for runs that are alike."""

    device_type: str
    nodes: int
    devices: int
    local_batch: int
    accumulate_s: float
    step_s: float


class AllocationRecord(Value):
    """All that the pool remembers of one run."""

    ticket: int = 0
    """Of the entry that these notes are about."""
    shares: Shares = ()
    """What it holds, by node; a device is its own until nobody works on it any more."""
    held_since: float | None = None
    intention: PendingAction | None = None
    failures: int = 0
    """In a row, without a new step between them."""
    failed_at: float | None = None
    failed_step: int = 0
    failure: str = ""
    given_up: str = ""
    """Why it is not tried again."""
    restarts: int = 0
    served_device_s: float = 0.0
    spent_dollars: float = 0.0
    seen: tuple[StepTiming, ...] = ()

    @property
    def placement(self) -> Placement:
        """What it holds."""
        return Placement(self.shares)

    @property
    def claims(self) -> dict[str, int]:
        """Devices that nobody else may have: what it holds and, while it changes, what it will."""
        claims = dict(self.shares)
        for name, count in self.intention.shares if self.intention else ():
            claims[name] = max(count, claims.get(name, 0))
        return claims

    def wait_s(self) -> float:
        """How long to wait after the last fault."""
        if not self.failures:
            return 0.0
        return min(_FIRST_WAIT_S * _MORE ** (self.failures - 1), _LONGEST_WAIT_S)

    def is_backing_off(self, now: float) -> bool:
        """Whether it is too early to try again. A clock that was put back ends the wait."""
        if self.failed_at is None:
            return False
        return 0 <= now - self.failed_at < self.wait_s()


def read_allocation(run: RunStore) -> AllocationRecord:
    """The notes; empty ones where there are none, or none that can be read: they can be rebuilt."""
    try:
        content = run.read(Document.ALLOCATION)
        return AllocationRecord() if content is None else AllocationRecord.model_validate_json(content)
    except (OSError, ValidationError):
        return AllocationRecord()


def write_allocation(run: RunStore, notes: AllocationRecord, *, is_intention: bool = False) -> None:
    """Publish the notes; an intention is on the disk before anything is done about it."""
    run.write(Document.ALLOCATION, notes.model_dump_json(), durable=is_intention)


def reconcile(
    entry: QueueEntry,
    notes: AllocationRecord,
    sight: RunObservation,
    *,
    now: float,
    nodes: AbstractSet[str],
    service: str = "",
) -> AllocationRecord:
    """The notes in the light of what the run itself shows. Pure, and the same when done twice.

    Args:
        entry: What is wanted of it.
        notes: What we thought.
        sight: How it stands.
        now: On the pool's clock.
        nodes: Machines that are there.
        service: Who asks: what another one meant to do may have been cut short.
    """
    if entry.ticket != notes.ticket:
        fresh = {"failures": 0, "failed_at": None, "given_up": "", "ticket": entry.ticket}
        notes = notes.model_copy(update=fresh)
    if sight.is_alive:
        return _resolve_alive(notes, sight, now, service)
    if not notes.shares and notes.intention is None:
        return notes
    if sight.state.is_active and (sight.has_begun or sight.state is not RunState.PENDING):
        return notes  # its end has not been written down yet
    freed = notes.model_copy(update={"shares": (), "intention": None, "held_since": None})
    if _is_nobodys_fault(entry, notes, sight, nodes, service):
        moved = notes.held_since is not None and sight.state is not RunState.FINISHED
        return freed.model_copy(update={"restarts": notes.restarts + moved})
    return _count_failure(freed, sight, now)


def _resolve_alive(notes: AllocationRecord, sight: RunObservation, now: float, service: str) -> AllocationRecord:
    shares, intention, since = notes.shares, notes.intention, notes.held_since
    kind = intention.kind if intention is not None else None
    wanted = intention.shares if intention is not None else ()
    if kind == "start":
        shares, intention = wanted, None
    elif kind == "resize" and _takes(sight, wanted):
        shares, intention, since = wanted, None, now
    elif kind == "resize" and (sight.is_settled or _is_of_another(intention, service)):
        intention = None  # it was cut short, or came out otherwise
    if intention is None and sight.devices and not _takes(sight, shares):
        # Somebody else started or resized it: what it takes, it has.
        shares, since = sight.shares or _with_devices(shares, sight.devices, sight.node), now
    elif intention is None and sight.shares:
        shares = sight.shares  # the same; where it is led from, first
    restarts = notes.restarts + (since != notes.held_since and notes.held_since is not None)
    changes = {
        "shares": shares,
        "intention": intention,
        "held_since": now if since is None else since,
        "restarts": restarts,
    }
    return notes.model_copy(update=changes)


def _is_nobodys_fault(
    entry: QueueEntry, notes: AllocationRecord, sight: RunObservation, nodes: AbstractSet[str], service: str
) -> bool:
    """Whether a run that has ended need not answer for it."""
    if sight.state is RunState.FINISHED or entry.wish != "run":
        return True
    if sight.lost_nodes or any(name not in nodes for name, _ in notes.shares):
        return True  # its machine is gone
    intention = notes.intention
    if intention is not None and intention.kind == "stop":
        return intention.reason != STALLED
    if sight.state is RunState.STOPPED and sight.step > notes.failed_step:
        return True  # it got on, and was asked to stop by somebody who changed his mind since
    if intention is None:
        return False
    is_unborn = intention.kind == "start" and not sight.has_begun
    is_cut_short = is_unborn and sight.state is not RunState.FAILED
    return is_cut_short and _is_of_another(intention, service)


def _count_failure(notes: AllocationRecord, sight: RunObservation, now: float) -> AllocationRecord:
    has_moved = sight.step > notes.failed_step
    failures = 1 if has_moved else notes.failures + 1
    why = sight.error or f"it ended as {sight.state}"
    given_up = ""
    if sight.is_hopeless:
        given_up = f"it would fail again: {why}"
    elif failures >= MOST_FAILURES:
        given_up = f"it failed {failures} times in a row without a new step; the last time: {why}"
    changes = {
        "failures": failures,
        "failed_at": now,
        "failed_step": max(sight.step, notes.failed_step),
        "failure": why,
        "given_up": given_up,
        "restarts": notes.restarts + 1,
    }
    return notes.model_copy(update=changes)


def _is_of_another(intention: PendingAction | None, service: str) -> bool:
    """Whether a service meant to do it that is no more."""
    return intention is not None and intention.by != service


def _takes(sight: RunObservation, shares: Shares) -> bool:
    """Whether a run takes just this: on each machine, where that is known."""
    if sight.shares:
        return dict(sight.shares) == dict(shares)
    return sight.devices == Placement(shares).devices


def _with_devices(shares: Shares, devices: int, node: str) -> Shares:
    """The same machines with another number of devices; what is more or less is so on the first."""
    more = devices - Placement(shares).devices
    first, rest = (shares[0], shares[1:]) if shares else ((node, 0), ())
    if first[1] + more > 0:
        return ((first[0], first[1] + more), *rest)
    return ((first[0], devices),)
