"""CSV files of numbers, read with errors that name file and line."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class SimulationError(YunluError):
    """A workload, profile or cluster that cannot be simulated."""

    code = "simulation"


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All rows, each with at least these columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            result = reader.fieldnames or []
            missing = [name for name in columns if name not in result]
            if missing:
                raise SimulationError(
                    f"{path}: there is no column {', '.join(missing)}.",
                    hint=f"its first line should hold: {','.join(columns)}",
                )
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        text = getattr(error, "strerror", None) or error
        raise SimulationError(
            f"{path} cannot be read as CSV: {text}.",
            hint=f"name a file whose first line holds: {','.join(columns)}",
        ) from error
    if not rows:
        raise SimulationError(
            f"{path} has no rows below its head.", hint=f"each holds: {','.join(columns)}"
        )
    return rows


def read_number(path: Path, line: int, row: dict[str, str], column: str) -> float:
    """One cell as a finite number; ``line`` counts rows below the head from 0."""
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SimulationError(f"{path}, line {line + 2}: {column} is {text!r}, not a number.")
    return value


def read_count(path: Path, line: int, row: dict[str, str], column: str) -> int:
    """One cell as a whole number above 0."""
    value = read_number(path, line, row, column)
    if value != int(value) or value < 1:
        raise SimulationError(
            f"{path}, line {line + 2}: {column} is {row[column]!r}, not a whole number above 0."
        )
    return int(value)
