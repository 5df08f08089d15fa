"""Two ways to add up that predictions cannot tell apart: each makes a few steps, and the faster one stays."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from yunlu.planning.communication.step_forecast import StepForecast
    from yunlu.training.parallel.world import World

_SETTLING = 4
"""Steps after a change that are not counted: connections and caches are cold."""
_COUNTED = 8
STEPS = _SETTLING + _COUNTED
"""Of each of the two."""


class TimedComparison:
    """Every worker times its own steps; after the same ones all compare, and come to the same.

    Args:
        first: What was chosen, and is in use.
        second: What may be as fast.
        step: Steps done when it begins.
    """

    def __init__(self, first: StepForecast, second: StepForecast, *, step: int) -> None:
        self.first, self.second = first, second
        self._begun = step
        self._ends: list[float] = []
        self._medians: list[float] = []
        self.step_s: tuple[float, float] | None = None
        """What a step took with each of them, in the mean over the workers; once it is over."""

    def listen(self, world: World, step: int) -> Literal["go on", "change", "over"]:
        """Called before each step by all workers: what to do before this one."""
        self._ends.append(perf_counter())
        if step < self._begun + STEPS:
            return "go on"
        spans = [late - early for early, late in zip(self._ends, self._ends[1:], strict=False)]
        self._medians.append(median(spans[-_COUNTED:]))
        self._ends, self._begun = [], step
        if len(self._medians) == 1:
            return "change"
        sums = world.sum_over_all(torch.tensor(self._medians, dtype=torch.float64))
        one, other = (sums / world.layout.world).tolist()
        self.step_s = one, other
        return "over"

    @property
    def winner(self) -> StepForecast:
        """Whose steps were faster."""
        assert self.step_s is not None
        return self.first if self.step_s[0] <= self.step_s[1] else self.second

    def explain(self) -> str:
        """In words."""
        assert self.step_s is not None
        times = zip((self.first, self.second), self.step_s, strict=True)
        told = " and ".join(f"{each.setting.name} {s * 1e3:.4g} ms" for each, s in times)
        return f"{self.winner.setting.name}: tried, {told} a step"
