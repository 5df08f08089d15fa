"""Samplers: grid, random, Sobol and evolution strategies.

Each sampler answers from the snapshot alone, with random numbers that follow from the seed and the
number of the trial: a killed study continues as it would have.
"""

from __future__ import annotations

import itertools
import math
import random
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from yunlu.core.errors import JobError, missing_part
from yunlu.tuning.encoding import Encoder
from yunlu.tuning.space import count_settings, drop_absent, key_of, list_values
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.values import Dimension, Params, ParamValue, StudySnapshot, Trial

_MOST_SETTINGS = 100_000


def list_settings(
    dimensions: Sequence[Dimension], points: Mapping[str, int] | None = None
) -> Iterator[Params]:
    """Every setting once, the last dimension moving fastest.

    Args:
        dimensions: What varies.
        points: How many values are taken of ranges without a step.
    """
    values = [list_values(d, points=(points or {}).get(d.name)) for d in dimensions]
    came: set[Any] = set()
    has_conditions = any(dimension.when for dimension in dimensions)
    for row in itertools.product(*values):
        params: Params = {d.name: value for d, value in zip(dimensions, row, strict=True)}
        if has_conditions:
            params = drop_absent(params, dimensions)
            key = key_of(params)
            if key in came:
                continue
            came.add(key)
        yield params


class GridSampler:
    """A grid in random order: an early end has covered all of it evenly."""

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        *,
        seed: int,
        points: Mapping[str, int] | None = None,
        allowed: Callable[[Params], bool] | None = None,
    ) -> None:
        """All combinations that are allowed."""
        _refuse_endless(dimensions, points or {})
        self._settings = list(list_settings(dimensions, points))
        random.Random(seed).shuffle(self._settings)  # noqa: S311 - an order, not a secret
        self._allowed = allowed
        self._verdicts: dict[int, bool] = {}

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next one of the list that is allowed and that no trial has had."""
        tried = {key_of(trial.params) for trial in snapshot.trials}
        for index, params in enumerate(self._settings):
            if key_of(params) not in tried and self._may(index, params):
                return dict(params)
        return None

    def _may(self, index: int, params: Params) -> bool:
        if index not in self._verdicts:
            self._verdicts[index] = self._allowed is None or self._allowed(params)
        return self._verdicts[index]


def _refuse_endless(dimensions: Sequence[Dimension], points: Mapping[str, int]) -> None:
    values = {d.name: list_values(d, points=points.get(d.name)) for d in dimensions}
    if endless := [name for name, result in values.items() if not result]:
        raise JobError(
            f"search.method: grid tries every setting, but {', '.join(endless)} may be any number.",
            hint="say how many values to take ('1e-4 .. 1e-1 log count 4'), a step, or list them",
        )
    count = math.prod(len(value) for value in values.values())
    if count > _MOST_SETTINGS:
        raise JobError(
            f"search.method: a grid of {count:,} settings is more than {_MOST_SETTINGS:,}.",
            hint="take fewer values of each field, or another method, such as sobol",
        )


_BATCHES = (1, 16, 256, 2048, 16_384)
"""Draws before the space counts as exhausted."""
_DOUBT = 0.2
"""Share of draws that ignore the user's priors: they can be wrong."""
_ATTEMPTS = 50
_MOST_LISTED = 20_000
_MOST_SPREAD = 1 << 14
"""Points of the sequence; beyond, settings are drawn at random."""


@runtime_checkable
class Sampler(Protocol):
    """A sampler of settings. Made with those of draws, seed, objectives, past and search it names."""

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The setting of the next trial; None where there is none left."""
        ...


def has_result(trial: Trial) -> bool:
    """Whether it has stopped with a value: done, pruned or held."""
    is_resting = trial.state.is_over or trial.state is TrialState.HELD
    return is_resting and trial.state is not TrialState.FAILED and bool(trial.points)


def result_of(trial: Trial) -> tuple[float, ...]:
    """Result of a trial: its best evaluation, by the first objective."""
    return min(trial.points, key=_order).values


def mix_seed(*parts: int) -> int:
    """One seed from several."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


