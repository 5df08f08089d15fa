"""The value of each shape to each job, and the sizes chosen by it for one or several device types.

Urgency: marginal reduction of total completion time per second of one device's work on a job.
If no more jobs came, the least sum of completion times would follow from one number per job that stays
the same until its end (the adjoint of optimal control; for jobs with equal speedup curves it is
heSRPT: Berg, Vesilo and Harchol-Balter, Performance 2020). It follows from the moment the job ends:
with ``n`` other jobs present and ``K`` of all ``C`` devices, its work took one job out of the pool and
kept the others from the progress they make with its devices::

    urgency * speedup(K) = 1 + n * (1 - (1 - K / C) ** others_power)

at the size where that is cheapest. So a job that ends while many others wait is urgent, the job that
ends last is not, and no job gets devices that it gains little from. The jobs present when a job ends are
those with more work left; of those with less, a share, because others like them will have come.

Remaining work of a job that does not declare it.
Predicted from the work of earlier jobs: of the same program (where that may be used), else of all
jobs. For a new program the estimate is the Gittins index (Aalto, Ayesta and Righter,
Queueing Systems 63, 2009): the best ratio of time spent to chance of an end, given how much the
job has had already. A job of an age where many others ended is treated as nearly done.

The pieces that one and several device types share: speed of each shape, work left, deadlines, budgets.

Sizes for a pool with one device type: value by urgency, chosen exactly by dynamic programming.
A size is worth the work it does per second times the urgency of that work. Being
moved or resized costs a job the time of its restart, so it happens only where it pays.

Sizes for a pool with several device types: value by relative speed, chosen by prices.
A job with ``T`` seconds left in a shape counts ``T ** -power`` there: between fairness (0: every job
the same share of its own best) and shortest first (1). A change costs the time of its restart. Speeds
on different types are compared in the job's own useful samples, so that nothing else is needed to
mix types.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.goodput import FittedSpeed
from yunlu.scheduler.policy.knapsack import (
    DeviceOptions,
    solve_knapsack,
    solve_priced,
    solve_priced_with_teams,
    solve_with_teams,
)
from yunlu.scheduler.policy.shapes import allow_shapes, group_nodes, lay_out_groups, lay_out_pool
from yunlu.scheduler.policy.speed_by_type import SpeedByType, tabulate_goodputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.knapsack import TeamLimits
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand, PoolState

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParams:
    """How a pool with one device type weighs jobs against each other."""

    others_power: float = 0.75
    """How the progress of all other jobs grows with their devices: 1 is in proportion."""
    turnover_power: float = 1.0
    """A job that has a share ``x`` of another's work left counts ``x ** turnover_power`` as present when
    the other ends: 0 is fully, since others like it come; large is not at all."""
    late_turnover_power: float = 4.0
    """The same once no job has come for an hour."""
    expected_jobs: float = 0.0
    """Jobs expected to come and be present when a job ends, beside those that are known."""
    expected_jobs_per_job: float = 0.0
    """How many more are expected for each job that is present: where many are, many come."""
    late_expected_jobs: float = 0.0
    """Once no job has come for an hour, instead of both: the weight of the makespan, in jobs. By
    optimal control, a pool to which its makespan is worth so many jobs' times is a pool with so
    many more jobs in it, until the last one ends."""
    longest_weight: float = 0.0
    """How much more the end of the longest job counts: everybody waits for the last one."""
    longest_power: float = 4.0
    """How much shorter others may be to count so: a share ``x`` of its work counts ``x ** this``."""
    min_dwell_s: float = 300.0
    """How long a size is expected to last at least: the time in which a restart must pay for itself."""
    dwell_per_quiet_s: float = 0.5
    """How much longer for every second since the last job came."""
    max_dwell_s: float = 600.0
    """But never longer than this: jobs that are nearly as urgent would take turns."""
    change_cost: float = 1.0
    """Cost of a change, in restarts."""
    growth_cost: float = 1.0
    """Further factor for growth: devices that are given will be taken back, with another restart."""


def compute_urgency(
    work_s: Floats,
    speedups: Floats,
    devices: NDArray[np.int64],
    capacity: int,
    params: PolicyParams,
) -> Floats:
    """Seconds of completion time saved, over all jobs, by a second of one device's work on each job.

    Args:
        work_s: Seconds left of each job with one device.
        speedups: Of each job (row) at each size (column), without restarts; 0 where it cannot run.
        devices: Of each size.
        capacity: Devices of the pool.
        params: How other jobs count.
    """
    share = np.minimum(devices / max(capacity, 1), 1.0)
    others_loss = 1.0 - (1.0 - share) ** params.others_power
    others = _count_others(work_s, params.turnover_power) + params.expected_jobs
    own = 1.0 + params.longest_weight * (work_s / work_s.max(initial=1.0)) ** params.longest_power
    cost = own[:, None] + others[:, None] * others_loss[None, :]
    runs = speedups > 0
    urgency = np.where(runs, cost / np.where(runs, speedups, 1.0), np.inf)
    cheapest = urgency.min(axis=1, initial=np.inf)
    return np.where(np.isfinite(cheapest), cheapest, 0.0)


def _count_others(work_s: Floats, power: float) -> Floats:
    """Jobs present when each job ends: those with more work left, and a share of the others."""
    order = np.argsort(work_s, kind="stable")
    ranked = work_s[order] / work_s.max(initial=1.0)
    weight = ranked**power
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    longer = np.arange(len(work_s) - 1, -1, -1)
    others = np.empty(len(work_s))
    others[order] = longer + before / np.maximum(weight, 1e-300)
    return others


_REMEMBERED = 256
_IMAGINED = np.geomspace(60.0, 600_000.0, 13)
"""Prior before any job has ended: log-uniform work."""
_OVERTIME = 0.05
"""Remaining work of a job that is longer than any before it, as a share of what is done."""
_CONFIDENT = 24
"""Number of ended jobs that outweigh the prior."""


@dataclass(slots=True)
class WorkHistory:
    """Work of ended jobs: device-seconds at their smallest size, and useful samples by program."""

    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    samples: dict[str, deque[float]] = field(default_factory=dict[str, "deque[float]"])

    def record(self, program: str, samples: float, took_s: float) -> None:
        """A job has left the pool."""
        if took_s > 0:
            self.took_s.append(took_s)
        if program and samples > 0:
            self.samples.setdefault(program, deque(maxlen=_REMEMBERED)).append(samples)

    def predict_samples_left(self, program: str, done: float) -> float | None:
        """Useful samples left according to earlier jobs of the program; None if it is new."""
        known = self.samples.get(program)
        if not known:
            return None
        longer = [took - done for took in known if took > done]
        return float(np.mean(longer)) if longer else _OVERTIME * done

    def predict_left_s(self, attained_s: Floats) -> Floats:
        """Device-seconds left according to all ended jobs, given what each has had."""
        weight = np.full(len(self.took_s), 1.0)
        imagined = max(_CONFIDENT - len(self.took_s), 1) / _CONFIDENT
        took = np.concatenate([_IMAGINED, np.array(self.took_s)])
        weight = np.concatenate([np.full(len(_IMAGINED), imagined), weight])
        order = np.argsort(took, kind="stable")
        return _gittins(took[order], weight[order], attained_s)


def _gittins(took: Floats, weight: Floats, attained: Floats) -> Floats:
    """Least expected time per probability of completion, over all horizons."""
    rest = took[None, :] - attained[:, None]
    mass = np.where(rest > 0, weight[None, :], 0.0)
    spent = np.cumsum(mass * np.maximum(rest, 0.0), axis=1)
    ended = np.cumsum(mass, axis=1)
    beyond = ended[:, -1:] - ended
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (spent + beyond * np.maximum(rest, 0.0)) / ended
    ratio = np.where(ended > 0, ratio, np.inf).min(axis=1)
    # Older than any job before it: as much again as it has had.
    return np.where(np.isfinite(ratio), ratio, np.maximum(attained, 60.0))


_UNKNOWN_WORK_S = 3600.0
"""Device-seconds of a job of which nothing is known, at most."""
_MIN_LEFT_S = 10.0
_DEADLINE_VALUE = 1e3
"""Value of a shape that meets the deadline, beyond that of its speed, in jobs."""
_DEADLINE_MARGIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTable:
    """Tables of one decision: a row per job and a column per shape."""

    goodputs: Floats
    """Useful samples per second; 0 where the job cannot or must not run."""
    device_goodputs: Floats
    """Useful samples per second of one device, one per job: the unit of work."""
    work_s: Floats
    """Device-seconds left, one per job."""
    left_s: Floats
    """Seconds left in each shape, without restarts; infinite where the job cannot run."""
    values: Floats
    """Gain of the pool; minus infinity where the job cannot run."""
    held: Ints
    """Column of what each job holds; -1 is none."""
    is_repacked: Bools
    """Whether a job gains by moving to fewer nodes with as many devices."""
    min_devices: Ints
    """Fewest devices each job can run on; 0 if it cannot run."""
    min_left_s: Floats
    """Seconds left of each job on its fewest devices."""


def tabulate_allowed(jobs: Sequence[Demand], shapes: ShapeTable) -> Floats:
    """Goodput of every job in every shape; 0 where the job's limits forbid it."""
    types = [shapes.groups[group].type for group in shapes.group]
    goodputs = tabulate_goodputs(jobs, types, shapes.nodes.tolist(), shapes.devices.tolist())
    goodputs = np.nan_to_num(goodputs, nan=0.0, posinf=0.0, neginf=0.0)
    return np.where(allow_shapes(jobs, shapes), goodputs, 0.0)


