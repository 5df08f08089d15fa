"""Time two all-reduce algorithms whose predicted costs are close; keep the faster."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from yunlu.planning.communication.step_forecast import StepForecast
    from yunlu.training.parallel.world import World

_WARMUP_STEPS = 4
"""Steps after a switch that are not timed: connections and caches are cold."""
_TIMED_STEPS = 8
STEPS_PER_METHOD = _WARMUP_STEPS + _TIMED_STEPS
"""Steps with each of the two."""


class TimedComparison:
    """Each worker times its own steps; all compare after the same step and decide alike.

    Args:
        first: The method in use.
        second: The method that may be as fast.
        step: Completed steps at the start.
    """

    def __init__(self, first: StepForecast, second: StepForecast, *, step: int) -> None:
        self.first, self.second = first, second
        self._began_step = step
        self._step_ends: list[float] = []
        self._medians: list[float] = []
        self.step_s: tuple[float, float] | None = None
        """Step time with each of them, averaged over the workers; None until the end."""

    def advance(self, world: World, step: int) -> Literal["continue", "switch", "done"]:
        """Called by all workers before each step; what to do before it."""
        self._step_ends.append(perf_counter())
        if step < self._began_step + STEPS_PER_METHOD:
            return "continue"
        spans = [
            late - early for early, late in zip(self._step_ends, self._step_ends[1:], strict=False)
        ]
        self._medians.append(median(spans[-_TIMED_STEPS:]))
        self._step_ends, self._began_step = [], step
        if len(self._medians) == 1:
            return "switch"
        sums = world.sum_over_all(torch.tensor(self._medians, dtype=torch.float64))
        first_s, second_s = (sums / world.layout.world).tolist()
        self.step_s = first_s, second_s
        return "done"

    @property
    def winner(self) -> StepForecast:
        """The method with the faster steps."""
        assert self.step_s is not None
        return self.first if self.step_s[0] <= self.step_s[1] else self.second

    def describe(self) -> str:
        """Result as text."""
        assert self.step_s is not None
        times = zip((self.first, self.second), self.step_s, strict=True)
        times_text = " and ".join(
            f"{forecast.setting.name} {s * 1e3:.4g} ms" for forecast, s in times
        )
        return f"{self.winner.setting.name}: timed, {times_text} a step"
