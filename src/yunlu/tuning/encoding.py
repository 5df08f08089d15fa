"""Encoding of settings as rows of numbers, for surrogate models and samplers.

Two forms. ``units``: one number in [0, 1] for each dimension, easy to draw and to vary. ``features``:
what a model sees; a choice without an order has one column for each of its values, and a dimension
that does not exist for the others' values is constant, so that it makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.values import Dimension, Params, ParamValue

    Array = NDArray[np.float64]
    Mask = NDArray[np.bool_]

ABSENT = 0.5
"""The feature of a number that does not exist here."""


class Encoder:
    """Turns settings into rows of [0, 1] and back."""

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        """Of these dimensions, in this order."""
        self.dimensions = tuple(dimensions)
        self._axes = tuple(_make_axis(dimension) for dimension in self.dimensions)
        self._index = {dimension.name: at for at, dimension in enumerate(self.dimensions)}
        self.owners = np.repeat(
            np.arange(len(self._axes)), [axis.columns for axis in self._axes]
        ).astype(np.intp)
        """The dimension that each column of the features belongs to."""
        self.is_free = np.array([axis.count == 0 for axis in self._axes], dtype=bool)
        """Which dimensions are numbers without a grid."""
        self.is_nominal = np.array([axis.is_nominal for axis in self._axes], dtype=bool)
        """Which dimensions are choices without an order."""

    @property
    def has_priors(self) -> bool:
        """Whether the user gave priors."""
        return any(dimension.likely for dimension in self.dimensions)

    def encode(self, settings: Sequence[Params]) -> Array:
        """The features of settings, a row each."""
        return self.featurize(self.locate(settings))

    def decode(self, row: Array) -> Params:
        """The setting nearest to a row of features."""
        units = np.empty(len(self._axes))
        start = 0
        for at, axis in enumerate(self._axes):
            units[at] = axis.unit_of_features(row[start : start + axis.columns])
            start += axis.columns
        return self.to_params(units)

    def sample(self, rng: np.random.Generator, n: int) -> list[Params]:
        """Random settings, by the user's priors if there are any."""
        return [self.to_params(row) for row in self.apply_prior(rng.random((n, len(self._axes))))]

    def sobol(self, n: int, seed: int) -> list[Params]:
        """Evenly spread settings, by the user's priors if there are any."""
        return [self.to_params(row) for row in self.apply_prior(self.sobol_units(n, seed))]

    def sobol_units(self, n: int, seed: int) -> Array:
        """Evenly spread units: the first n of a scrambled Sobol sequence."""
        from scipy.stats import qmc  # noqa: PLC0415 - heavy, and needed once per study

        engine = qmc.Sobol(max(len(self._axes), 1), scramble=True, rng=np.random.default_rng(seed))
        rows = engine.random_base2(max(n - 1, 0).bit_length())
        return rows[:n, : len(self._axes)]

    def apply_prior(self, units: Array) -> Array:
        """The same draws, transformed by the user's priors."""
        leaned = units.copy()
        for at, dimension in enumerate(self.dimensions):
            if dimension.likely and not dimension.choices:
                leaned[:, at] = self._axes[at].apply_prior(units[:, at], *dimension.likely)
        return leaned

    def prior_score(self, units: Array) -> Array:
        """Log density of the user's prior in each row; 0 at its maximum."""
        belief = np.zeros(len(units))
        for at, dimension in enumerate(self.dimensions):
            if dimension.likely and not dimension.choices:
                mean, deviation = dimension.likely
                own = self._axes[at].own_of(units[:, at])
                belief -= 0.5 * ((own - mean) / deviation) ** 2
        return belief

    def locate(self, settings: Sequence[Params]) -> Array:
        """Units of settings; missing dimensions are in the middle."""
        units = np.full((len(settings), len(self._axes)), ABSENT)
        for at, (axis, dimension) in enumerate(zip(self._axes, self.dimensions, strict=True)):
            units[:, at] = axis.units_of([params.get(dimension.name) for params in settings])
        return units

    def to_params(self, units: Array) -> Params:
        """The setting at one row of units, without the dimensions that do not exist there."""
        exists = self._exists(units[None, :])
        return {
            dimension.name: self._axes[at].value_at(float(units[at]))
            for at, dimension in enumerate(self.dimensions)
            if exists[at][0]
        }

    def featurize(self, units: Array) -> Array:
        """The features of units."""
        features = np.empty((len(units), len(self.owners)))
        start = 0
        for axis, exists, column in zip(self._axes, self._exists(units), units.T, strict=True):
            part = axis.features_of(column)
            part[~exists] = 0.0 if axis.columns > 1 else ABSENT
            features[:, start : start + axis.columns] = part
            start += axis.columns
        return features

    def _exists(self, units: Array) -> list[Mask]:
        """For each dimension, in which rows it exists."""
        result: dict[int, Mask] = {}
        for at in range(len(self._axes)):
            self._find_existing(at, units, result)
        return [result[at] for at in range(len(self._axes))]

    def _find_existing(self, at: int, units: Array, masks: dict[int, Mask]) -> Mask:
        if at not in masks:
            exists = np.ones(len(units), dtype=bool)
            masks[at] = exists  # a cycle of conditions ends here
            for name, values in self.dimensions[at].when.items():
                parent = self._index.get(name)
                if parent is not None:
                    exists &= self._find_existing(parent, units, masks)
                    exists &= self._axes[parent].is_one_of(units[:, parent], values)
        return masks[at]


