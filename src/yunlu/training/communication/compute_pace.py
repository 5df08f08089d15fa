"""Compute speed of this worker: a short benchmark, and its recent step times."""

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
"""Long enough for CPU time slices, and for quotas per tenth of a second."""
_TRIES = 3
_REMEMBERED = 9
_SIDE, _VALUES = 192, 1 << 16


class ComputePace:
    """Compute speed of this worker, across changes of its peers."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=_REMEMBERED)
        """Time of the complete step of all replicas on this worker."""

    def record(self, seconds: float, replicas: int) -> None:
        """Record the forward and backward time of this worker's share of a step."""
        self._spans.append(seconds * replicas)

    def gather_step_times(self, world: World, *, planned_s: float) -> tuple[float, ...]:
        """Step time of each worker without communication; called by all workers, with equal results.

        Args:
            world: The workers.
            planned_s: Planned step time of the leader, used before the first step.
        """
        replicas = world.layout.replicas
        step_s = median(self._spans) / replicas if len(self._spans) == _REMEMBERED else None
        spans: list[float | None] = world.gather(step_s)
        if all(spans):
            return tuple(speed for speed in spans if speed is not None)
        best = 0.0
        speeds: list[WorkerSpeed] = []
        for _ in range(_TRIES):
            world.sum_over_all(torch.zeros(1))  # all compute at the same time, as in a step
            best = max(best, measure_turns())
            gathered = world.gather(WorkerSpeed(turns_per_s=best, step_s=step_s).model_dump())
            speeds = [WorkerSpeed.model_validate(speed) for speed in gathered]
            # Disturbances slow a worker down for a while: measure again.
            if not is_doubtful(speeds):
                break
        return steps_of(speeds, planned_s=planned_s)


def measure_turns(span_s: float = _BURST_S) -> float:
    """Matrix products and memory passes per second, with the threads of a step."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_SIDE, _SIDE, generator=generator)
    values, product = torch.zeros(_VALUES), torch.empty(_SIDE, _SIDE)
    turns, began_at = 0, perf_counter()
    while (spent_s := perf_counter() - began_at) < span_s or not turns:
        torch.mm(matrix, matrix, out=product)
        values.add_(1.0)
        turns += 1
    return turns / spent_s
