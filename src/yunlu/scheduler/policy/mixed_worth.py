"""What each shape on each kind would be worth to each job: the table that the choice is made from.

A job with ``T`` seconds left in a shape counts ``T ** -power`` there: between fairness (0: everyone
the same share of its own best) and the shortest first (1). A change costs the time of its restart.
Speeds on different types are compared in the job's own useful samples, so nothing else is needed to
mix them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.shapes import allow_shapes
from yunlu.scheduler.policy.speed_by_type import SpeedByType, tabulate_goodputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTypesParams:
    """How a pool of several types weighs jobs against each other."""

    length_power: float = 0.15
    """How much less a long job counts: 0 not at all, 1 as in shortest first."""
    gain_power: float = 0.35
    """How much a job's speed counts once it runs: near 0 everybody gets alike, 1 the fastest all."""
    long_s: float = 7200.0
    """Device-seconds beyond which a job is not counted as any longer: nobody starves."""
    dwell_s: float = 250.0
    """How long a shape is expected to last at least: what a restart has to pay for itself in."""
    calm: float = 0.5
    """How much longer for every second since the last job came."""
    inertia: float = 1.0
    """How much dearer a change is than its restart."""


SEVERAL_TYPES_PARAMS = SeveralTypesParams()
"""Tuned on Sia's workloads philly 6 and saturn 1; the others were held out."""
_LEAST_LEFT_S = 10.0
_UNKNOWN_WORK_S = 3600.0
_MEETS_DEADLINE = 1e3
_DEADLINE_MARGIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOutlook:
    """Tables of one decision, a row per job and a column per shape."""

    goodputs: Floats
    """Useful samples a second; 0 where it cannot or must not run."""
    slowest: Floats
    """Useful samples a second of one usual device, one per job: what work is counted in."""
    work_s: Floats
    """Seconds left on one usual device."""
    left_s: Floats
    """Seconds left in each shape, without restarts; infinite where it cannot run."""
    values: Floats
    """What the pool gains; minus infinity where it cannot run."""
    held: Ints
    """The column that each job holds; -1 is none."""


def tell_mixed_outlook(
    jobs: Sequence[Demand],
    shapes: ShapeTable,
    *,
    now: float,
    taste: SeveralTypesParams,
    lengths: WorkHistory | None,
    weights: Floats,
) -> MixedOutlook:
    """Everything that a choice between shapes depends on."""
    types = [shapes.kinds[kind].type for kind in shapes.kind]
    goodputs = tabulate_goodputs(jobs, types, shapes.nodes.tolist(), shapes.devices.tolist())
    goodputs = np.where(allow_shapes(jobs, shapes), goodputs, 0.0)
    held = _find_held(jobs, shapes)
    kept = _tell_kept(jobs, shapes, held, goodputs)
    slowest = _tell_slowest(goodputs, shapes)
    work_s = _tell_work(jobs, slowest, lengths)
    rows = np.flatnonzero(held >= 0)
    with np.errstate(divide="ignore"):
        left_s = (work_s * slowest)[:, None] / goodputs
    restart_s = np.array([job.restart_s for job in jobs])
    change_s = taste.inertia * restart_s[:, None] * np.maximum(1.0, left_s / taste.dwell_s)
    in_all_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
    with np.errstate(divide="ignore"):
        stay_s = (work_s * slowest)[rows] / kept[rows]
    left_s[rows, held[rows]] = in_all_s[rows, held[rows]] = stay_s
    counted = np.minimum(work_s, taste.long_s)[:, None] / 3600.0
    speedup = work_s[:, None] / in_all_s
    values = counted**-taste.length_power * speedup**taste.gain_power * weights[:, None]
    values = np.where(np.isfinite(in_all_s), values, -np.inf)
    _add_deadlines(values, jobs, in_all_s, now=now, unit=weights.max(initial=1.0))
    _cut_budgets(values, jobs, left_s, shapes)
    return MixedOutlook(
        goodputs=goodputs, slowest=slowest, work_s=work_s, left_s=left_s, values=values, held=held
    )


