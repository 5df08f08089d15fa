"""Tiresias (Gu et al., NSDI'19): two queues by attained service, discretised.

Jobs start in the first queue; those that have had sixteen device-hours move to the second. Within
a queue, first come, first served; sizes as asked, all or nothing, with interruption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.packing import serve

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, PoolState


class Tiresias:
    """Least attained service with one threshold."""

    name = "tiresias"

    def __init__(self, threshold_device_s: float = 16 * 3600) -> None:
        self._threshold_device_s = threshold_device_s
        self._demoted: dict[str, None] = {}
        """In the order of their demotion; after a loss of these notes, in that of submission."""

    def decide(self, state: PoolState) -> Decision:
        """Serve the first queue, then the second, whoever fits."""
        present = {job.id: job for job in state.jobs}
        self._demoted = {name: None for name in self._demoted if name in present}
        for job in state.jobs:
            if job.served_device_s >= self._threshold_device_s:
                self._demoted.setdefault(job.id)
        first = [job for job in state.jobs if job.id not in self._demoted]
        order = [*first, *(present[name] for name in self._demoted)]
        order.sort(key=lambda job: not (job.held and (job.is_pinned or not job.is_preemptible)))
        return serve(state, order)
