"""Columns to one matrix of features, by statistics of the training data."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import DataError
from yunlu.core.value import Value
from yunlu.training.data.numbers import MISSING
from yunlu.training.data.table import Column, DataTable, FileRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ONE_HOT_LIMIT = 50
"""Categories with more values are embedded where the model can, else cut to the most frequent."""


class NumericFeature(Value):
    """A column of numbers (or of equal-length vectors), standardised; ``NaN`` becomes the mean."""

    name: str
    mean: list[float]
    std: list[float]
    missing: list[int]
    """Which entries were sometimes missing: each gets an indicator of its own."""

    @property
    def width(self) -> int:
        """Features it makes."""
        return len(self.mean) + len(self.missing)

    def encode(self, table: DataTable) -> np.ndarray:
        """``(samples, width)``."""
        values = _matrix(table, self.name)
        if values.shape[1] != len(self.mean):
            raise DataError(
                f"column {self.name!r} has {values.shape[1]} values per sample; "
                f"in training it had {len(self.mean)}"
            )
        gone = np.isnan(values)
        scaled = (values - np.array(self.mean)) / np.array(self.std)
        return np.concatenate([np.where(gone, 0.0, scaled), gone[:, self.missing]], axis=1)


class CategoryFeature(Value):
    """A column of words: one-hot, or a number for an embedding. 0 stands for all others."""

    name: str
    values: list[str]
    embedded: bool

    @property
    def width(self) -> int:
        """Features it makes."""
        return 1 if self.embedded else len(self.values)

    def encode(self, table: DataTable) -> np.ndarray:
        """``(samples, width)``; a value not seen in training is all zeros."""
        place = {value: number for number, value in enumerate(self.values, start=1)}
        ids = np.array([place.get(str(value), 0) for value in table[self.name]], dtype=np.int64)
        if self.embedded:
            return ids[:, None].astype(np.float64)
        return np.eye(len(self.values) + 1)[ids][:, 1:]


class FeatureMap(Value):
    """How a table becomes features: fitted on training data, saved with the model."""

    numeric: list[NumericFeature]
    categories: list[CategoryFeature]
    """Embedded ones last, so that their numbers are the last columns of the matrix."""
    left_out: list[str]
    """Columns that can teach nothing: a different word in every row."""

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return sum(feature.width for feature in (*self.numeric, *self.categories))

    @property
    def embedded_sizes(self) -> list[int]:
        """For each trailing column that is a number to embed: how many numbers there are."""
        return [len(feature.values) + 1 for feature in self.categories if feature.embedded]

    def encode(self, table: DataTable) -> np.ndarray:
        """``(samples, width)`` in float32."""
        blocks = [feature.encode(table) for feature in (*self.numeric, *self.categories)]
        return np.concatenate(blocks, axis=1).astype(np.float32)


def fit_features(table: DataTable, names: Sequence[str], *, embed: bool) -> FeatureMap:
    """Learn means, deviations and vocabularies of the columns from the training data."""
    numeric: list[NumericFeature] = []
    categories: list[CategoryFeature] = []
    left_out: list[str] = []
    for name in names:
        if is_numeric(table[name]):
            numeric.append(_fit_numeric(table, name))
            continue
        words = _words(table, name)
        counts = Counter(word for word in words if word is not None)
        if len(counts) == len(words) > ONE_HOT_LIMIT:
            left_out.append(name)
        else:
            categories.append(_fit_category(name, counts, embed=embed))
    if names and not any(_has_value(table[name]) for name in names):
        raise DataError(
            f"no column to learn from: no row has a value in {', '.join(names)}",
            hint="check the file, and data.input where it is set",
        )
    if not numeric and not categories:
        raise DataError(
            f"no column to learn from (left out, a different word in every row: {left_out})"
            if left_out
            else "no column to learn from besides the target"
        )
    categories.sort(key=lambda feature: feature.embedded)
    return FeatureMap(numeric=numeric, categories=categories, left_out=left_out)


def is_numeric(column: Column) -> bool:
    """Whether the values are numbers, or vectors of numbers."""
    if isinstance(column, np.ndarray):
        return column.dtype.kind in "biuf"
    return isinstance(column[0], (list, np.ndarray)) if column else False


def _has_value(column: Column) -> bool:
    if is_numeric(column):
        return not np.isnan(np.asarray(column, dtype=np.float64)).all()
    return any(value is not None and str(value).strip().lower() not in MISSING for value in column)


def find_column(table: DataTable, asked: str | None, names: Iterable[str], *, key: str) -> str:
    """The column a job asks for, else the one with a customary name."""
    if asked is not None:
        table[asked]  # an unknown name is an error that suggests the nearest
        return asked
    found = customary(table, names)
    if found is None:
        is_sole = len(table.columns) == 1
        raise DataError(
            f"cannot tell which column is the {key.rsplit('.', 1)[-1]}: the data has "
            f"{'only ' * is_sole}{', '.join(table.columns)}",
            hint="a sample needs an input and a target, such as a line label<TAB>sentence"
            if is_sole
            else f"set {key} to one of them",
        )
    return found


def customary(table: DataTable, names: Iterable[str]) -> str | None:
    """The first of these names that the data has, in whatever spelling (``userId``, ``user_id``)."""
    bare = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in table.columns}
    return next((bare[name] for name in names if name in bare), None)


def _fit_numeric(table: DataTable, name: str) -> NumericFeature:
    values = _matrix(table, name)
    gone = np.isnan(values)
    count = np.maximum((~gone).sum(axis=0), 1)
    mean = np.where(gone, 0.0, values).sum(axis=0) / count
    deviation = np.where(gone, 0.0, values - mean)
    std = np.sqrt((deviation**2).sum(axis=0) / count)
    return NumericFeature(
        name=name,
        mean=mean.tolist(),
        # A constant column carries nothing; dividing by its rounding error would make noise of it.
        std=np.where(std > 1e-12 * np.maximum(np.abs(mean), 1e-300), std, 1.0).tolist(),
        missing=np.flatnonzero(gone.any(axis=0)).tolist(),
    )


def _fit_category(name: str, counts: Counter[str], *, embed: bool) -> CategoryFeature:
    is_large = len(counts) > ONE_HOT_LIMIT
    kept = counts if embed or not is_large else dict(counts.most_common(ONE_HOT_LIMIT))
    return CategoryFeature(name=name, values=sorted(kept), embedded=embed and is_large)


def _matrix(table: DataTable, name: str) -> np.ndarray:
    column = table[name]
    if not is_numeric(column):
        raise DataError(f"column {name!r} was numbers in training; here it has {column[0]!r}")
    try:
        values = np.asarray(column, dtype=np.float64).reshape(len(column), -1)
    except (ValueError, TypeError) as error:
        raise DataError(f"column {name!r} holds lists that are not equally many numbers") from error
    endless = np.flatnonzero(np.isinf(values).any(axis=1))
    if len(endless):
        row = table.source_row(int(endless[0]))
        raise DataError(f"column {name!r} is infinite in row {row}", hint="leave the cell empty")
    return values


def _words(table: DataTable, name: str) -> list[str | None]:
    def word(value: Any) -> str | None:
        if isinstance(value, (FileRef, dict, bytes)):
            kind = type(value).__name__
            raise DataError(
                f"column {name!r} holds {kind}, which is neither a number nor a word",
                hint="name the columns to use in data.input",
            )
        return None if value is None or value == "" else str(value)

    return [word(value) for value in table[name]]
