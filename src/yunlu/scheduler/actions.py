"""Actions on runs: start, resize, stop. Devices are given once free; each is recorded, then executed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.core.errors import YunluError
from yunlu.executors.worker_process import launch_lock, record_worker, this_process
from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.jobs.lifecycle import read_record
from yunlu.jobs.run import move as move_state
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import STALLED, PendingAction
from yunlu.scheduler.executor_adapter import NotNowError
from yunlu.scheduler.queue import change_entry
from yunlu.scheduler.run_status import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.executor_adapter import RunControl
    from yunlu.scheduler.loop import SteadyClock
    from yunlu.scheduler.run_registry import RunRegistry
    from yunlu.scheduler.run_status import ScheduledRun


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationMove:
    """One action on one run."""

    run_id: str
    kind: Literal["start", "resize", "stop"]
    placement: Placement = NOTHING
    reason: str = ""


def free_devices(scheduled_runs: Sequence[ScheduledRun], nodes: Sequence[Node]) -> dict[str, int]:
    """Devices of each node that no run holds or is about to hold."""
    free = {node.name: node.devices for node in nodes}
    for scheduled in scheduled_runs:
        for name, count in scheduled.allocation.claims.items():
            if name in free:
                free[name] -= count
    return free


def plan_moves(
    scheduled_runs: Sequence[ScheduledRun],
    placements: Mapping[str, Placement],
    nodes: Sequence[Node],
) -> list[AllocationMove]:
    """Actions possible now: first those that free devices, then those that fit into free devices.

    Args:
        scheduled_runs: Runs, in the order in which they are to be served.
        placements: What was decided; a run that is not named gets nothing.
        nodes: Machines that are there.
    """
    giving: list[AllocationMove] = []
    taking: list[AllocationMove] = []
    for scheduled in scheduled_runs:
        move = find_move(scheduled, placements.get(scheduled.id, NOTHING))
        if move is not None:
            takes = any(_more(scheduled, move.placement).values())
            (taking if takes else giving).append(move)
    by_id = {scheduled.id: scheduled for scheduled in scheduled_runs}
    free = free_devices(scheduled_runs, nodes)
    fitting: list[AllocationMove] = []
    for move in sorted(taking, key=lambda move: move.kind != "start"):  # then those that grow
        more = _more(by_id[move.run_id], move.placement)
        if all(free.get(name, 0) >= count for name, count in more.items()):
            fitting.append(move)
            for name, count in more.items():
                free[name] -= count
    return giving + fitting


def hold_still(
    scheduled_runs: Sequence[ScheduledRun],
    placements: Mapping[str, Placement],
    fixed: AbstractSet[str],
) -> Mapping[str, Placement]:
    """The decision, with the current placement of runs that could not be moved when it was made."""
    return {**placements, **{s.id: s.allocation.placement for s in scheduled_runs if s.id in fixed}}


def is_under_way(
    scheduled_runs: Sequence[ScheduledRun], placements: Mapping[str, Placement]
) -> bool:
    """Whether the decision is still being executed, so that runs wait for devices that others release.

    Decided in the middle of that, devices that are about to be free would look taken, and others
    would be stopped for them.
    """
    return any(
        s.is_sent_away
        if s.phase is Phase.LEAVING
        else s.is_resized or find_move(s, placements.get(s.id, NOTHING)) is not None
        for s in scheduled_runs
    )


def find_move(scheduled: ScheduledRun, wanted: Placement) -> AllocationMove | None:
    """The action that gives a run this placement; None if none is needed, or possible now."""
    if not scheduled.may_move:
        return None
    if scheduled.is_free:
        return (
            AllocationMove(run_id=scheduled.id, kind="start", placement=wanted) if wanted else None
        )
    if not wanted:
        return AllocationMove(run_id=scheduled.id, kind="stop", reason="preempted")
    if dict(wanted.shares) == dict(scheduled.allocation.shares):
        return None
    return AllocationMove(run_id=scheduled.id, kind="resize", placement=wanted)


def _more(scheduled: ScheduledRun, wanted: Placement) -> dict[str, int]:
    """Devices that it does not hold yet."""
    has = scheduled.allocation.claims
    return {name: max(0, count - has.get(name, 0)) for name, count in wanted.shares}


_AGAIN_S = 10.0
_STALLED_S = 60.0


class ActionRunner:
    """Executes actions on runs."""

    def __init__(
        self, registry: RunRegistry, control: RunControl, clock: SteadyClock, *, name: str = ""
    ) -> None:
        self.registry, self.control, self.clock, self.name = registry, control, clock, name
        self._asked: dict[str, tuple[float, float]] = {}
        """When a run was first and last asked to stop, on the monotonic clock."""

    def do(self, scheduled: ScheduledRun, move: AllocationMove) -> str | None:
        """Execute one move; returns why it was not executed, empty if it was."""
        pending = PendingAction(
            kind=move.kind, shares=move.placement.shares, reason=move.reason, by=self.name
        )
        try:
            self._intend(scheduled, pending)
        except OSError as error:
            return f"not done, because it could not be written down: {error}"
        try:
            match move.kind:
                case "start":
                    self.control.start(scheduled.run, move.placement)
                case "resize":
                    if not self.control.resize(scheduled.run, move.placement):
                        self._intend(
                            scheduled, PendingAction(kind="stop", reason="moved", by=self.name)
                        )
                        self._ask_to_stop(scheduled)
                case "stop":
                    self._ask_to_stop(scheduled)
        except NotNowError as error:
            self._drop(scheduled)
            return str(error)
        except (YunluError, OSError) as error:
            if move.kind == "resize":
                self._drop(scheduled)
            elif move.kind == "start":
                # The effect is seen at the next observation. If there is none, that is not the
                # run's failure: another process was busy with it.
                nobodys = pending.model_copy(update={"by": ""})
                self.registry.put(
                    scheduled, scheduled.allocation.model_copy(update={"pending": nobodys})
                )
            return f"{move.kind}: {error}"
        return None

    def hurry(self, scheduled: ScheduledRun) -> None:
        """Send the stop request again; the run may not have received the first one."""
        if not scheduled.observation.is_alive:
            return
        now, pending = time.monotonic(), scheduled.allocation.pending
        first, last = self._asked.get(scheduled.id, (now, -math.inf))
        is_stalled = pending is not None and pending.reason == STALLED
        is_saving = scheduled.observation.state is RunState.STOPPING and last > -math.inf
        is_saving = (
            is_saving and not scheduled.observation.waits_for
        )  # no process of it is left that could save
        if now - last < _AGAIN_S or (is_saving and not is_stalled):
            return
        self._asked[scheduled.id] = (first, now)
        try:
            self.control.stop(scheduled.run, now=is_stalled and now - first > _STALLED_S)
        except (YunluError, OSError) as error:
            self.registry.troubles[scheduled.id] = f"it cannot be stopped: {error}"

    def dismiss(self, scheduled: ScheduledRun, reason: str) -> None:
        """Stop a run and keep it stopped until its owner resumes it."""
        try:
            change_entry(scheduled.run, wish="pause")
            self._ask_to_stop(scheduled)
        except (YunluError, OSError) as error:
            self.registry.troubles[scheduled.id] = f"{reason}, but it cannot be paused: {error}"

    def end_stalled(self, scheduled: ScheduledRun) -> None:
        """Reclaim the devices of a stalled run."""
        try:
            self._intend(scheduled, PendingAction(kind="stop", reason=STALLED, by=self.name))
            self._ask_to_stop(scheduled)
        except (YunluError, OSError) as error:
            self.registry.troubles[scheduled.id] = f"it is stalled, and cannot be stopped: {error}"

    def requeue_elsewhere(self, scheduled: ScheduledRun, reason: str) -> None:
        """Take a run out of its cluster's queue, to be started elsewhere. Not counted as a failure."""
        try:
            self._intend(scheduled, PendingAction(kind="stop", reason=reason, by=self.name))
            self._ask_to_stop(scheduled)
        except (YunluError, OSError) as error:
            self.registry.troubles[scheduled.id] = f"{reason}, but it cannot be cancelled: {error}"

    def give_up(self, scheduled: ScheduledRun) -> str | None:
        """Mark a run that failed too often as failed, with the reason; returns the message, if any."""
        if scheduled.observation.is_alive or scheduled.observation.state is RunState.FAILED:
            return None
        text = scheduled.allocation.given_up
        try:
            with launch_lock(scheduled.run, wait=False):
                record = read_record(scheduled.run)
                if record.state in {RunState.LOST, RunState.STOPPED}:
                    record_worker(scheduled.run, this_process())
                    record = move_state(
                        scheduled.run, record, RunState.PENDING, reason="looked at by the pool"
                    )
                if record.state is RunState.PENDING:
                    move_state(scheduled.run, record, RunState.FAILED, reason=text)
        except (YunluError, OSError):
            return None  # retried at the next observation
        return text

    def _ask_to_stop(self, scheduled: ScheduledRun) -> None:
        now = time.monotonic()
        self._asked[scheduled.id] = (self._asked.get(scheduled.id, (now, now))[0], now)
        self.control.stop(scheduled.run)

    def _intend(self, scheduled: ScheduledRun, pending: PendingAction) -> None:
        allocation = scheduled.allocation.model_copy(update={"pending": pending})
        if pending.kind == "start":
            self._asked.pop(scheduled.id, None)
            allocation = allocation.model_copy(update={"shares": pending.shares})
        self.registry.put(scheduled, allocation, is_pending=True)

    def _drop(self, scheduled: ScheduledRun) -> None:
        self.registry.put(scheduled, scheduled.allocation.model_copy(update={"pending": None}))
