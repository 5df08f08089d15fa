"""The policy ``yunlu``: devices go where they bring jobs closest to their end; each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.scheduler.policy.fairness import (
    FairnessRules,
    compute_quotas,
    find_must_run,
    keep_recent_sizes,
    limit_teams,
    weigh_jobs,
)
from yunlu.scheduler.policy.knapsack import IDLE
from yunlu.scheduler.policy.placement import PlacedJobs, PlacementRequest, place
from yunlu.scheduler.policy.value_table import (
    ONE_TYPE_PARAMS,
    SEVERAL_TYPES_PARAMS,
    OneTypeSizing,
    SeveralTypesParams,
    SeveralTypesSizing,
    WorkHistory,
)
from yunlu.scheduler.policy.values import Decision, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fairness import TeamQuota
    from yunlu.scheduler.policy.knapsack import TeamLimits
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.value_table import PolicyParams, ValueTable
    from yunlu.scheduler.policy.values import Demand, PoolState

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedJob:
    """A job and what was decided about it."""

    job: Demand
    given: Placement
    speedup: float
    """Speed with what it is given relative to before; 1 where nothing changes."""
    left_s: float
    min_devices: int
    """Fewest devices it can run on in this pool; 0 if it cannot run."""
    is_moved: bool
    """As many devices as before, but on other nodes, to make room."""
    has_lost_node: bool
    """A node it ran on is gone."""
    is_unplaced: bool
    misses_deadline: bool
    free: int
    """Devices that no job holds after the decision."""
    capacity: int
    quota: TeamQuota | None
    team_devices: int
    """Devices that all jobs of its team hold after the decision."""
    starts_at: float | None
    """When it will probably start, if it waits."""


class LazyReasons(Mapping[str, Reason]):
    """Reasons that are written when somebody reads them: in most rounds nobody does."""

    def __init__(self, jobs: Sequence[str], explain: Callable[[int], Reason]) -> None:
        """``explain`` takes the index of a job."""
        self._rows = {job: row for row, job in enumerate(jobs)}
        self._explain = explain

    def __getitem__(self, job: str) -> Reason:
        """Why this job gets what it gets."""
        return self._explain(self._rows[job])

    def __iter__(self) -> Iterator[str]:
        """Every job."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self._rows)


def explain_job(case: ExplainedJob) -> Reason:
    """The binding reason; the text of a waiting job says what would unblock it."""
    figures: dict[str, object] = {"devices": case.given.devices, "held": case.job.held.devices}
    if case.given:
        code, text = _explain_running(case)
        figures["left_s"] = case.left_s
        if case.speedup != 1.0:
            figures["speedup"] = case.speedup
    else:
        code, text = _explain_waiting(case)
        figures["needs"] = case.min_devices
        if case.starts_at is not None:
            figures["starts_at"] = case.starts_at
    if case.misses_deadline:
        figures["misses_deadline"] = True
        text += " It will probably miss its deadline."
    return Reason(code=code, text=text, figures=figures)


def _explain_running(case: ExplainedJob) -> tuple[str, str]:
    job, devices = case.job, case.given.devices
    if job.is_pinned:
        return "pinned", f"It keeps its {_count(devices)}: it is being moved, or it is pinned."
    if not job.held:
        return "started", f"It starts on {_count(devices)}: no other job gains more from them."
    return _explain_change(case)


def _explain_change(case: ExplainedJob) -> tuple[str, str]:
    job, devices, held = case.job, case.given.devices, case.job.held.devices
    if case.has_lost_node:
        return "moved", f"It continues on {_count(devices)}: a node it ran on is gone."
    if devices > held:
        return "grown", (
            f"It grows from {held} to {_count(devices)}: {case.speedup:.2f} times as fast, which "
            "outweighs the restart."
        )
    if devices < held:
        return "shrunk", (
            f"It shrinks from {held} to {_count(devices)}: other jobs gain more from the rest."
        )
    if case.is_moved or case.given != job.held:
        return "moved", (
            f"It keeps {_count(devices)} but moves to other nodes, so that free devices are together."
        )
    return "kept", f"It keeps its {_count(devices)}: no change would outweigh a restart."


