"""Status of a scheduled run: phase, and its demand for the allocator. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.runs.states import RunState
from yunlu.scheduler.policy.values import Demand, Team

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.clock import SteadyClock
    from yunlu.scheduler.observation import RunObservation
    from yunlu.scheduler.policy.values import Speed
    from yunlu.scheduler.pool_store import PoolSettings
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.scheduler.run_progress import RunProgress

_LEAST_RESTART_S = 1.0


class Phase(StrEnum):
    """Phase of a scheduled run."""

    WAITING = "waiting"  # for devices
    BACKING_OFF = "backing off"  # after a fault
    STARTING = "starting"  # has devices, no step yet
    RUNNING = "running"
    CHANGING = "changing"  # resizing
    LEAVING = "leaving"  # saves and releases its devices
    PAUSED = "paused"
    WITHDRAWN = "withdrawn"  # stopped by its owner
    GIVEN_UP = "given up"
    FINISHED = "finished"
    TROUBLED = "troubled"  # cannot be read: not touched

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be done until a user acts."""
        return self in {Phase.PAUSED, Phase.WITHDRAWN, Phase.GIVEN_UP, Phase.FINISHED}


@dataclass(slots=True, kw_only=True)
class ScheduledRun:
    """State of one scheduled run."""

    run: RunStore
    entry: QueueEntry
    allocation: AllocationRecord
    observation: RunObservation
    progress: RunProgress
    phase: Phase
    age: tuple[int, ...] = ()
    """Age of its files, taken before they were read: later changes are seen at the next observation."""
    problem: str = ""
    """Why it could not be read or written this time."""

    @property
    def id(self) -> str:
        """The run's."""
        return self.run.id

    @property
    def is_free(self) -> bool:
        """Whether it holds nothing and may be given devices."""
        return self.phase is Phase.WAITING

    @property
    def rests(self) -> bool:
        """Whether it must not be given devices now."""
        return self.phase.is_over or self.phase in {Phase.BACKING_OFF, Phase.TROUBLED}

    @property
    def is_sent_away(self) -> bool:
        """Whether it was asked to stop; then only reminders are sent."""
        pending = self.allocation.pending
        return self.entry.wish != "run" or (pending is not None and pending.kind == "stop")

    @property
    def is_resized(self) -> bool:
        """Whether a resize is pending."""
        return self.allocation.pending is not None and self.allocation.pending.kind == "resize"

    @property
    def may_move(self) -> bool:
        """Whether its placement can be changed now."""
        return self.is_free or self.phase is Phase.RUNNING


def find_phase(
    entry: QueueEntry, allocation: AllocationRecord, observation: RunObservation, *, now: float
) -> Phase:
    """Phase of a run."""
    if observation.is_alive or allocation.shares:
        return _phase_while_alive(entry, allocation, observation)
    if observation.state is RunState.FINISHED:
        return Phase.FINISHED
    if entry.wish != "run":
        return Phase.PAUSED if entry.wish == "pause" else Phase.WITHDRAWN
    if allocation.given_up:
        return Phase.GIVEN_UP
    return Phase.BACKING_OFF if allocation.is_backing_off(now) else Phase.WAITING


def _phase_while_alive(
    entry: QueueEntry, allocation: AllocationRecord, observation: RunObservation
) -> Phase:
    kind = allocation.pending.kind if allocation.pending is not None else None
    is_ending = not observation.state.is_active or observation.state is RunState.STOPPING
    if kind == "stop" or entry.wish != "run" or (is_ending and kind != "start"):
        return Phase.LEAVING
    if kind == "start" or observation.state in {RunState.PENDING, RunState.PLANNING}:
        return Phase.STARTING
    return Phase.CHANGING if kind == "resize" or not observation.is_resizable else Phase.RUNNING


def find_held(scheduled: ScheduledRun, nodes: AbstractSet[str]) -> Placement:
    """Placement that the allocator sees.

    What cannot be moved now holds nothing on machines that are gone or going: nobody is to make room
    for it elsewhere before it can go there.
    """
    claims = scheduled.allocation.claims
    if not scheduled.may_move:
        claims = {name: count for name, count in claims.items() if name in nodes}
    return Placement(tuple(claims.items())) if claims else NOTHING


def make_demand(
    scheduled: ScheduledRun, speed: Speed, clock: SteadyClock, nodes: AbstractSet[str]
) -> Demand:
    """The run as the allocator sees it.

    Args:
        scheduled: The run.
        speed: What it would achieve.
        clock: The pool's.
        nodes: Names of the machines that are there, and stay.
    """
    entry, allocation, request = scheduled.entry, scheduled.allocation, scheduled.entry.request
    done, remaining = count_samples(scheduled)
    usable = scheduled.observation.usable
    most = max(request.least, min(request.most, usable)) if usable else request.most
    budget = entry.budget_dollars
    return Demand(
        id=scheduled.id,
        submitted_at=clock.from_wall(entry.submitted_at),
        speed=speed,
        remaining=remaining,
        done=done,
        min_devices=request.least,
        max_devices=most,
        asked_devices=request.requested,
        multiple=request.multiple,
        held=find_held(scheduled, nodes),
        restart_s=max(restart_s(scheduled), _LEAST_RESTART_S),
        restarts=allocation.restarts,
        served_device_s=allocation.served_device_s,
        held_since=allocation.held_since,
        is_pinned=not scheduled.may_move,
        team=entry.team,
        priority=entry.priority,
        deadline_at=None if entry.deadline_at is None else clock.from_wall(entry.deadline_at),
        budget_dollars=None if budget is None else max(0.0, budget - allocation.spent_dollars),
        program=entry.signature,
    )


def make_teams(
    settings: PoolSettings, names: AbstractSet[str], used_device_s: Mapping[str, float]
) -> tuple[Team, ...]:
    """Teams that share the pool; empty where no run has a team."""
    names = names | {*settings.quotas}
    if names == {""}:
        return ()
    return tuple(
        Team(
            name=name,
            quota=settings.quotas.get(name),
            borrow=settings.borrow.get(name),
            weight=settings.weights.get(name, 1.0),
            used_device_s=used_device_s.get(name, 0.0),
        )
        for name in sorted(names)
    )


def count_samples(scheduled: ScheduledRun) -> tuple[float, float | None]:
    """Samples trained, and remaining samples where known."""
    progress, samples = scheduled.progress, scheduled.entry.samples
    step = (
        max(scheduled.observation.step, progress.step)
        if scheduled.observation.is_alive
        else scheduled.observation.step
    )
    steps = progress.steps or scheduled.observation.steps
    if progress.batch is None or steps is None:
        return 0.0, samples
    base = progress.base_batch or progress.batch
    worth = 1.0
    if progress.noise is not None and progress.batch > base and progress.noise[0] > 0:
        # A sample of a larger batch is worth less (McCandlish et al., arXiv 1812.06162).
        scale = base * progress.noise[1] / progress.noise[0]
        worth = (scale + base) / (scale + progress.batch)
    return float(step * base), max(steps - step, 0) * progress.batch * worth


def restart_s(scheduled: ScheduledRun) -> float:
    """Cost of a resize: measured, else estimated from the start-up time."""
    resizes_s = scheduled.progress.resizes_s
    if resizes_s:
        return sum(resizes_s) / len(resizes_s)
    return (scheduled.progress.startup_s or 10.0) / 2
