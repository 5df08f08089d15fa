"""Random search: what everybody is measured by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.tune_parts.sampling import draw
from yunlu.tuning.values import Judgement, StartTrial, Verdict

if TYPE_CHECKING:
    from yunlu.tuning.values import Action, Dimension, StudySnapshot


class Random:
    """Independent settings, each trained to its end."""

    def __init__(self, dimensions: tuple[Dimension, ...], *, seed: int) -> None:
        self._dimensions, self._seed = dimensions, seed

    def choose(self, snapshot: StudySnapshot) -> Action:
        """The setting depends on the seed and the trial's number only."""
        rng = np.random.default_rng([self._seed, len(snapshot.trials)])
        return StartTrial(draw(self._dimensions, rng), snapshot.rungs)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:  # noqa: ARG002 (a Method's)
        """Nobody is stopped."""
        return Judgement(Verdict.GO_ON)


def make_random(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> Random:  # noqa: ARG001
    """A fresh one."""
    return Random(dimensions, seed=seed)