def _explain_waiting(case: ExplainedJob) -> tuple[str, str]:
    job, needed = case.job, case.min_devices
    if job.budget_dollars is not None and job.budget_dollars <= 0:
        return "over_budget", "Its budget is spent. Raise the budget to continue."
    if needed <= 0 and job.min_devices > case.capacity:
        return "too_large", (
            f"It needs at least {_count(job.min_devices)}; the pool has {case.capacity}. "
            "Lower its minimum or add nodes."
        )
    if needed <= 0:
        return "cannot_run", "No number of devices of this pool fits its limits and its batch size."
    quota = case.quota
    if quota is not None and case.team_devices + needed > quota.limit:
        return "over_quota", (
            f"Its team holds {case.team_devices} of at most {_count(quota.limit)}. "
            "It starts when a job of the team ends, or when the quota is raised."
        )
    if case.is_unplaced or case.free >= needed:
        return "fragmented", (
            f"{_count(case.free)} are free, but not on nodes where {needed} can be used together."
        )
    stopped = "It was stopped and saved: " if job.held else ""
    return ("stopped" if job.held else "waits_for_devices"), (
        f"{stopped or 'It waits: '}jobs with less work left, or with a higher claim, hold "
        f"all {_count(case.capacity)}. It needs {needed}."
    )


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionDetails:
    """A decision before it is explained; arrays have a row for each job."""

    now: float
    jobs: tuple[Demand, ...]
    placed: PlacedJobs
    nodes: frozenset[str]
    """Names of the nodes in the pool."""
    capacity: int
    """Devices of the whole pool."""
    min_devices: Ints
    """Fewest devices each job can run on; 0 if it cannot run."""
    left_s: Floats
    """Seconds each job would still run with what it was given."""
    quotas: Mapping[str, TeamQuota]


def take_columns(table: Floats, columns: Ints, *, idle: float) -> Floats:
    """One figure of each row; ``idle`` where the job was given nothing."""
    assert IDLE == -1  # the last column
    rows = len(table)
    return np.column_stack([table, np.full(rows, idle)])[np.arange(rows), columns]


def compute_speedup(goodputs: Floats, before: int, after: int) -> float:
    """Speedup from one column to another; 1 where nothing changes."""
    if before in (IDLE, after) or after == IDLE:
        return 1.0
    return float(goodputs[after] / goodputs[before]) if goodputs[before] > 0 else 1.0


def predict_starts(details: DecisionDetails) -> dict[str, float]:
    """When waiting jobs will find enough devices, as running jobs end."""
    placements, min_devices, now = details.placed.placements, details.min_devices, details.now
    waiting = [
        (row, job)
        for row, job in enumerate(details.jobs)
        if not placements.get(job.id) and min_devices[row] > 0
    ]
    if not waiting:
        return {}
    ends = sorted(
        (now + float(details.left_s[row]), placements[job.id].devices)
        for row, job in enumerate(details.jobs)
        if placements.get(job.id)
    )
    free, at, index = details.capacity - sum(count for _, count in ends), now, 0
    starts: dict[str, float] = {}
    for row, job in sorted(waiting, key=lambda entry: (-entry[1].priority, entry[1].submitted_at)):
        while free < min_devices[row] and index < len(ends):
            at, count = ends[index]
            free, index = free + count, index + 1
        if free < min_devices[row]:
            break
        free -= int(min_devices[row])
        starts[job.id] = at
    return starts


def build_reasons(
    details: DecisionDetails, starts: Mapping[str, float], speedup: Callable[[int], float]
) -> LazyReasons:
    """Why each job gets what it gets; ``speedup`` takes the row of a job."""
    placed, team_devices = details.placed, Counter[str]()
    for job in details.jobs:
        team_devices[job.team] += placed.placements.get(job.id, NOTHING).devices
    free = details.capacity - sum(team_devices.values())

    def explain(row: int) -> Reason:
        job, left_s = details.jobs[row], float(details.left_s[row])
        given = placed.placements.get(job.id, NOTHING)
        end_at = details.now + left_s + (job.restart_s if given != job.held else 0.0)
        has_deadline = job.deadline_at is not None and job.remaining is not None
        return explain_job(
            ExplainedJob(
                job=job,
                given=given,
                speedup=speedup(row),
                left_s=left_s,
                min_devices=int(details.min_devices[row]),
                is_moved=job.id in placed.moved,
                has_lost_node=any(name not in details.nodes for name, _ in job.held.shares),
                is_unplaced=job.id in placed.unplaced,
                misses_deadline=has_deadline and not end_at <= (job.deadline_at or 0.0),
                free=free,
                capacity=details.capacity,
                quota=details.quotas.get(job.team),
                team_devices=team_devices[job.team],
                starts_at=starts.get(job.id),
            )
        )

    return LazyReasons([job.id for job in details.jobs], explain)


