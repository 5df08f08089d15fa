"""Fixed sizes: a job starts as soon as what it asks for is free, and keeps it to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.fifo import split_queue
from yunlu.scheduler.policy.baselines.packing import serve

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, PoolState


class Fixed:
    """First come, first served, but small jobs slip past one that does not fit yet."""

    name = "fixed"

    def decide(self, state: PoolState) -> Decision:
        """Start whoever fits, in the order of submission."""
        running, queue = split_queue(state)
        return serve(state, [*running, *queue])
