"""What each size would be worth to each job: the table that the knapsack fills the pool from.

A size is worth the work that it does in a second, times how urgent that work is (``urgency.py``).
Being moved or resized costs a job the time of its restart, so it happens only where it pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.goodput import FittedSpeed, compute_goodputs
from yunlu.scheduler.policy.sizes import may_take
from yunlu.scheduler.policy.urgency import compute_urgency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.remaining_work import WorkHistory
    from yunlu.scheduler.policy.sizes import Sizes
    from yunlu.scheduler.policy.urgency import PolicyParams
    from yunlu.scheduler.policy.values import Demand

    Floats = NDArray[np.float64]

_UNKNOWN_WORK_S = 3600.0
"""Device-seconds of a job of which nothing is known."""
_LEAST_LEFT_S = 10.0
_MEETS_DEADLINE = 1e3
"""What a size in time is worth beyond all speed, in jobs."""
_DEADLINE_MARGIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Tables of one decision, a row per job and a column per size."""

    goodputs: Floats
    """Useful samples a second; 0 where it cannot or must not run."""
    slowest: Floats
    """Useful samples a second of one device at the job's least size: what work is counted in."""
    work_s: Floats
    """Device-seconds left at its least size; one per job."""
    left_s: Floats
    """Seconds left at each size, without restarts; infinite where it cannot run."""
    values: Floats
    """What the pool gains; minus infinity where it cannot run."""
    held: NDArray[np.int64]
    """The column that each job holds; -1 is none."""
    repacks: NDArray[np.bool_]
    """Whether a job would rather be brought together on fewer nodes than stay as it is."""
    is_known: NDArray[np.bool_]
    """Whether the work left is declared or learnt, not guessed."""


