"""The value of each shape to each job: the table that the allocator chooses from.

The pieces that one and several device types share: speed of each shape, work left, deadlines, budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.goodput import FittedSpeed
from yunlu.scheduler.policy.shapes import allow_shapes
from yunlu.scheduler.policy.speed_by_type import SpeedByType, tabulate_goodputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

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
