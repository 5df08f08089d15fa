"""What a decision comes to for each job: when it starts, how much faster it will be, and why. Pure."""

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
    """A decision before it is put into words; arrays have a row for each job."""

    now: float
    jobs: tuple[Demand, ...]
    placed: PlacedJobs
    nodes: frozenset[str]
    """Names of the machines that are there."""
    capacity: int
    """Devices of the whole pool."""
    least: Ints
    """The fewest devices each job can run on; 0 is none at all."""
    left_s: Floats
    """How long each job would still run with what it was given."""
    allowances: Mapping[str, TeamQuota]


def take_columns(table: Floats, columns: Ints, *, idle: float) -> Floats:
    """One figure of each row; ``idle`` where the job was given nothing."""
    assert IDLE == -1  # the last column
    rows = len(table)
    return np.column_stack([table, np.full(rows, idle)])[np.arange(rows), columns]


def compute_speedup(goodputs: Floats, before: int, after: int) -> float:
    """How many times faster a job will be, by the columns it had and gets; 1 where nothing changes."""
    if before in (IDLE, after) or after == IDLE:
        return 1.0
    return float(goodputs[after] / goodputs[before]) if goodputs[before] > 0 else 1.0


def predict_starts(account: DecisionDetails) -> dict[str, float]:
    """When jobs that wait would find enough devices, as those that run come to their ends."""
    placements, least, now = account.placed.placements, account.least, account.now
    waiting = [
        (row, job)
        for row, job in enumerate(account.jobs)
        if not placements.get(job.id) and least[row] > 0
    ]
    if not waiting:
        return {}
    frees = sorted(
        (now + float(account.left_s[row]), placements[job.id].devices)
        for row, job in enumerate(account.jobs)
        if placements.get(job.id)
    )
    room, at, step = account.capacity - sum(count for _, count in frees), now, 0
    found: dict[str, float] = {}
    for row, job in sorted(waiting, key=lambda one: (-one[1].priority, one[1].submitted_at)):
        while room < least[row] and step < len(frees):
            at, count = frees[step]
            room, step = room + count, step + 1
        if room < least[row]:
            break
        room -= int(least[row])
        found[job.id] = at
    return found


def build_reasons(
    account: DecisionDetails, starts: Mapping[str, float], speedup: Callable[[int], float]
) -> LazyReasons:
    """Why each job gets what it gets; ``speedup`` is given the number of a job."""
    placed, holds = account.placed, Counter[str]()
    for job in account.jobs:
        holds[job.team] += placed.placements.get(job.id, NOTHING).devices
    free = account.capacity - sum(holds.values())

    def tell(row: int) -> Reason:
        job, left_s = account.jobs[row], float(account.left_s[row])
        gets = placed.placements.get(job.id, NOTHING)
        end_at = account.now + left_s + (job.restart_s if gets != job.held else 0.0)
        is_due = job.deadline_at is not None and job.remaining is not None
        return explain_job(
            ExplainedJob(
                job=job,
                gets=gets,
                speedup=speedup(row),
                left_s=left_s,
                least=int(account.least[row]),
                is_moved=job.id in placed.moved,
                is_bereft=any(name not in account.nodes for name, _ in job.held.shares),
                is_unplaced=job.id in placed.unplaced,
                misses_deadline=is_due and not end_at <= (job.deadline_at or 0.0),
                free=free,
                capacity=account.capacity,
                allowance=account.allowances.get(job.team),
                team_holds=holds[job.team],
                starts_at=starts.get(job.id),
            )
        )

    return LazyReasons([job.id for job in account.jobs], tell)