def measure_held(
    jobs: Sequence[Demand], shapes: ShapeTable, held: Ints, goodputs: Floats
) -> tuple[Floats, Bools]:
    """Goodput of each job on the nodes it holds, and whether these are more than it needs."""
    held_goodputs = np.zeros(len(jobs))
    is_spread = np.zeros(len(jobs), dtype=bool)
    rows = np.flatnonzero(held >= 0)
    held_goodputs[rows] = goodputs[rows, held[rows]]
    for row in rows[held_goodputs[rows] > 0].tolist():
        job, column = jobs[row], int(held[row])
        if job.held.nodes == shapes.nodes[column]:
            continue
        device_type = shapes.groups[shapes.group[column]].type
        nodes, devices = np.array([job.held.nodes]), np.array([job.held.devices])
        held_goodputs[row] = job.speed.goodput(device_type, nodes, devices)[0]
        is_spread[row] = job.held.nodes > shapes.nodes[column]
    return held_goodputs, is_spread


def estimate_work(
    jobs: Sequence[Demand],
    device_goodputs: Floats,
    history: WorkHistory | None,
    *,
    is_typical_guessed: bool,
) -> Floats:
    """Device-seconds left of each job: declared, learnt from its program, or estimated.

    ``is_typical_guessed`` says whether estimates count towards the typical job that a job is taken for
    of which nothing is known.
    """
    left = np.array([np.nan if job.remaining is None else job.remaining for job in jobs])
    done = np.array([job.done for job in jobs])
    if history is not None:
        for row in np.flatnonzero(np.isnan(left)).tolist():
            samples = history.predict_samples_left(jobs[row].program, float(done[row]))
            left[row] = np.nan if samples is None else samples
    has_speed = np.array([_has_speed(job) for job in jobs], dtype=bool)
    is_known = ~np.isnan(left) & has_speed
    work_s = np.where(is_known, left / device_goodputs, np.nan)
    attained_s = np.where(has_speed, done / device_goodputs, 0.0)[~is_known]
    if history is not None:
        work_s[~is_known] = history.predict_left_s(attained_s)
    else:  # as much again as it has had
        work_s[~is_known] = np.maximum(attained_s, 60.0)
    if is_known.any():
        typical = work_s[has_speed if is_typical_guessed else is_known]
        work_s[~has_speed] = min(float(np.median(typical)), _UNKNOWN_WORK_S)
    return np.maximum(work_s, _MIN_LEFT_S)