def tell_outlook(
    jobs: Sequence[Demand],
    sizes: Sizes,
    device_type: str,
    *,
    now: float,
    taste: PolicyParams,
    lengths: WorkHistory | None,
    weights: Floats,
    dollars_per_device_hour: float = 0.0,
    stopped_at_devices: Mapping[str, int] | None = None,
) -> Outlook:
    """Everything that a choice between sizes depends on.

    ``stopped_at_devices`` is what jobs that were stopped only just now held: coming back with more is
    growth, as if they had never been stopped.
    """
    speeds = _tell_speeds(jobs, sizes, device_type)
    goodputs = np.where(may_take(sizes, jobs), speeds, 0.0)
    held = _find_columns(sizes, np.array([job.held.devices for job in jobs], dtype=np.int64))
    kept, repacks = _tell_kept(jobs, sizes, device_type, held, goodputs)
    least = np.where(goodputs > 0, np.arange(len(sizes.devices)), len(sizes.devices)).min(axis=1)
    can_run = least < len(sizes.devices)
    rows = np.arange(len(jobs))
    least = np.where(can_run, least, 0)
    slowest = np.where(can_run, goodputs[rows, least], 1.0) / sizes.devices[least]
    work_s, is_known = _tell_work(jobs, slowest, lengths)
    with np.errstate(divide="ignore"):
        left_s = (work_s * slowest)[:, None] / goodputs
    # Told without restarts: what a job holds does not make it more or less urgent than others.
    speedups = goodputs / slowest[:, None]
    urgency = compute_urgency(work_s, speedups, sizes.devices, sizes.capacity, taste)
    restart_s = np.array([job.restart_s for job in jobs])
    dwell_s = _tell_dwell(jobs, now, taste)
    had = [(stopped_at_devices or {}).get(job.id, 0) for job in jobs]
    had = np.where(held >= 0, sizes.devices[held], np.array(had, dtype=np.int64))
    grows = (had[:, None] > 0) & (sizes.devices > had[:, None])
    change_s = np.where(grows, taste.growth, 1.0) * taste.inertia * restart_s[:, None]
    change_s = change_s * np.maximum(1.0, left_s / dwell_s[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        in_all_s = left_s + np.where(np.isfinite(left_s), change_s, 0.0)
        stay_s = np.where(kept > 0, work_s * slowest / kept, np.inf)
    has = held >= 0
    at = rows[has], held[has]
    repacks[has] &= stay_s[has] > in_all_s[at]
    in_all_s[at] = np.where(repacks[has], in_all_s[at], stay_s[has])
    left_s[at] = np.where(repacks[has], left_s[at], stay_s[has])
    # A job that waits has to start once, whenever that is: its start is part of its work, and no
    # loss. A job that was stopped only just now had started: it is worth no more than while it ran,
    # or the decision to stop it would be undone.
    gained_s = work_s + np.where(had > 0, 0.0, restart_s)
    values = (urgency * gained_s * weights)[:, None] / in_all_s
    values = np.where(np.isfinite(in_all_s), values, -np.inf)
    _add_deadlines(values, jobs, in_all_s, now=now, unit=weights.max(initial=1.0))
    _cut_budgets(values, jobs, left_s, sizes, dollars_per_device_hour)
    return Outlook(
        goodputs=goodputs,
        slowest=slowest,
        work_s=work_s,
        left_s=left_s,
        values=values,
        held=held,
        repacks=repacks,
        is_known=is_known,
    )


def _tell_dwell(jobs: Sequence[Demand], now: float, taste: PolicyParams) -> Floats:
    """How long a size will probably last: at least as usual, or as long again as the last did."""
    held_s = [0.0 if job.held_since is None else now - job.held_since for job in jobs]
    return np.maximum(np.array(held_s), taste.dwell_s)


def _tell_speeds(jobs: Sequence[Demand], sizes: Sizes, device_type: str) -> Floats:
    found = np.zeros((len(jobs), len(sizes.devices)))
    fitted: list[int] = []
    speeds: list[FittedSpeed] = []
    nodes = np.array(sizes.shapes.nodes, dtype=np.int64)
    for row, job in enumerate(jobs):
        if job.types is not None and device_type not in job.types:
            continue
        if isinstance(job.speed, FittedSpeed):
            fitted.append(row)
            speeds.append(job.speed)
        else:
            found[row] = job.speed.goodput(device_type, nodes, sizes.devices)
    if fitted:
        found[fitted] = compute_goodputs(speeds, device_type, sizes.shapes)
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


def _find_columns(sizes: Sizes, devices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The column of each number of devices; -1 where it has none."""
    if not len(sizes.devices):
        return np.full(len(devices), -1)
    places = np.minimum(np.searchsorted(sizes.devices, devices), len(sizes.devices) - 1)
    return np.where(sizes.devices[places] == devices, places, -1)


def _tell_kept(
    jobs: Sequence[Demand],
    sizes: Sizes,
    device_type: str,
    held: NDArray[np.int64],
    goodputs: Floats,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Goodput of each job as it lies now, and whether it is on more nodes than it need be."""
    kept = np.zeros(len(jobs))
    is_spread = np.zeros(len(jobs), dtype=bool)
    packed = np.array([*sizes.shapes.nodes, 0])[held]
    has = held >= 0
    kept[has] = goodputs[has, held[has]]
    lies = np.array([job.held.nodes for job in jobs])
    for row in np.flatnonzero(has & (lies != packed) & (kept > 0)).tolist():
        job = jobs[row]
        nodes, devices = np.array([job.held.nodes]), np.array([job.held.devices])
        kept[row] = job.speed.goodput(device_type, nodes, devices)[0]
        is_spread[row] = job.held.nodes > packed[row]
    return kept, is_spread


def _tell_work(
    jobs: Sequence[Demand], slowest: Floats, lengths: WorkHistory | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Device-seconds left of each job, at its least size, and whether that is more than a guess."""
    left = np.array([np.nan if job.remaining is None else job.remaining for job in jobs])
    done = np.array([job.done for job in jobs])
    is_seen = np.array([_is_seen(job) for job in jobs], dtype=bool)
    if lengths is not None:
        for row in np.flatnonzero(np.isnan(left)).tolist():
            told = lengths.tell_samples_left(jobs[row].program, float(done[row]))
            left[row] = np.nan if told is None else told
    is_known = ~np.isnan(left) & is_seen
    work_s = np.where(is_known, left / slowest, np.nan)
    attained_s = np.where(is_seen, done / slowest, 0.0)
    guessed = ~is_known & is_seen
    if lengths is not None:
        work_s[~is_known] = lengths.tell_left_s(attained_s[~is_known])
    else:  # as much again as it has had
        work_s[~is_known] = np.maximum(attained_s[~is_known], 60.0)
    if is_known.any():  # a stranger is taken for a usual job
        work_s[~is_seen] = min(float(np.median(work_s[is_known | guessed])), _UNKNOWN_WORK_S)
    return np.maximum(work_s, _LEAST_LEFT_S), is_known


def _is_seen(job: Demand) -> bool:
    """Whether anything is known about its speed."""
    return not isinstance(job.speed, FittedSpeed) or bool(job.speed.throughputs)


def _add_deadlines(
    values: Floats, jobs: Sequence[Demand], in_all_s: Floats, *, now: float, unit: float
) -> None:
    """Sizes that end in time go before all that do not; who cannot make it is like any other."""
    for row, job in enumerate(jobs):
        if job.deadline_at is not None and job.remaining is not None:
            in_time = in_all_s[row] <= (job.deadline_at - now) * _DEADLINE_MARGIN
            values[row, in_time] += _MEETS_DEADLINE * unit


def _cut_budgets(
    values: Floats,
    jobs: Sequence[Demand],
    left_s: Floats,
    sizes: Sizes,
    dollars_per_device_hour: float,
) -> None:
    """Sizes that a job's money does not last for are out; the thriftiest stays while there is any."""
    for row, job in enumerate(jobs):
        if job.budget_dollars is None or dollars_per_device_hour <= 0:
            continue
        if job.budget_dollars <= 0:
            values[row] = -np.inf
            continue
        cost = left_s[row] * sizes.devices * dollars_per_device_hour / 3600
        cost = np.where(np.isfinite(values[row]), cost, np.inf)
        allowed = cost <= max(job.budget_dollars, float(cost.min()) * 1.001)
        values[row] = np.where(allowed, values[row], -np.inf)
