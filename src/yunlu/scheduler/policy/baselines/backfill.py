"""EASY backfill (Lifka, 1995): first come, first served, but short jobs fill the gaps.

The head of the queue gets a reservation for when enough devices will be free; others may start
before it if they end by then, or use only devices that the head will not need.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.fifo import split_queue
from yunlu.scheduler.policy.baselines.packing import (
    SizeLedger,
    device_types,
    explain,
    place_sizes,
    usable_types,
)
from yunlu.scheduler.policy.baselines.shortest import seconds_left

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState


class Backfill:
    """Sizes as asked, one reservation."""

    name = "backfill"

    def decide(self, state: PoolState) -> Decision:
        """Start from the head of the queue; then whoever does not delay the first that waits."""
        running, queue = split_queue(state)
        order = [*running, *queue]
        sizes = SizeLedger(state)
        for job in running:
            sizes.give(job)
        queue = [job for job in queue if sizes.is_possible(job)]
        while queue and sizes.give(queue[0]):
            queue.pop(0)
        if queue:
            _fill(state, sizes, order, queue[0], queue[1:])
        return explain(state, place_sizes(state, sizes.given, order))


def _fill(
    state: PoolState, sizes: SizeLedger, order: list[Demand], head: Demand, others: list[Demand]
) -> None:
    """Start those that do not delay the head."""
    started = [job for job in order if job.id in sizes.given]
    reserved, starts_in_s, spare = _reserve(state, sizes, started, head)
    for job in others:
        result = sizes.fit(job)
        if result is None:
            continue
        kind, count = result
        if kind != reserved or seconds_left(state, job) + job.restart_s <= starts_in_s:
            sizes.give(job)
        elif count <= spare:
            spare -= count
            sizes.give(job)


def _reserve(
    state: PoolState, sizes: SizeLedger, started: list[Demand], head: Demand
) -> tuple[str, float, int]:
    """Where and in how many seconds the head can start, and how many devices it then leaves."""
    best = ("", math.inf, 0)
    for kind in usable_types(head, device_types(state)):
        here = [job for job in started if sizes.given[job.id][0] == kind]
        free = sizes.left(kind)
        for ends_in_s, count in sorted(
            (seconds_left(state, job), sizes.given[job.id][1]) for job in here
        ):
            free += count
            if free >= head.asked_devices:
                if ends_in_s < best[1] or not best[0]:
                    best = (kind, ends_in_s, free - head.asked_devices)
                break
    return best
