"""First come, first served: nobody overtakes, nobody is interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.packing import SizeLedger, explain, place_sizes

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState


class Fifo:
    """Sizes as asked, strictly in the order of submission."""

    name = "fifo"

    def decide(self, state: PoolState) -> Decision:
        """Start jobs from the head of the queue until one does not fit."""
        running, queue = split_queue(state)
        sizes = SizeLedger(state)
        for job in running:
            sizes.give(job)
        for job in queue:
            # One that can never run must not stop all others.
            if sizes.is_possible(job) and not sizes.give(job):
                break
        return explain(state, place_sizes(state, sizes.given, [*running, *queue]))


def split_queue(state: PoolState) -> tuple[list[Demand], list[Demand]]:
    """Who runs, and who waits by priority and submission."""
    running = [job for job in state.jobs if job.held]
    waiting = [job for job in state.jobs if not job.held]
    return running, sorted(waiting, key=lambda job: -job.priority)
