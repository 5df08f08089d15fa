"""In-memory table of samples: named columns of equal length, a content fingerprint, encoded features."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import xxhash

from yunlu.core.errors import DataError, did_you_mean
from yunlu.core.value import Value
from yunlu.training.data.files import read_whole, reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Column = np.ndarray | list[Any]


@dataclass(frozen=True, slots=True)
class FileRef:
    """Reference to a file that is read on demand: a path or fsspec URL, or inline bytes."""

    path: str
    data: bytes | None = field(default=None, repr=False)
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    """Storage options of the fsspec file system, as pairs."""

    def read(self) -> bytes:
        """The file's bytes; an unreadable file is a ``DataError`` that names it."""
        if self.data is not None:
            return self.data
        with reading(self.path), fsspec.open(self.path, "rb", **dict(self.options)) as file:
            return read_whole(file, self.path)

    def __str__(self) -> str:
        return self.path


class ImageRef(FileRef):
    """An image file."""


class AudioRef(FileRef):
    """A sound file."""


@dataclass(frozen=True, slots=True, eq=False)
class DataTable:
    """Columns of equal length: arrays where the values are numbers, lists where they are not."""

    columns: dict[str, Column]
    fingerprint: str = ""
    """Fingerprint of the source if known, else of the columns' content."""
    positions: np.ndarray | None = field(default=None, repr=False)
    """Index of each sample in the source, if this is a subset."""

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise DataError(f"the columns differ in length ({listing})")
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _content_fingerprint(self.columns))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        """The column of that name; an unknown one is a ``DataError`` that suggests the nearest."""
        if name not in self.columns:
            raise DataError(
                f"the data has no column {name!r}", hint=did_you_mean(name, self.columns)
            )
        return self.columns[name]

    def take(self, indices: Sequence[int] | np.ndarray) -> DataTable:
        """The samples at these positions, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        digest = xxhash.xxh3_128(self.fingerprint.encode())
        digest.update(chosen.tobytes())
        return DataTable(
            {name: _take(column, chosen) for name, column in self.columns.items()},
            digest.hexdigest(),
            chosen if self.positions is None else self.positions[chosen],
        )

    def source_row(self, index: int) -> int:
        """Row number of the sample in its source, from 1, for error messages."""
        return 1 + (index if self.positions is None else int(self.positions[index]))


def rows_to_table(rows: Sequence[Any], names: Sequence[str]) -> DataTable:
    """Rows as a table: mappings from column to value, or values in the order of ``names``."""
    columns: dict[str, Column] = {}
    for position, name in enumerate(names):
        values = [_cell(row, name, position, len(names)) for row in rows]
        is_number = all(value is None or isinstance(value, int | float) for value in values)
        # As the readers have it: a missing number is NaN.
        columns[name] = np.array(values, dtype=np.float64) if is_number else values
    return DataTable(columns)


def _cell(row: Any, name: str, position: int, width: int) -> Any:
    if not isinstance(row, Mapping):
        if isinstance(row, str) or len(row) != width:
            raise DataError(f"a row is {row!r:.80}; {width} values were expected")
        value = row[position]
    elif name in row:
        value = row[name]
    else:
        raise DataError(f"a row has no {name!r}", hint=did_you_mean(name, map(str, row)))
    return value.item() if isinstance(value, np.generic) else value


def _take(column: Column, indices: np.ndarray) -> Column:
    if isinstance(column, np.ndarray):
        return column[indices]
    return [column[index] for index in indices.tolist()]


def _content_fingerprint(columns: dict[str, Column]) -> str:
    digest = xxhash.xxh3_128()
    for name, column in columns.items():
        digest.update(f"{name}\0{len(column)}\0".encode())
        for value in [column] if isinstance(column, np.ndarray) else column:
            data = _value_bytes(value)
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def _value_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, FileRef):
        return value.path.encode() + b"\0" + (value.data or b"")
    return f"{type(value).__name__}:{value!r}".encode()


MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
# 007 is an identifier, not a number.
_PADDED = re.compile(r"[+-]?0\d")


def parse_cells(cells: Sequence[str]) -> Column:
    """Parse cells of a text file: an array if every filled cell is a number, else strings.

    Integers give int64; a fraction, or a missing cell (``NaN``), gives float64.
    """
    stripped = [cell.strip() for cell in cells]
    missing = [cell.lower() in MISSING for cell in stripped]
    if all(missing) or any(_PADDED.match(cell) for cell in stripped):
        return stripped
    numbers = ["nan" if gone else cell for cell, gone in zip(stripped, missing, strict=True)]
    if not any(missing):
        try:
            return np.array([int(cell) for cell in numbers], dtype=np.int64)
        except (ValueError, OverflowError):
            pass
    try:
        return np.array([float(cell) for cell in numbers], dtype=np.float64)
    except ValueError:
        return stripped


def as_column(values: list[Any]) -> Column:
    """Convert Python values: an array if all are numbers (``None`` becomes ``NaN``), else the list."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.array(values, dtype=np.bool_)
    if kinds == {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            return np.array(values, dtype=np.float64)
    if kinds & {int, float} and kinds <= {int, float, type(None)}:
        filled = [np.nan if value is None else value for value in values]
        return np.array(filled, dtype=np.float64)
    return values


ONE_HOT_LIMIT = 50
"""Columns with more categories are embedded if the model can, else limited to the most frequent."""


class NumericFeature(Value):
    """A column of numbers (or of equal-length vectors), standardised; ``NaN`` becomes the mean."""

    name: str
    mean: list[float]
    std: list[float]
    missing: list[int]
    """Entries with missing values: each gets an indicator feature."""

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.mean) + len(self.missing)

    def encode(self, table: DataTable) -> np.ndarray:
        """``(samples, width)``."""
        values = _matrix(table, self.name)
        if values.shape[1] != len(self.mean):
            raise DataError(
                f"column {self.name!r} has {values.shape[1]} values per sample; "
                f"in training it had {len(self.mean)}"
            )
        is_missing = np.isnan(values)
        scaled = (values - np.array(self.mean)) / np.array(self.std)
        return np.concatenate(
            [np.where(is_missing, 0.0, scaled), is_missing[:, self.missing]], axis=1
        )


