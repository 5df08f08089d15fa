"""In-memory table of samples: named columns of equal length, with a content fingerprint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import xxhash

from yunlu.core.errors import DataError, did_you_mean
from yunlu.training.data.files import read_whole, reading

if TYPE_CHECKING:
    from collections.abc import Sequence

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