class Sizing(Protocol):
    """The step of a decision that depends on the number of device types: which shapes jobs get.

    Two implementations, because both were tuned and measured apart and one would lose what the other
    has. With one type there is one capacity: the knapsack is solved exactly over every device, with
    values from the theory of one queue (urgency), and whole nodes of unequal size are one group. With
    several types there is a capacity per group, where the exact programme is too large and urgency,
    which counts in shares of one capacity, is not defined: values are relative speeds, as in Sia, and
    the choice is found by prices.
    """

    def lay_out(self, state: PoolState) -> ShapeTable:
        """Shapes that jobs can be given."""
        ...

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every shape to every job.

        ``stopped_devices`` is what jobs that were stopped only just now held.
        """
        ...

    def choose(
        self,
        values: Floats,
        shapes: ShapeTable,
        capacities: Ints,
        *,
        must_run: Bools,
        limits: Sequence[TeamLimits],
        prices: Floats | None,
    ) -> tuple[Ints, Floats | None]:
        """The column of each job (``IDLE`` is none) and the prices to begin with next time."""
        ...


class AllocationRound:
    """One decision, step by step; intermediate tables stay readable."""

    def __init__(
        self,
        state: PoolState,
        *,
        sizing: Sizing,
        fairness: FairnessRules,
        history: WorkHistory | None,
        waiting_since: Mapping[str, float],
        stopped_devices: Mapping[str, int] | None = None,
        prices: Floats | None = None,
    ) -> None:
        """Lays out shapes and computes their values; ``prices`` are those of the last decision."""
        self.state, self.jobs = state, state.jobs
        self.prices = prices
        self._sizing, self._fairness, self._waiting_since = sizing, fairness, waiting_since
        self.shapes = sizing.lay_out(state)
        self.is_pinned = np.array([job.is_pinned and bool(job.held) for job in self.jobs], bool)
        self.capacity = sum(group.devices for group in self.shapes.groups)
        self.free = self._count_free()
        self.quotas = compute_quotas(state.teams, self.jobs, self.capacity)
        self.table = sizing.value(
            state,
            self.shapes,
            history=history,
            weights=weigh_jobs(self.jobs, self.quotas),
            stopped_devices=stopped_devices or {},
        )
        self.picks = np.full(len(self.jobs), IDLE)

    def decide(self) -> Decision:
        """Choose shapes, place them on nodes, and explain the result."""
        if not self.jobs:
            return Decision(placements={})
        if len(self.shapes) and self.free.any():
            self.picks, self.prices = self._choose()
        placed = self._place()
        details = DecisionDetails(
            now=self.state.now,
            jobs=self.jobs,
            placed=placed,
            nodes=frozenset(node.name for node in self.state.nodes),
            capacity=self.capacity,
            min_devices=self.table.min_devices,
            left_s=take_columns(self.table.left_s, self._columns, idle=np.inf),
            quotas=self.quotas,
        )
        starts = predict_starts(details)
        return Decision(
            placements=placed.placements,
            reasons=build_reasons(details, starts, self._compute_speedup),
            predicted_end_at=self._predict_ends(details, starts),
        )

    def compute_rates(self) -> Floats:
        """Goodput of each job with what it was given; 0 if it was given nothing."""
        return take_columns(self.table.goodputs, self._columns, idle=0.0)

    @property
    def _columns(self) -> Ints:
        """Column of what each job holds from now on."""
        return np.where(self.is_pinned, self.table.held, self.picks)

    def _count_free(self) -> Ints:
        """Devices of each group that are neither pinned nor leaving."""
        free = np.array([group.devices for group in self.shapes.groups], dtype=np.int64)
        staying = {node.name for node in self.state.nodes if not node.is_leaving}
        for row in np.flatnonzero(self.is_pinned):
            for name, count in self.jobs[row].held.shares:
                group = self.shapes.find_group(name)
                if group is not None and name in staying:
                    free[group] -= count
        return np.maximum(free, 0)

    def _choose(self) -> tuple[Ints, Floats | None]:
        """Shapes of the largest total value within capacities, claims and team limits."""
        now, devices, fairness = self.state.now, self.shapes.devices, self._fairness
        values = self.table.values.copy()
        values[self.is_pinned] = -np.inf
        values[:, devices > self.free[self.shapes.group]] = -np.inf
        free = int(self.free.sum())
        can_run = np.isfinite(values).any(axis=1)
        pinned_devices: Counter[str] = Counter()
        for row in np.flatnonzero(self.is_pinned):
            pinned_devices[self.jobs[row].team] += self.jobs[row].held.devices
        must_run = find_must_run(
            self.jobs,
            np.where(can_run, self.table.min_devices, 0),
            now=now,
            capacity=free,
            rules=fairness,
            quotas=self.quotas,
            waiting_since=self._waiting_since,
            pinned_devices=pinned_devices,
        )
        keep_recent_sizes(
            values, self.jobs, devices, now=now, capacity=free, hold_s=fairness.min_hold_s
        )
        return self._sizing.choose(
            values,
            self.shapes,
            self.free,
            must_run=must_run,
            limits=limit_teams(self.jobs, self.quotas, pinned_devices),
            prices=self.prices,
        )

    def _place(self) -> PlacedJobs:
        """Place each group by itself; pinned jobs stay, even on nodes of several groups."""
        placements: dict[str, Placement] = {}
        moved: set[str] = set()
        unplaced: set[str] = set()
        for index, group in enumerate(self.shapes.groups):
            placed = place(group.nodes, self._request(index))
            placements.update(placed.placements)
            moved |= placed.moved
            unplaced |= placed.unplaced
        for row in np.flatnonzero(self.is_pinned):
            job = self.jobs[row]
            groups = {self.shapes.find_group(name) for name, _ in job.held.shares}
            if len(groups) > 1 or None in groups:
                placements[job.id] = job.held
        return PlacedJobs(
            placements=placements, moved=frozenset(moved), unplaced=frozenset(unplaced)
        )

    def _request(self, group: int) -> list[PlacementRequest]:
        """What jobs want of the nodes of one group."""
        requests: list[PlacementRequest] = []
        for row, job in enumerate(self.jobs):
            here = self._keep_shares(job, group)
            pick = int(self.picks[row])
            if self.is_pinned[row]:
                if here:
                    requests.append(
                        PlacementRequest(id=job.id, devices=here.devices, held=here, is_pinned=True)
                    )
            elif pick != IDLE and self.shapes.group[pick] == group:
                devices = int(self.shapes.devices[pick])
                is_same = here == job.held and devices == here.devices
                stays = is_same and not self.table.is_repacked[row]
                requests.append(
                    PlacementRequest(id=job.id, devices=devices, held=here, stays=bool(stays))
                )
        return requests

    def _keep_shares(self, job: Demand, group: int) -> Placement:
        """What a job holds of one group."""
        shares = job.held.shares
        return Placement(tuple(s for s in shares if self.shapes.find_group(s[0]) == group))

    def _compute_speedup(self, row: int) -> float:
        before, after = int(self.table.held[row]), int(self.picks[row])
        return compute_speedup(self.table.goodputs[row], before, after)

    def _predict_ends(
        self, details: DecisionDetails, starts: Mapping[str, float]
    ) -> dict[str, float]:
        """When each job will end if nothing changes any more."""
        ends: dict[str, float] = {}
        for row, job in enumerate(self.jobs):
            given = details.placed.placements.get(job.id)
            if given:
                restart_s = job.restart_s if given != job.held else 0.0
                ends[job.id] = self.state.now + float(details.left_s[row]) + restart_s
            elif job.id in starts:
                left_s = float(self.table.min_left_s[row])
                ends[job.id] = starts[job.id] + job.restart_s + left_s
        return {job: at for job, at in ends.items() if np.isfinite(at)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """What can be set."""

    params: PolicyParams = ONE_TYPE_PARAMS
    """For pools with one device type."""
    several_types_params: SeveralTypesParams = SEVERAL_TYPES_PARAMS
    """For pools with several device types."""
    fairness: FairnessRules = field(default_factory=FairnessRules)
    learns_from_programs: bool = True
    """Whether the work of earlier jobs of a program predicts that of later ones."""


class Allocator:
    """Maximises the total value of progress over all jobs, for one or several device types."""

    name = "yunlu"

    def __init__(self, options: AllocatorOptions | None = None) -> None:
        """Starts without memory of earlier decisions."""
        self.options = options or AllocatorOptions()
        self._memory = _Memory()

    def decide(self, state: PoolState) -> Decision:
        """Who holds what from now on."""
        memory, fairness = self._memory, self.options.fairness
        memory.observe(state, self.options)
        if not state.jobs:
            return Decision(placements={})
        round_ = AllocationRound(
            state,
            sizing=self._choose_sizing(state),
            fairness=fairness,
            history=memory.history,
            waiting_since=memory.since,
            stopped_devices=memory.find_stopped(state, fairness.min_run_s),
            prices=memory.prices,
        )
        decision = round_.decide()
        memory.record(state, round_, decision)
        return decision

    def _choose_sizing(self, state: PoolState) -> Sizing:
        if len({node.type for node in state.nodes}) <= 1:
            return OneTypeSizing(self.options.params)
        return SeveralTypesSizing(self.options.several_types_params)


@dataclass(slots=True)
class _LastSeen:
    """A job as of the last decision."""

    program: str
    done: float
    device_goodput: float
    """Useful samples per second of one device."""
    goodput: float
    """With what it was given then."""
    at: float
    runs: bool
    devices: int
    """Devices it was given then, or held when it was last stopped."""


@dataclass(slots=True)
class _Memory:
    """What is remembered between decisions; if lost, the next decision is only a little worse."""

    history: WorkHistory = field(default_factory=WorkHistory)
    since: dict[str, float] = field(default_factory=dict[str, float])
    """Since when each job runs, or waits."""
    last: dict[str, _LastSeen] = field(default_factory=dict[str, _LastSeen])
    prices: NDArray[np.float64] | None = None
    """Of each group of devices, where there are several types."""

    def observe(self, state: PoolState, options: AllocatorOptions) -> None:
        """Learn from jobs that have left since the last decision, and note who waits."""
        present = {job.id for job in state.jobs}
        for job in [job for job in self.last if job not in present]:
            last = self.last.pop(job)
            # It ended somewhere between then and now.
            done = last.done + last.goodput * (state.now - last.at) / 2
            program = last.program if options.learns_from_programs else ""
            device_s = done / last.device_goodput if last.device_goodput > 0 else 0.0
            self.history.record(program, done, device_s)
        self.since = {job.id: self._find_since(job, state.now) for job in state.jobs}

    def find_stopped(self, state: PoolState, within_s: float) -> dict[str, int]:
        """Devices that each job held that was stopped less than so many seconds ago."""
        return {
            job.id: self.last[job.id].devices
            for job in state.jobs
            if not job.held and job.id in self.last and state.now - self.since[job.id] < within_s
        }

    def record(self, state: PoolState, round_: AllocationRound, decision: Decision) -> None:
        """Remember jobs as they are now."""
        self.prices = round_.prices
        device_goodputs = round_.table.device_goodputs.tolist()
        rates = round_.compute_rates().tolist()
        for job, device_goodput, rate in zip(state.jobs, device_goodputs, rates, strict=True):
            runs = job.id in decision.placements
            if runs != bool(job.held):
                self.since[job.id] = state.now
            devices = decision.placements[job.id].devices if runs else self._find_devices(job)
            self.last[job.id] = _LastSeen(
                job.program, job.done, device_goodput, rate, state.now, runs, devices
            )

    def _find_since(self, job: Demand, now: float) -> float:
        """Since when a job runs, if it does; else since it was submitted or stopped."""
        last = self.last.get(job.id)
        if last is not None and last.runs == bool(job.held):
            return self.since.get(job.id, last.at)
        if job.held:
            return now if job.held_since is None else job.held_since
        has_run = job.served_device_s > 0 or (last is not None and last.runs)
        return now if has_run else job.submitted_at

    def _find_devices(self, job: Demand) -> int:
        last = self.last.get(job.id)
        return job.held.devices if job.held or last is None else last.devices
