"""Urgency: marginal reduction of total completion time per second of one device's work on a job.

If no more jobs came, the least sum of completion times would follow from one number per job that stays
the same until its end (the adjoint of optimal control; for jobs with equal speedup curves it is
heSRPT: Berg, Vesilo and Harchol-Balter, Performance 2020). It follows from the moment the job ends:
with ``n`` other jobs present and ``K`` of all ``C`` devices, its work took one job out of the pool and
kept the others from the progress they make with its devices::

    urgency * speedup(K) = 1 + n * (1 - (1 - K / C) ** others_power)

at the size where that is cheapest. So a job that ends while many others wait is urgent, the job that
ends last is not, and no job gets devices that it gains little from. The jobs present when a job ends are
those with more work left; of those with less, a share, because others like them will have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


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
