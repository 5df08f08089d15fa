"""Rows of a table of runs, foretold: model, work, layout and hardware in, pace and memory out."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError
from yunlu.jobs.catalog_store import open_catalog
from yunlu.planning.predict.plausibility import COLUMNS
from yunlu.planning.predict.rows import predict_rows

if TYPE_CHECKING:
    from pathlib import Path


_HINT = (
    "the first line names the columns: model or layers and hidden, seq_len, gpu_type, gpus, tp, ..."
)


def foretell_file(path: Path) -> list[dict[str, Any]]:
    """What each row of a CSV file would give, in their order; those that say too little say so."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
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
            f"{path} has none of the columns that a run is told by; its first line is: "
            f"{shown if len(shown) < 200 else shown[:200] + ' ...'}",
            hint=_HINT,
        )
    return predict_rows(rows, open_catalog())