def _find_held(jobs: Sequence[Demand], shapes: ShapeTable) -> Ints:
    kind_of = {node.name: at for at, kind in enumerate(shapes.kinds) for node in kind.nodes}
    columns = {
        (int(kind), int(devices)): at
        for at, (kind, devices) in enumerate(zip(shapes.kind, shapes.devices, strict=True))
    }
    found = np.full(len(jobs), -1)
    for row, job in enumerate(jobs):
        kinds = {kind_of.get(name) for name, _ in job.held.shares}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            found[row] = columns.get((kind, job.held.devices), -1)
    return found


def _tell_kept(jobs: Sequence[Demand], shapes: ShapeTable, held: Ints, goodputs: Floats) -> Floats:
    """Goodput of each job as it lies now, which may be on more nodes than need be."""
    kept = np.zeros(len(jobs))
    for row in np.flatnonzero(held >= 0).tolist():
        job, column = jobs[row], held[row]
        kept[row] = goodputs[row, column]
        if job.held.nodes != shapes.nodes[column]:
            kind = shapes.kinds[shapes.kind[column]].type
            nodes, devices = np.array([job.held.nodes]), np.array([job.held.devices])
            kept[row] = job.speed.goodput(kind, nodes, devices)[0]
    return kept


def _tell_slowest(goodputs: Floats, shapes: ShapeTable) -> Floats:
    """Useful samples a second of one device: the best that any shape makes of one."""
    best = (goodputs / shapes.devices).max(axis=1, initial=0.0)
    return np.where(best > 0, best, 1.0)


def _tell_work(jobs: Sequence[Demand], slowest: Floats, lengths: WorkHistory | None) -> Floats:
    """Seconds left of each job on one usual device, declared, learnt or guessed."""
    left = np.array([np.nan if job.remaining is None else job.remaining for job in jobs])
    done = np.array([job.done for job in jobs])
    if lengths is not None:
        for row in np.flatnonzero(np.isnan(left)).tolist():
            told = lengths.tell_samples_left(jobs[row].program, float(done[row]))
            left[row] = np.nan if told is None else told
    is_seen = np.array([_is_seen(job) for job in jobs], dtype=bool)
    is_known = ~np.isnan(left) & is_seen
    work_s = np.where(is_known, left / slowest, np.nan)
    attained_s = np.where(is_seen, done / slowest, 0.0)[~is_known]
    guess = np.maximum(attained_s, 60.0) if lengths is None else lengths.tell_left_s(attained_s)
    work_s[~is_known] = guess
    if is_known.any():  # a stranger is taken for a usual job
        work_s[~is_seen] = min(float(np.median(work_s[is_known])), _UNKNOWN_WORK_S)
    return np.maximum(work_s, _LEAST_LEFT_S)


def _is_seen(job: Demand) -> bool:
    """Whether the unit of its speed means anything: one type at least is known, not guessed."""
    speed = job.speed
    if not isinstance(speed, SpeedByType):
        return True
    return any(bool(each.throughputs) for each in speed.by_type.values())


def _add_deadlines(
    values: Floats, jobs: Sequence[Demand], in_all_s: Floats, *, now: float, unit: float
) -> None:
    """Shapes that end in time go before all that do not; who cannot make it is like any other."""
    for row, job in enumerate(jobs):
        if job.deadline_at is not None and job.remaining is not None:
            in_time = in_all_s[row] <= (job.deadline_at - now) * _DEADLINE_MARGIN
            values[row, in_time] += _MEETS_DEADLINE * unit


def _cut_budgets(
    values: Floats, jobs: Sequence[Demand], left_s: Floats, shapes: ShapeTable
) -> None:
    """Shapes that a job's money does not last for are out; the thriftiest stays while there is any."""
    if all(job.budget_dollars is None for job in jobs):
        return
    hourly = np.array(
        [max(n.dollars_per_hour for n in kind.nodes) / kind.node_devices for kind in shapes.kinds]
    )
    dollars_per_s = hourly[shapes.kind] * shapes.devices / 3600
    for row, job in enumerate(jobs):
        if job.budget_dollars is None or not dollars_per_s.any():
            continue
        if job.budget_dollars <= 0:
            values[row] = -np.inf
            continue
        cost = np.where(np.isfinite(values[row]), left_s[row] * dollars_per_s, np.inf)
        allowed = cost <= max(job.budget_dollars, float(cost.min()) * 1.001)
        values[row] = np.where(allowed, values[row], -np.inf)