def _make_axis(dimension: Dimension) -> _Axis:
    if dimension.choices:
        numbers = [v for v in dimension.choices if isinstance(v, int | float)]
        ordered = len(numbers) == len(dimension.choices) and not any(
            isinstance(v, bool) for v in numbers
        )
        choices = tuple(sorted(numbers)) if ordered else dimension.choices
        count = len(choices)
        return _Axis(
            choices=choices,
            count=count,
            is_nominal=not ordered,
            columns=1 if ordered or count <= 2 else count,
        )
    low, high = float(dimension.low), float(dimension.high)
    step = dimension.step or (1.0 if dimension.is_int else 0.0)
    count = int(np.floor((high - low) / step + 1e-9)) + 1 if step else 0
    bounds = (low, low + (count - 1) * step) if step else (low, high)
    margin = step / 2 if not dimension.log else min(step / 2, low / 2)
    edges = (bounds[0] - margin, bounds[1] + margin)
    return _Axis(
        count=count,
        bounds=bounds,
        edges=(float(np.log(edges[0])), float(np.log(edges[1]))) if dimension.log else edges,
        step=step,
        log=dimension.log,
        is_int=dimension.is_int,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One dimension on [0, 1]; each value of a grid has an interval around it."""

    choices: tuple[ParamValue, ...] = ()
    count: int = 0
    """Values of the choice or the grid; 0: any number."""
    columns: int = 1
    is_nominal: bool = False
    bounds: tuple[float, float] = (0.0, 1.0)
    edges: tuple[float, float] = (0.0, 1.0)
    step: float = 0.0
    log: bool = False
    is_int: bool = False

    def value_at(self, unit: float) -> ParamValue:
        if self.choices:
            return self.choices[int(self._slots(np.array([unit]))[0])]
        value = float(self.numbers_at(np.array([unit]))[0])
        return round(value) if self.is_int else value

    def numbers_at(self, units: Array) -> Array:
        low, high = self.edges
        numbers = low + np.clip(units, 0.0, 1.0) * (high - low)
        numbers = np.exp(numbers) if self.log else numbers
        if self.step:
            numbers = self.bounds[0] + np.round((numbers - self.bounds[0]) / self.step) * self.step
        return np.clip(numbers, *self.bounds)

    def own_of(self, units: Array) -> Array:
        """In the unit of the user's prior: log10 where the dimension is logarithmic."""
        numbers = self.numbers_at(units)
        return np.log10(numbers) if self.log else numbers

    def units_of(self, values: Sequence[ParamValue]) -> Array:
        if self.choices:
            known = {_key(choice): at for at, choice in enumerate(self.choices)}
            slots = np.array([known.get(_key(value), nan) for value in values])
            return np.nan_to_num((slots + 0.5) / self.count, nan=ABSENT)
        numbers = np.array([v if isinstance(v, int | float) else nan for v in values], dtype=float)
        numbers = np.clip(numbers, *self.bounds)
        numbers = np.log(numbers) if self.log else numbers
        low, high = self.edges
        return np.nan_to_num((numbers - low) / (high - low or nan), nan=ABSENT)

    def unit_of_features(self, features: Array) -> float:
        if not self.choices:
            return float(features[0])
        if self.columns > 1:
            return (int(np.argmax(features)) + 0.5) / self.count
        index = round(float(features[0]) * (self.count - 1))
        return (index + 0.5) / self.count

    def features_of(self, units: Array) -> Array:
        if not self.choices:
            if not self.step:
                return np.clip(units, 0.0, 1.0)[:, None]
            low, high = self.edges
            numbers = self.numbers_at(units)
            numbers = np.log(numbers) if self.log else numbers
            return ((numbers - low) / (high - low) if high > low else units)[:, None]
        slots = self._slots(units)
        if self.columns > 1:
            return np.eye(self.count)[slots]
        return (slots / max(self.count - 1, 1))[:, None]

    def is_one_of(self, units: Array, values: tuple[ParamValue, ...]) -> Mask:
        if self.choices:
            keys = {_key(value) for value in values}
            wanted = [at for at, choice in enumerate(self.choices) if _key(choice) in keys]
            return np.isin(self._slots(units), wanted)
        wanted_numbers = [float(v) for v in values if isinstance(v, int | float)]
        near = np.isclose(self.numbers_at(units)[:, None], np.array(wanted_numbers)[None, :])
        return np.asarray(near.any(axis=1), dtype=bool)

    def apply_prior(self, units: Array, mean: float, deviation: float) -> Array:
        """Draws of a truncated normal distribution."""
        scale = np.log(10.0) if self.log else 1.0
        low, high = self.edges
        ends = ndtr((np.array([low, high]) / scale - mean) / deviation)
        inside = np.clip(ends[0] + units * (ends[1] - ends[0]), 1e-12, 1.0 - 1e-12)
        drawn = (mean + deviation * ndtri(inside)) * scale
        return np.clip((drawn - low) / (high - low) if high > low else units, 0.0, 1.0)

    def _slots(self, units: Array) -> NDArray[np.intp]:
        return np.clip((units * self.count).astype(np.intp), 0, self.count - 1)


def _key(value: ParamValue) -> tuple[bool, ParamValue]:
    """True == 1 in Python, so the type decides between the two."""
    return isinstance(value, bool), value