class CategoryFeature(Value):
    """A categorical column: one-hot, or an index for an embedding. 0 means unknown."""

    name: str
    values: list[str]
    embedded: bool

    @property
    def width(self) -> int:
        """Number of features."""
        return 1 if self.embedded else len(self.values)

    def encode(self, table: DataTable) -> np.ndarray:
        """``(samples, width)``; a value not seen in training is all zeros."""
        index = {value: number for number, value in enumerate(self.values, start=1)}
        ids = np.array([index.get(str(value), 0) for value in table[self.name]], dtype=np.int64)
        if self.embedded:
            return ids[:, None].astype(np.float64)
        return np.eye(len(self.values) + 1)[ids][:, 1:]


class FeatureMap(Value):
    """Feature encoding of a table: fitted on training data, saved with the model."""

    numeric: list[NumericFeature]
    categories: list[CategoryFeature]
    """Embedded ones last, so that their indices are the last columns of the matrix."""
    left_out: list[str]
    """Excluded columns: a different value in every row."""

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return sum(feature.width for feature in (*self.numeric, *self.categories))

    @property
    def embedded_sizes(self) -> list[int]:
        """Number of indices of each embedded column."""
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
        values = _category_values(table, name)
        counts = Counter(value for value in values if value is not None)
        if len(counts) == len(values) > ONE_HOT_LIMIT:
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


def find_column(table: DataTable, requested: str | None, names: Iterable[str], *, key: str) -> str:
    """The column that the job names, else the one with a conventional name."""
    if requested is not None:
        table[requested]  # raises for an unknown name, with a suggestion
        return requested
    name = conventional_column(table, names)
    if name is None:
        is_sole = len(table.columns) == 1
        raise DataError(
            f"cannot tell which column is the {key.rsplit('.', 1)[-1]}: the data has "
            f"{'only ' * is_sole}{', '.join(table.columns)}",
            hint="a sample needs an input and a target, such as a line label<TAB>sentence"
            if is_sole
            else f"set {key} to one of them",
        )
    return name


def conventional_column(table: DataTable, names: Iterable[str]) -> str | None:
    """The first of these names that the data has, in any spelling (``userId``, ``user_id``)."""
    bare = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in table.columns}
    return next((bare[name] for name in names if name in bare), None)


def _fit_numeric(table: DataTable, name: str) -> NumericFeature:
    values = _matrix(table, name)
    is_missing = np.isnan(values)
    count = np.maximum((~is_missing).sum(axis=0), 1)
    mean = np.where(is_missing, 0.0, values).sum(axis=0) / count
    deviation = np.where(is_missing, 0.0, values - mean)
    std = np.sqrt((deviation**2).sum(axis=0) / count)
    return NumericFeature(
        name=name,
        mean=mean.tolist(),
        # Constant columns are not scaled: dividing by the rounding error would create noise.
        std=np.where(std > 1e-12 * np.maximum(np.abs(mean), 1e-300), std, 1.0).tolist(),
        missing=np.flatnonzero(is_missing.any(axis=0)).tolist(),
    )


def _fit_category(name: str, counts: Counter[str], *, embed: bool) -> CategoryFeature:
    is_large = len(counts) > ONE_HOT_LIMIT
    values = counts if embed or not is_large else dict(counts.most_common(ONE_HOT_LIMIT))
    return CategoryFeature(name=name, values=sorted(values), embedded=embed and is_large)


def _matrix(table: DataTable, name: str) -> np.ndarray:
    column = table[name]
    if not is_numeric(column):
        raise DataError(f"column {name!r} was numbers in training; here it has {column[0]!r}")
    try:
        values = np.asarray(column, dtype=np.float64).reshape(len(column), -1)
    except (ValueError, TypeError) as error:
        raise DataError(f"column {name!r} holds lists that are not equally many numbers") from error
    infinite_rows = np.flatnonzero(np.isinf(values).any(axis=1))
    if len(infinite_rows):
        row = table.source_row(int(infinite_rows[0]))
        raise DataError(f"column {name!r} is infinite in row {row}", hint="leave the cell empty")
    return values


def _category_values(table: DataTable, name: str) -> list[str | None]:
    def word(value: Any) -> str | None:
        if isinstance(value, (FileRef, dict, bytes)):
            kind = type(value).__name__
            raise DataError(
                f"column {name!r} holds {kind}, which is neither a number nor a word",
                hint="name the columns to use in data.input",
            )
        return None if value is None or value == "" else str(value)

    return [word(value) for value in table[name]]
