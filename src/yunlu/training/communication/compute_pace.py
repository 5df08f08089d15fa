"""How fast this worker computes: a burst of what steps consist of, and what its steps took of late."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from yunlu.planning.communication.worker_speeds import WorkerSpeed, is_doubtful, steps_of

if TYPE_CHECKING:
    from yunlu.training.parallel.world import World

_BURST_S = 0.2
"""Long enough for a processor that is shared out in turns, or by quotas of a tenth of a second."""
_TRIES = 3
_REMEMBERED = 9
_SIDE, _VALUES = 192, 1 << 16


class ComputePace:
    """What this worker knows of its own speed, through all changes of who else is there."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds that all replicas' shares of a step would take it."""

    def note(self, seconds: float, replicas: int) -> None:
        """Take in forward and backward of our share of one step."""
        self._spans.append(seconds * replicas)

    def compare(self, world: World, *, planned_s: float) -> tuple[float, ...]:
        """A step of each worker without any exchange; everyone calls this, and all hear the same.

        Args:
            world: Who is there.
            planned_s: What the leader's should take: all there is to go by before the first step.
        """
        replicas = world.layout.replicas
        step_s = median(self._spans) / replicas if len(self._spans) == _REMEMBERED else None
        known: list[float | None] = world.gather(step_s)
        if all(known):
            return tuple(each for each in known if each is not None)
        best = 0.0
        paces: list[WorkerSpeed] = []
        for _ in range(_TRIES):
            world.sum_over_all(torch.zeros(1))  # as in a step, all compute at the same time
            best = max(best, measure_turns())
            told = world.gather(WorkerSpeed(turns_per_s=best, step_s=step_s).model_dump())
            paces = [WorkerSpeed.model_validate(each) for each in told]
            # What disturbs makes a worker look slow, and passes: it is looked at again.
            if not is_doubtful(paces):
                break
        return steps_of(paces, planned_s=planned_s)


def measure_turns(span_s: float = _BURST_S) -> float:
    """How often a second a product and a pass over memory are done, with the threads that steps have."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_SIDE, _SIDE, generator=generator)
    values, product = torch.zeros(_VALUES), torch.empty(_SIDE, _SIDE)
    turns, began_at = 0, perf_counter()
    while (spent_s := perf_counter() - began_at) < span_s or not turns:
        torch.mm(matrix, matrix, out=product)
        values.add_(1.0)
        turns += 1
    return turns / spent_s
