"""Consequences of a decision for each job: start, speedup, reason. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.fleet import NOTHING
from yunlu.scheduler.policy.knapsack import IDLE
from yunlu.scheduler.policy.reasons import ExplainedJob, LazyReasons, explain_job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fairness import TeamQuota
    from yunlu.scheduler.policy.placement import PlacedJobs
    from yunlu.scheduler.policy.values import Demand, Reason

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


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
