"""Executable moves of a decision: devices are given only once they are free. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.scheduler.run_status import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from yunlu.hardware.fleet import Node
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