def find_min_devices(values: Floats, shapes: ShapeTable) -> Ints:
    """Fewest devices each job can run on; 0 if it cannot run."""
    if not len(shapes):
        return np.zeros(len(values), dtype=np.int64)
    unusable = 1 << 40
    least = np.where(np.isfinite(values), shapes.devices, unusable).min(axis=1)
    return np.where(least < unusable, least, 0)


def add_deadlines(
    values: Floats, jobs: Sequence[Demand], total_s: Floats, *, now: float, unit: float
) -> None:
    """Prefer shapes that end before the deadline to all others; a hopeless job is like any other."""
    for row, job in enumerate(jobs):
        if job.deadline_at is not None and job.remaining is not None:
            in_time = total_s[row] <= (job.deadline_at - now) * _DEADLINE_MARGIN
            values[row, in_time] += _DEADLINE_VALUE * unit


def forbid_unaffordable(
    values: Floats, jobs: Sequence[Demand], left_s: Floats, shapes: ShapeTable
) -> None:
    """Forbid shapes that cost more than the job's budget; its cheapest shape stays while there is any."""
    if all(job.budget_dollars is None for job in jobs):
        return
    hourly = np.array([group.dollars_per_device_hour for group in shapes.groups])
    dollars_per_s = hourly[shapes.group] * shapes.devices / 3600
    for row, job in enumerate(jobs):
        if job.budget_dollars is None or not dollars_per_s.any():
            continue
        if job.budget_dollars <= 0:
            values[row] = -np.inf
            continue
        cost = np.where(np.isfinite(values[row]), left_s[row] * dollars_per_s, np.inf)
        allowed = cost <= max(job.budget_dollars, float(cost.min()) * 1.001)
        values[row] = np.where(allowed, values[row], -np.inf)


