"""Population-based training (Jaderberg et al. 2017): the worst continue as perturbed copies of the best.

All members train as far as each other, then are compared; so a copy begins at its model's rung,
from its model's checkpoint. A copy is a new trial, and the trial that it replaces stays held.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.tuning.encoding import Encoder
from yunlu.tuning.methods.samplers import mix_seed
from yunlu.tuning.methods.stopping import find_trial, value_at
from yunlu.tuning.space import drop_absent
from yunlu.tuning.values import (
    Continue,
    EndStudy,
    Judgement,
    StartTrial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.values import Action, Dimension, Params, ParamValue, StudySnapshot, Trial

_FACTORS = (0.8, 1.2)
"""Perturbation factors, as published."""
_REDRAWN = 0.25
"""Probability of redrawing a field, as published."""
_KEPT = ("train.optimizer.name", "train.epochs", "train.steps", "train.evaluate", "train.seed")
"""Fields of ``train`` that must not change when a checkpoint continues; all fields of other sections are such."""


class PopulationBasedTraining:
    """Population-based training."""

    def __init__(
        self,
        sampler: Sampler,
        dimensions: Sequence[Dimension],
        *,
        seed: int,
        size: int = 8,
        every: int = 1,
        share: float = 0.25,
        allowed: Callable[[Params], bool] | None = None,
    ) -> None:
        """``size`` members from the sampler, compared every so many rungs, the worst ``share`` replaced."""
        self._sampler = sampler
        self._dimensions = tuple(dimensions)
        self._seed = seed
        self._size = size
        self._every = every
        self._share = share
        self._allowed = allowed

    def choose(self, snapshot: StudySnapshot) -> Action:
        """A new member, a copy, or the next interval of a member."""
        if snapshot.seconds_left is not None and snapshot.seconds_left <= 0:
            return EndStudy("the time limit is reached")
        founders = [trial for trial in snapshot.trials if trial.copied_from is None]
        if len(founders) < self._size and snapshot.trials_left != 0:
            params = self._sampler.suggest(snapshot)
            if params is not None:
                return StartTrial(params, min(self._every, snapshot.rungs))
        members = founders
        for level in range(self._every, snapshot.rungs, self._every):
            if any(not trial.state.is_over and trial.rung < level for trial in members):
                return self._train_on(members, level)
            move, members = self._renew(members, level, snapshot)
            if move is not None:
                return move
        return self._train_on(members, snapshot.rungs)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """Held at each comparison until the others have reached it."""
        trial = find_trial(number, snapshot)
        if trial.rung < trial.until or trial.rung >= snapshot.rungs:
            return Judgement(Verdict.GO_ON, until=trial.until)
        return Judgement(Verdict.HOLD, reason="compared when the others have reached this rung")

    def _train_on(self, members: list[Trial], level: int) -> Action:
        held = [t for t in members if t.state is TrialState.HELD and t.rung < level]
        if held:
            return Continue(held[0].number, level)
        if all(trial.state.is_over for trial in members):
            return EndStudy(f"the population of {len(members)} is trained")
        return WaitForResults()

    def _renew(
        self, members: list[Trial], level: int, snapshot: StudySnapshot
    ) -> tuple[Action | None, list[Trial]]:
        """The next copy to begin at the level, if any; and who continues from there."""
        ranked = sorted(
            (t for t in members if t.rung >= level and t.state is not TrialState.FAILED),
            key=lambda trial: (value_at(trial, level), trial.number),
        )
        count = max(math.floor(self._share * len(ranked)), min(len(ranked) - 1, 1))
        copies = [t for t in snapshot.trials if t.copied_from and t.copied_from[1] == level]
        has_begun = any(trial.rung > level or trial.until > level for trial in ranked)
        # A parent that has continued may have lost the checkpoint that a copy would begin from.
        if len(copies) < count and not has_begun and snapshot.trials_left != 0:
            model = ranked[len(copies)]
            params = self._vary(model.params, mix_seed(self._seed, len(snapshot.trials)))
            until = min(level + self._every, snapshot.rungs)
            return StartTrial(params, until, copy_from=(model.number, level)), []
        left = {trial.number for trial in ranked[len(ranked) - len(copies) :]}
        return None, [*(t for t in ranked if t.number not in left), *copies]

    def _vary(self, params: Params, seed: int) -> Params:
        """Perturbed setting; fields that the checkpoint depends on stay."""
        rng = np.random.default_rng(seed)
        for _ in range(100):
            varied = dict(params)
            for dimension in self._dimensions:
                if dimension.name in varied and is_variable(dimension.name):
                    varied[dimension.name] = _vary_one(dimension, varied[dimension.name], rng)
            varied = drop_absent(varied, self._dimensions)
            if varied.keys() == params.keys() and (self._allowed is None or self._allowed(varied)):
                return varied
        return dict(params)


def is_variable(name: str) -> bool:
    """Whether a field may change under a checkpoint."""
    return name.startswith("train.") and name not in {*_KEPT, "train.optimizer"}


def _vary_one(dimension: Dimension, value: ParamValue, rng: np.random.Generator) -> ParamValue:
    alone = Encoder([replace(dimension, when={})])
    if rng.random() < _REDRAWN:
        return alone.sample(rng, 1)[0][dimension.name]
    factor = _FACTORS[int(rng.integers(2))]
    if dimension.choices:
        return _neighbour(dimension, value, up=factor > 1)
    assert isinstance(value, int | float)
    moved = value * factor
    if dimension.is_int and round(moved) == value:
        moved = value + (1 if factor > 1 else -1)
    return alone.to_params(alone.locate([{dimension.name: moved}])[0])[dimension.name]


def _neighbour(dimension: Dimension, value: ParamValue, *, up: bool) -> ParamValue:
    """The next larger or smaller number of a list; other choices stay."""
    choices = [c for c in dimension.choices if isinstance(c, int | float)]
    if len(choices) < len(dimension.choices) or any(isinstance(c, bool) for c in choices):
        return value
    choices.sort()
    index = choices.index(value) + (1 if up else -1) if value in choices else 0
    return choices[min(max(index, 0), len(choices) - 1)]
