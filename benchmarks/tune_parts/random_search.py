"""Random search: what everybody is measured by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.tune_parts.sampling import draw
from yunlu.tuning.values import Begin, Judged, Verdict

if TYPE_CHECKING:
    from yunlu.tuning.values import Dimension, Move, Stand


class Random:
    """Independent settings, each trained to its end."""

    def __init__(self, dimensions: tuple[Dimension, ...], *, seed: int) -> None:
        self._dimensions, self._seed = dimensions, seed

    def choose(self, stand: Stand) -> Move:
        """The setting depends on the seed and the trial's number only."""
        rng = np.random.default_rng([self._seed, len(stand.trials)])
        return Begin(draw(self._dimensions, rng), stand.rungs)

    def judge(self, number: int, stand: Stand) -> Judged:  # noqa: ARG002 (a Method's)
        """Nobody is stopped."""
        return Judged(Verdict.GO_ON)


def make_random(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> Random:  # noqa: ARG001
    """A fresh one."""
    return Random(dimensions, seed=seed)