class SettingDraws:
    """Random settings that are allowed and new."""

    def __init__(
        self, dimensions: Sequence[Dimension], allowed: Callable[[Params], bool] | None = None
    ) -> None:
        """Of these dimensions."""
        self.dimensions = tuple(dimensions)
        self.encoder = Encoder(dimensions)
        self.allowed = allowed
        count = count_settings(dimensions)
        self.is_finite = count < float("inf")
        self._is_listable = count <= _MOST_LISTED
        self.enough = min(8 * count + 64, _MOST_SPREAD)
        """Length of a sequence that surely contains every setting of a small space."""

    def taken(self, trials: Iterable[Trial]) -> set[Any]:
        """Settings that need not be tried again; of a continuous space, none."""
        return {key_of(trial.params) for trial in trials} if self.is_finite else set()

    def accepts(self, params: Params, taken: set[Any]) -> bool:
        """Whether a setting is new and allowed."""
        if taken and key_of(params) in taken:
            return False
        return self.allowed is None or self.allowed(params)

    def draw(self, seed: int, taken: set[Any], fixed: Params | None = None) -> Params | None:
        """One at random, with these values in it; None where none is left."""
        rng = np.random.default_rng(seed)
        fixed = fixed or {}
        # A small space is enumerated rather than sampled for ever.
        for size in _BATCHES[:2] if self._is_listable and not fixed else _BATCHES:
            for params in self._sample(rng, size, fixed):
                if fixed.keys() <= params.keys() and self.accepts(params, taken):
                    return params
        return None if fixed else self._first_left(taken)

    def _sample(self, rng: np.random.Generator, size: int, fixed: Params) -> Iterable[Params]:
        units = rng.random((size, len(self.dimensions)))
        if self.encoder.has_priors:
            doubts = rng.random(size) < _DOUBT
            units = np.where(doubts[:, None], units, self.encoder.apply_prior(units))
        if fixed:
            wanted = self.encoder.locate([fixed])[0]
            is_fixed = np.array([d.name in fixed for d in self.dimensions])
            units = np.where(is_fixed, wanted, units)
        for row in units:
            params = self.encoder.to_params(row)
            # A unit is near enough to a number, but the user's own is meant to the last digit.
            yield {name: fixed.get(name, value) for name, value in params.items()}

    def _first_left(self, taken: set[Any]) -> Params | None:
        if not self._is_listable:
            return None
        settings = list_settings(self.dimensions)
        return next((params for params in settings if self.accepts(params, taken)), None)


class RandomSampler:
    """Independent random settings."""

    def __init__(self, draws: SettingDraws, *, seed: int) -> None:
        """With these draws."""
        self._draws = draws
        self._seed = seed

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next one."""
        seed = mix_seed(self._seed, len(snapshot.trials))
        return self._draws.draw(seed, self._draws.taken(snapshot.trials))


class SobolSampler:
    """Evenly spread settings: a scrambled Sobol sequence (Owen 1998)."""

    def __init__(self, draws: SettingDraws, *, seed: int) -> None:
        """With these draws."""
        self._draws = draws
        self._seed = seed
        self._sequence: list[Params] = []
        self._came: set[Any] = set()
        self._units = np.empty((0, len(draws.dimensions)))
        self._passed = 0

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next allowed one of the sequence."""
        number = len(snapshot.trials)
        while number >= len(self._sequence) and self._passed < self._draws.enough:
            self._extend()
        if number < len(self._sequence):
            return self._sequence[number]
        # Every setting of a small space has come: only displaced ones are left.
        return self._draws.draw(mix_seed(self._seed, number), self._draws.taken(snapshot.trials))

    def _extend(self) -> None:
        encoder = self._draws.encoder
        if self._passed == len(self._units):  # the longer sequence begins with the shorter one
            longer = encoder.sobol_units(max(2 * len(self._units), 64), self._seed)
            self._units = encoder.apply_prior(longer)
        params = encoder.to_params(self._units[self._passed])
        self._passed += 1
        if self._draws.accepts(params, self._came):
            self._sequence.append(params)
            if self._draws.is_finite:
                self._came.add(key_of(params))


