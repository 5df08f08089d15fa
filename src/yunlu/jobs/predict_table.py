"""Predictions for the rows of a table: model, work, layout and hardware in, speed and memory out."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from typing import TYPE_CHECKING

from yunlu.core.errors import DataError
from yunlu.core.limits import read_bounded, read_limits
from yunlu.core.value import Value
from yunlu.jobs.catalog_store import open_catalog
from yunlu.planning.predict.rows import COLUMNS, predict_rows

if TYPE_CHECKING:
    from pathlib import Path


_HINT = (
    "the first line names the columns: model or layers and hidden, seq_len, gpu_type, gpus, tp, ..."
)


class PredictedRow(Value):
    """Prediction for one row of a table, or the reason why there is none."""

    row: int
    """Index from 0."""
    model: str = ""
    reason: str | None = None
    """Why there is no prediction."""
    tokens_per_s_per_device: float | None = None
    tokens_per_s_per_device_p10: float | None = None
    tokens_per_s_per_device_p90: float | None = None
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    peak_memory_bytes_p10: float | None = None
    peak_memory_bytes_p90: float | None = None
    peak_mem_gb: float | None = None
    """In the unit of the stack: nanotron divides by 2^30, the others by 10^9."""
    fits: bool | None = None
    stack: str | None = None
    assumed: str | None = None
    """Assumptions where the row is silent."""


def predict_file(path: Path) -> tuple[PredictedRow, ...]:
    """Predict each row of a CSV file, in their order."""
    try:
        text = _read(path).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text))
        rows = [
            {name: value or "" for name, value in row.items() if isinstance(name, str)}
            for row in table
        ]
    except FileNotFoundError:
        raise DataError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory, not a table.", hint="name one CSV file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from None
    if not rows:
        raise DataError(f"{path} has no rows.", hint=_HINT)
    names = table.fieldnames or ()
    if not set(names) & set(COLUMNS):
        shown = ", ".join(names)
        raise DataError(
            f"{path} has none of the columns that describe a run; its first line is: "
            f"{shown if len(shown) < 200 else shown[:200] + ' ...'}",
            hint=_HINT,
        )
    predicted = predict_rows(rows, open_catalog())
    return tuple(PredictedRow.model_validate(row) for row in predicted)


def _read(path: Path) -> bytes:
    limits = read_limits()
    with path.open("rb") as file:
        if path.suffix != ".gz":
            return read_bounded(file, str(path), limits)
        with gzip.GzipFile(fileobj=file) as unpacked:
            return read_bounded(unpacked, str(path), limits, packed=file.tell)
