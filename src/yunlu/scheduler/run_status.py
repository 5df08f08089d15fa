"""Status of a scheduled run: what is observed, its phase, and its demand for the allocator. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.value import Value
from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.jobs.run import MEMORY
from yunlu.runs.states import RunState
from yunlu.scheduler.policy.values import Demand, Team

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.loop import SteadyClock
    from yunlu.scheduler.policy.values import Speed
    from yunlu.scheduler.pool_store import PoolSettings
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.scheduler.run_progress import RunProgress
    from yunlu.spec.job import Job

_HOPELESS = frozenset({"job", "data", "model", "missing", MEMORY})
"""Errors that every attempt would repeat: the request cannot be satisfied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """One observation of a run."""

    state: RunState
    is_alive: bool
    """Whether any process works on it; its devices are in use as long as one does."""
    has_begun: bool = False
    """Whether a worker was started since it was last queued."""
    devices: int = 0
    """Devices its workers use, or will use once joining workers are there; 0 where unknown."""
    shares: tuple[tuple[str, int], ...] = ()
    """The same by node, where it may be on several."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes it lost; its cluster may still list them."""
    is_settled: bool = False
    """Whether no worker of it is joining or leaving."""
    waits_for: str = ""
    """Why no process of it has started yet, although its cluster was asked to; empty if one has."""
    usable: int | None = None
    """The most devices its model and batch can be split over, once known."""
    is_resizable: bool = False
    """Whether it accepts a resize now."""
    node: str = "local"
    """Its node, if it runs on one node."""
    step: int = 0
    steps: int | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_hopeless(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.state is RunState.FAILED and self.error_code in _HOPELESS


MANY = 1 << 20
"""More than any pool has: no bound."""


class ResourceRequest(Value):
    """Bounds on a job's devices."""

    least: int
    most: int
    requested: int
    """Number of devices under policies with fixed sizes."""
    multiple: int = 1
    """Only multiples of this are usable."""

    @property
    def is_rigid(self) -> bool:
        """Whether there is only one size."""
        return self.least == self.most


def make_request(
    job: Job, plan: Plan | None = None, *, least: int | None = None, most: int | None = None
) -> ResourceRequest:
    """Resource request of a job; explicit bounds override the job's own.

    A job that names its devices or its whole layout is rigid, unless bounds are given. What it leaves
    open, its submitted plan says: the devices that it was planned for, and the fewest that hold it.
    """
    from yunlu.planning.layouts import find_conflicts  # noqa: PLC0415 (slow to import)

    multiple = _cut_ways(job)
    fixed = _fixed_devices(job)
    clash = next((clash for clash in find_conflicts(job) if "dp" in clash.axes), None)
    if clash is not None:
        if (least or 1) > 1 or (most or 1) > 1:
            raise JobError(
                f"the job can use one device only: {clash.key}: {clash.why}.",
                hint=f"remove {clash.key}, or leave out --min-devices and --max-devices",
            )
        return ResourceRequest(least=1, most=1, requested=1)
    if least is None and most is None and fixed is not None:
        return _rigid(fixed, multiple)
    owner_most = None if most is None else most // multiple * multiple
    low = _round_up(least or _fewest(plan, owner_most), multiple)
    high = max(job.goal.max_devices or MANY, low) if owner_most is None else owner_most
    high = high // multiple * multiple
    if low > high:
        raise JobError(
            f"no usable number of devices is between {least or multiple} and {most}"
            + (f" and is a multiple of {multiple}" if multiple > 1 else ""),
            hint="lower --min-devices or raise --max-devices",
        )
    planned = 1 if plan is None else plan.devices
    wanted = fixed or max(job.layout.said_workers, planned)
    requested = min(max(_round_up(wanted, multiple), low), high)
    if job.communication.method == "asynchronous" and low < 2 <= high:
        low, requested = 2, max(requested, 2)  # a single worker has no peer to exchange with
    return ResourceRequest(least=low, most=high, requested=requested, multiple=multiple)


def _fewest(plan: Plan | None, most: int | None) -> int:
    """The fewest devices that hold the model, by its plan; the owner's limit goes before."""
    if plan is None:
        return 1
    from yunlu.planning.splitting import fewest_devices  # noqa: PLC0415 (slow to import)

    fewest = fewest_devices(plan)
    return fewest if most is None else max(min(fewest, most), 1)


def _rigid(devices: int, multiple: int) -> ResourceRequest:
    multiple = multiple if devices % multiple == 0 else 1
    return ResourceRequest(least=devices, most=devices, requested=devices, multiple=multiple)


def _fixed_devices(job: Job) -> int | None:
    if job.devices != "auto":
        return job.devices
    return job.layout.said_workers if job.layout.is_whole else None


def _cut_ways(job: Job) -> int:
    """Tensor and pipeline parallel degree: these workers join and leave together."""
    product = 1
    for axis, size in job.layout.sizes.items():
        product *= size if axis != "dp" else 1
    return product


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


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