class CmaEsSampler:
    """A covariance that adapts to what was good (Hansen 2016); restarts with twice the population.

    On the library that Optuna's own sampler calls: that one keeps its state beside the trials,
    whereas here it follows from their values. Choices, and numbers that do not always exist, are
    drawn at random.
    """

    def __init__(self, draws: SettingDraws, *, seed: int, past: Sequence[Trial] = ()) -> None:
        """With these draws, told of these earlier trials first."""
        if find_spec("cmaes") is None:
            raise missing_part("cmaes", "tune", "The method cmaes")
        self._draws = draws
        self._seed = seed
        self._past = tuple(past)
        self._columns = [
            column
            for column, d in enumerate(draws.dimensions)
            if not d.choices and not d.when and d.low < d.high
        ]
        if not self._columns:
            raise JobError(
                "search.method: cmaes varies numbers, but no field has a range that always exists.",
                hint="take tpe, or grid",
            )

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next one."""
        number = len(snapshot.trials)
        taken = self._draws.taken(snapshot.trials)
        seed = mix_seed(self._seed, number)
        known = [trial for trial in (*self._past, *snapshot.trials) if has_result(trial)]
        evolution = self._evolve(known, seed)
        encoder = self._draws.encoder
        others = np.random.default_rng(seed).random((_ATTEMPTS, len(self._draws.dimensions)))
        for units in encoder.apply_prior(others):
            units[self._columns] = evolution.ask()
            params = encoder.to_params(units)
            if self._draws.accepts(params, taken):
                return params
        return self._draws.draw(seed, taken)

    def _evolve(self, trials: list[Trial], seed: int) -> Any:
        """The evolution after all known values, in the order of numbers."""
        rows = self._draws.encoder.locate([trial.params for trial in trials])[:, self._columns]
        values = rank_values([result_of(trial)[0] for trial in trials])
        evolution = self._start(seed)
        at = 0
        while at + evolution.population_size <= len(trials):
            size = evolution.population_size
            evolution.tell(list(zip(rows[at : at + size], values[at : at + size], strict=True)))
            at += size
            if evolution.should_stop():
                evolution = self._start(seed, population=2 * size)
        return evolution

    def _start(self, seed: int, population: int | None = None) -> Any:
        import cmaes  # noqa: PLC0415 - of this method alone

        mean = np.full(len(self._columns), 0.5)
        for column, at in enumerate(self._columns):
            dimension = self._draws.dimensions[at]
            if dimension.likely:
                believed = dimension.likely[0]
                middle: ParamValue = 10.0**believed if dimension.log else believed
                mean[column] = self._draws.encoder.locate([{dimension.name: middle}])[0, at]
        bounds = np.tile([0.0, 1.0], (len(self._columns), 1))
        return cmaes.CMA(
            mean=np.clip(mean, 1e-6, 1 - 1e-6),
            sigma=1 / 6,
            bounds=bounds,
            n_max_resampling=10 * len(self._columns),
            population_size=population,
            seed=seed,
        )


def rank_values(values: Sequence[float]) -> NDArray[np.float64]:
    """The values, with NaN replaced by the worst of the others."""
    result = np.asarray(values, dtype=np.float64)
    finite = result[np.isfinite(result)]
    worst = float(finite.max()) if finite.size else 0.0
    return np.where(np.isfinite(result), result, worst)


def _order(point: Any) -> float:
    return point.value if np.isfinite(point.value) else float("inf")