def _has_speed(job: Demand) -> bool:
    """Whether anything is known about its speed: only then its samples can be counted in seconds."""
    speed = job.speed
    if isinstance(speed, SpeedByType):
        return any(bool(fitted.throughputs) for fitted in speed.by_type.values())
    return not isinstance(speed, FittedSpeed) or bool(speed.throughputs)


ONE_TYPE_PARAMS = PolicyParams(
    longest_weight=0.3, expected_jobs_per_job=0.25, late_expected_jobs=3.0, growth_cost=2.5
)
"""Tuned on one public workload (Pollux's sixth, as it is and with its jobs shuffled)."""
_LATE_S = 3600.0


@dataclass(frozen=True, slots=True)
class OneTypeSizing:
    """Chooses sizes where all devices are of one type."""

    params: PolicyParams = ONE_TYPE_PARAMS

    def lay_out(self, state: PoolState) -> ShapeTable:
        """All nodes as one group, whatever their sizes."""
        return lay_out_pool(state.nodes, state.jobs)

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every size to every job."""
        params, jobs = _adapt_to_quiet(self.params, state), state.jobs
        goodputs = tabulate_allowed(jobs, shapes)
        held = shapes.find_held(jobs)
        held_goodputs, is_repacked = measure_held(jobs, shapes, held, goodputs)
        device_goodputs = _measure_smallest(goodputs, shapes)
        work_s = estimate_work(jobs, device_goodputs, history, is_typical_guessed=True)
        with np.errstate(divide="ignore"):
            left_s = (work_s * device_goodputs)[:, None] / goodputs
        # Without restarts: what a job holds makes it neither more nor less urgent than others.
        speedups = goodputs / device_goodputs[:, None]
        capacity = sum(group.devices for group in shapes.groups)
        urgency = compute_urgency(work_s, speedups, shapes.devices, capacity, params)
        restart_s = np.array([job.restart_s for job in jobs])
        has = held >= 0
        stopped = np.array([stopped_devices.get(job.id, 0) for job in jobs], dtype=np.int64)
        last_devices = np.where(has, shapes.devices[held], stopped)
        is_growth = (last_devices[:, None] > 0) & (shapes.devices > last_devices[:, None])
        change_s = np.where(is_growth, params.growth_cost, 1.0) * params.change_cost
        change_s = change_s * restart_s[:, None]
        dwell_s = _expect_dwell(jobs, state.now, params)
        change_s = change_s * np.maximum(1.0, left_s / dwell_s[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            total_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
            stay_s = np.where(held_goodputs > 0, work_s * device_goodputs / held_goodputs, np.inf)
        at = np.flatnonzero(has), held[has]
        is_repacked[has] &= stay_s[has] > total_s[at]
        total_s[at] = np.where(is_repacked[has], total_s[at], stay_s[has])
        left_s[at] = np.where(is_repacked[has], left_s[at], stay_s[has])
        # A job that waits has to start once, whenever that is: its start is part of its work, and
        # no loss. A job that was stopped only just now had started: it is worth no more than while
        # it ran, or the decision to stop it would be undone.
        counted_s = work_s + np.where(last_devices > 0, 0.0, restart_s)
        values = (urgency * counted_s * weights)[:, None] / total_s
        values = np.where(np.isfinite(total_s), values, -np.inf)
        add_deadlines(values, jobs, total_s, now=state.now, unit=weights.max(initial=1.0))
        forbid_unaffordable(values, jobs, left_s, shapes)
        min_devices = find_min_devices(values, shapes)
        columns = np.searchsorted(shapes.devices, min_devices)
        return ValueTable(
            goodputs=goodputs,
            device_goodputs=device_goodputs,
            work_s=work_s,
            left_s=left_s,
            values=values,
            held=held,
            is_repacked=is_repacked,
            min_devices=min_devices,
            min_left_s=left_s[np.arange(len(jobs)), columns],
        )

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
        """The best sizes, exactly; ``limits`` is empty where there are no teams."""
        capacity, devices = int(capacities.sum()), shapes.devices
        if limits:
            return solve_with_teams(values, devices, capacity, must_run, limits).picks, prices
        return solve_knapsack(values, devices, capacity, must_run).picks, prices


def _adapt_to_quiet(params: PolicyParams, state: PoolState) -> PolicyParams:
    """Expect sizes to last longer the longer nobody new has come; then the end of all jobs counts."""
    quiet_s = max(state.now - max(job.submitted_at for job in state.jobs), 0.0)
    share = min(quiet_s / _LATE_S, 1.0)
    expected = params.expected_jobs + params.expected_jobs_per_job * len(state.jobs)
    turnover = params.turnover_power
    return replace(
        params,
        min_dwell_s=max(
            params.min_dwell_s, min(params.dwell_per_quiet_s * quiet_s, params.max_dwell_s)
        ),
        turnover_power=turnover + (params.late_turnover_power - turnover) * share,
        expected_jobs=expected + (params.late_expected_jobs - expected) * share,
    )


def _measure_smallest(goodputs: Floats, shapes: ShapeTable) -> Floats:
    """Useful samples per second of one device, at the smallest size of each job."""
    count = len(shapes)
    smallest = np.where(goodputs > 0, np.arange(count), count).min(axis=1)
    can_run = smallest < count
    smallest = np.where(can_run, smallest, 0)
    rates = goodputs[np.arange(len(goodputs)), smallest]
    return np.where(can_run, rates, 1.0) / shapes.devices[smallest]


def _expect_dwell(jobs: Sequence[Demand], now: float, params: PolicyParams) -> Floats:
    """How long each size will probably last: the minimum, or as long again as it has lasted."""
    held_s = [0.0 if job.held_since is None else now - job.held_since for job in jobs]
    return np.maximum(np.array(held_s), params.min_dwell_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTypesParams:
    """How a pool with several device types weighs jobs against each other."""

    length_power: float = 0.15
    """How much less a long job counts: 0 not at all, 1 as in shortest first."""
    speed_power: float = 0.35
    """How much the speed of a job counts once it runs: near 0 all jobs get alike, 1 the fastest all."""
    max_length_s: float = 7200.0
    """Device-seconds beyond which a job does not count as longer, so that no job starves."""
    min_dwell_s: float = 250.0
    """How long a shape is expected to last at least: the time in which a restart must pay for itself."""
    dwell_per_quiet_s: float = 0.5
    """How much longer for every second since the last job came."""
    change_cost: float = 1.0
    """Cost of a change, in restarts."""


SEVERAL_TYPES_PARAMS = SeveralTypesParams()
"""Tuned on Sia's workloads philly 6 and saturn 1; the others were held out."""


