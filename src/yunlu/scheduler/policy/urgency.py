"""What a second of a job's work is worth to the pool: seconds that jobs are in it less, all summed.

Were no more jobs to come, the least sum of times in the pool would follow from one number for each
job that stays the same until its end (the adjoint of optimal control; for jobs that all profit alike
from devices it is heSRPT: Berg, Vesilo and Harchol-Balter, Performance 2020). It is told by the
moment when the job ends: with ``n`` others there and ``K`` devices of all ``C``, its work brought
one job out of the pool and kept the others from what they then make of its devices::

    urgency * speedup(K) = 1 + n * (1 - (1 - K / C) ** crowd_power)

at the size where that is cheapest. So who ends while many others wait is urgent, who will end last
is not, and nobody gets devices that it can do little with. Who is left when a job ends are those
with more work left; of those with less, a share, because others like them will have come.
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
    """How the pool weighs jobs against each other."""

    crowd_power: float = 0.75
    """How the progress of all others grows with their devices: 1 is in proportion."""
    refill: float = 1.0
    """A job that has a share ``x`` of another's work left counts ``x ** refill`` as still there when
    the other ends: 0 is fully, since others like it come; large is not at all."""
    late_refill: float = 4.0
    """The same once nobody new has come for an hour."""
    company: float = 0.0
    """Jobs that are expected to come and be there when a job ends, beside those that are known."""
    crowd: float = 0.0
    """How many more are expected for each job that is there: where many are, many come."""
    late_company: float = 0.0
    """Once nobody new has come for an hour, instead of both: what the end of all counts, in jobs. By
    optimal control, a pool to which its makespan is worth so many jobs' times is a pool with so
    many more jobs in it, until the last one ends."""
    guard: float = 0.0
    """How much more the end of the longest job counts: everybody waits for the last one."""
    guard_power: float = 4.0
    """How much shorter others may be to count so: a share ``x`` of its work counts ``x ** this``."""
    dwell_s: float = 300.0
    """How long a size is expected to last at least: what a restart has to pay for itself in."""
    calm: float = 0.5
    """How much longer for every second since the last job came."""
    calmest_s: float = 600.0
    """But never longer than this: jobs that are nearly as urgent would take turns."""
    inertia: float = 1.0
    """How much dearer a change is than its restart."""
    growth: float = 1.0
    """How much dearer still it is to grow: what is given will be taken back, with another restart."""


def compute_urgency(
    work_s: Floats, speedups: Floats, devices: NDArray[np.int64], capacity: int, taste: PolicyParams
) -> Floats:
    """Seconds in the pool that are saved by a second of one device's work on each job.

    Args:
        work_s: Seconds left of each job with one device.
        speedups: Of each job (row) at each size (column), restarts aside; 0 where it cannot run.
        devices: Of each size.
        capacity: Devices in all.
        taste: How others count.
    """
    share = np.minimum(devices / max(capacity, 1), 1.0)
    kept_from = 1.0 - (1.0 - share) ** taste.crowd_power
    others = _count_others(work_s, taste.refill) + taste.company
    leaving = 1.0 + taste.guard * (work_s / work_s.max(initial=1.0)) ** taste.guard_power
    cost = leaving[:, None] + others[:, None] * kept_from[None, :]
    runs = speedups > 0
    each = np.where(runs, cost / np.where(runs, speedups, 1.0), np.inf).min(axis=1, initial=np.inf)
    return np.where(np.isfinite(each), each, 0.0)


def _count_others(work_s: Floats, power: float) -> Floats:
    """Jobs that will be there when each ends: those with more left, and a share of the others."""
    order = np.argsort(work_s, kind="stable")
    ranked = work_s[order] / work_s.max(initial=1.0)
    weight = ranked**power
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    longer = np.arange(len(work_s) - 1, -1, -1)
    others = np.empty(len(work_s))
    others[order] = longer + before / np.maximum(weight, 1e-300)
    return others
