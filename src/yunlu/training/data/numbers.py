"""Detection of numeric columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.data.table import Column

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