@dataclass(frozen=True, slots=True)
class SeveralTypesSizing:
    """Chooses type and size where devices are of several types."""

    params: SeveralTypesParams = SEVERAL_TYPES_PARAMS

    def lay_out(self, state: PoolState) -> ShapeTable:
        """One group for each device type and number of devices per node."""
        return lay_out_groups(group_nodes(state.nodes), _find_named(state.jobs))

    def value(
        self,
        state: PoolState,
        shapes: ShapeTable,
        *,
        history: WorkHistory | None,
        weights: Floats,
        stopped_devices: Mapping[str, int],
    ) -> ValueTable:
        """Value of every shape to every job."""
        del stopped_devices  # here a start is never free: a job that was stopped is worth less
        params, jobs = _adapt_dwell(self.params, state), state.jobs
        goodputs = tabulate_allowed(jobs, shapes)
        held = shapes.find_held(jobs)
        held_goodputs, _ = measure_held(jobs, shapes, held, goodputs)
        device_goodputs = _measure_best(goodputs, shapes)
        work_s = estimate_work(jobs, device_goodputs, history, is_typical_guessed=False)
        rows = np.flatnonzero(held >= 0)
        with np.errstate(divide="ignore"):
            left_s = (work_s * device_goodputs)[:, None] / goodputs
            stay_s = (work_s * device_goodputs)[rows] / held_goodputs[rows]
        restart_s = np.array([job.restart_s for job in jobs])
        change_s = params.change_cost * restart_s[:, None]
        change_s = change_s * np.maximum(1.0, left_s / params.min_dwell_s)
        total_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
        left_s[rows, held[rows]] = total_s[rows, held[rows]] = stay_s
        length_h = np.minimum(work_s, params.max_length_s)[:, None] / 3600.0
        speedup = work_s[:, None] / total_s
        values = length_h**-params.length_power * speedup**params.speed_power * weights[:, None]
        values = np.where(np.isfinite(total_s), values, -np.inf)
        add_deadlines(values, jobs, total_s, now=state.now, unit=weights.max(initial=1.0))
        forbid_unaffordable(values, jobs, left_s, shapes)
        min_devices = find_min_devices(values, shapes)
        return ValueTable(
            goodputs=goodputs,
            device_goodputs=device_goodputs,
            work_s=work_s,
            left_s=left_s,
            values=values,
            held=held,
            is_repacked=np.zeros(len(jobs), dtype=bool),
            min_devices=min_devices,
            min_left_s=work_s / np.maximum(min_devices, 1),
        )

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
        """Shapes of nearly the best total value, and the prices; ``prices`` are where to begin."""
        options = DeviceOptions(
            sizes=shapes.devices.astype(np.float64),
            kinds=shapes.group,
            capacities=capacities.astype(np.float64),
        )
        if limits:
            solution = solve_priced_with_teams(
                values, options, groups=limits, must_run=must_run, prices=prices
            )
        else:
            solution = solve_priced(values, options, must_run=must_run, prices=prices)
        return solution.picks, solution.prices


def _adapt_dwell(params: SeveralTypesParams, state: PoolState) -> SeveralTypesParams:
    """Expect shapes to last longer the longer nobody new has come."""
    quiet_s = state.now - max((job.submitted_at for job in state.jobs), default=state.now)
    dwell_s = max(params.min_dwell_s, params.dwell_per_quiet_s * quiet_s)
    return replace(params, min_dwell_s=dwell_s)


def _find_named(jobs: Sequence[Demand]) -> set[int]:
    """Sizes that some job insists on or holds, beside the common ones."""
    named: set[int] = set()
    for job in jobs:
        named.update((job.min_devices, job.held.devices))
        if job.multiple > 1:
            named.update(job.multiple * count for count in (1, 2, 3, 4, 6, 8))
    return {size for size in named if size > 0}


def _measure_best(goodputs: Floats, shapes: ShapeTable) -> Floats:
    """Useful samples per second of one device, in the best shape of each job."""
    best = (goodputs / shapes.devices).max(axis=1, initial=0.0)
    return np.where(best > 0, best, 1.0)
