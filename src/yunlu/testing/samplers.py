"""Contract test of samplers of hyper-parameters, to inherit.

In your own test suite::

    class TestMySampler(SamplerContract):
        def make_sampler(self, draws, *, seed):
            return MySampler(draws, seed=seed)

A study may be killed at any moment: what comes next follows from the trials and the seed alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.tuning.methods.samplers import SettingDraws
from yunlu.tuning.space import key_of
from yunlu.tuning.values import Dimension, Point, StudySnapshot, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.values import Params

WIDE = (
    Dimension(name="train.optimizer.lr", low=1e-4, high=1e-1, log=True),
    Dimension(name="train.batch", low=8, high=64, step=8.0, is_int=True),
    Dimension(name="train.schedule.name", choices=("constant", "cosine")),
)
"""A space with a range, steps and choices."""
SMALL = (
    Dimension(name="train.batch", low=1, high=3, step=1.0, is_int=True),
    Dimension(name="train.schedule.name", choices=("constant", "cosine")),
)
"""A space of six settings."""


class SamplerContract:
    """Behaviour that studies rely on. Override ``make_sampler``."""

    wide: Sequence[Dimension] = WIDE
    """A space of more settings than trials; override it where a sampler needs another."""

    def make_sampler(self, draws: SettingDraws, *, seed: int) -> Sampler:
        """A fresh sampler of this space."""
        raise NotImplementedError

    def test_every_setting_lies_in_the_space(self) -> None:
        """Each dimension has a value that it allows."""
        for params in self._sample(20, self.wide):
            assert params.keys() == {dimension.name for dimension in self.wide}
            for dimension in self.wide:
                assert _allows(dimension, params[dimension.name]), (dimension, params)

    def test_what_is_not_allowed_is_not_suggested(self) -> None:
        """Constraints of a search hold of every trial."""

        def is_small(params: Params) -> bool:
            batch = params["train.batch"]
            return isinstance(batch, int | float) and batch <= 32

        assert all(is_small(params) for params in self._sample(20, self.wide, allowed=is_small))

    def test_a_killed_study_goes_on_as_it_would_have(self) -> None:
        """A fresh sampler suggests what one suggests that was there from the start."""
        suggested = self._sample(14, self.wide)
        trials: list[Trial] = []
        for number, params in enumerate(suggested):
            fresh = self.make_sampler(SettingDraws(self.wide), seed=3)
            assert fresh.suggest(_snapshot(trials)) == params
            trials.append(_trial(number, params))

    def test_another_seed_tries_other_settings(self) -> None:
        """Or the same ones in another order."""
        assert self._sample(8, self.wide, seed=3) != self._sample(8, self.wide, seed=4)

    def test_a_small_space_is_tried_once_and_then_ends(self) -> None:
        """No setting twice; None once there is none left."""
        settings = self._sample(6, SMALL)
        assert len({key_of(params) for params in settings}) == 6
        trials = [_trial(number, params) for number, params in enumerate(settings)]
        sampler = self.make_sampler(SettingDraws(SMALL), seed=3)
        assert sampler.suggest(_snapshot(trials)) is None

    def test_failed_running_and_diverged_trials_are_no_trouble(self) -> None:
        """They are part of every study."""
        states = (TrialState.FAILED, TrialState.RUNNING, TrialState.PRUNED, TrialState.DONE)
        trials = [
            _trial(number, params, state=states[number % 4], value=(math.nan, math.inf)[number % 2])
            for number, params in enumerate(self._sample(16, self.wide))
        ]
        assert self.make_sampler(SettingDraws(self.wide), seed=3).suggest(_snapshot(trials))

    def _sample(
        self,
        count: int,
        dimensions: Sequence[Dimension],
        *,
        seed: int = 3,
        allowed: Callable[[Params], bool] | None = None,
    ) -> list[Params]:
        """The first settings of a study in which every trial ends with a value."""
        sampler = self.make_sampler(SettingDraws(dimensions, allowed), seed=seed)
        trials: list[Trial] = []
        for number in range(count):
            params = sampler.suggest(_snapshot(trials))
            assert params is not None, f"no setting {number + 1}"
            trials.append(_trial(number, params))
        return [trial.params for trial in trials]


def _allows(dimension: Dimension, value: object) -> bool:
    if dimension.choices:
        return value in dimension.choices
    if not isinstance(value, int | float) or not dimension.low <= value <= dimension.high:
        return False
    steps = (value - dimension.low) / (dimension.step or 1.0)
    is_on_step = dimension.step is None or math.isclose(steps, round(steps), abs_tol=1e-9)
    return is_on_step and (not dimension.is_int or float(value).is_integer())


def _trial(
    number: int,
    params: Params,
    *,
    state: TrialState = TrialState.DONE,
    value: float | None = None,
) -> Trial:
    objective = _value(params) if value is None else value
    points = () if state is TrialState.FAILED else (Point(1, (objective,), 1.0),)
    return Trial(number=number, params=params, state=state, points=points, until=1)


def _value(params: Params) -> float:
    """Smallest in the middle of the space."""
    rate, batch = params.get("train.optimizer.lr", 1e-2), params["train.batch"]
    assert isinstance(rate, int | float)
    assert isinstance(batch, int | float)
    return (math.log10(rate) + 2.5) ** 2 + (batch / 32 - 1) ** 2


def _snapshot(trials: Sequence[Trial]) -> StudySnapshot:
    return StudySnapshot(trials=tuple(trials), rungs=1)
