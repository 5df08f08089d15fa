"""Fair share: everybody gets the same number of devices, as far as they can use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.packing import (
    Free,
    assign_types,
    explain,
    place_sizes,
)

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState


class Fair:
    """Max-min fairness over devices; sizes change as jobs come and go."""

    name = "fair"

    def decide(self, state: PoolState) -> Decision:
        """Deal devices out one round after the other until nobody can take more."""
        sizes: dict[str, tuple[str, int]] = {}
        free = Free(state.nodes)
        for kind, jobs in assign_types(state).items():
            for name, count in _deal(jobs, free.count(kind)).items():
                sizes[name] = (kind, count)
        order = sorted(state.jobs, key=lambda job: -sizes.get(job.id, ("", 0))[1])
        return explain(state, place_sizes(state, sizes, order))


def _deal(jobs: list[Demand], left: int) -> dict[str, int]:
    """Devices of each job: equal but for their limits, the earliest get what does not divide."""
    given: dict[str, int] = {}
    # Who runs keeps running: a share that wanders with every round would only cost restarts.
    for job in sorted(jobs, key=lambda job: (not job.is_pinned, -job.priority, not job.held)):
        least = job.held.devices if job.is_pinned and job.held else _round_up(job)
        if least <= min(left, job.max_devices):
            given[job.id] = least
            left -= least
    growing = [job for job in jobs if job.id in given and not (job.is_pinned and job.held)]
    while growing:
        job = min(growing, key=lambda job: given[job.id])
        if given[job.id] + job.multiple > job.max_devices or job.multiple > left:
            growing.remove(job)
            continue
        given[job.id] += job.multiple
        left -= job.multiple
    return given


def _round_up(job: Demand) -> int:
    return -(-max(job.min_devices, 1) // job.multiple) * job.multiple
