"""Rows of a table of runs, foretold: model, work, layout and hardware in, pace and memory out."""

from __future__ import annotations

import csv
import gzip
import io
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError
from yunlu.jobs.catalog_store import open_catalog
from yunlu.planning.foretell.rows import foretell_rows

if TYPE_CHECKING:
    from pathlib import Path


def foretell_file(path: Path) -> list[dict[str, Any]]:
    """What each row of a CSV file would give, in their order; those that say too little say so."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from None
    rows = [
        {name: value or "" for name, value in row.items() if isinstance(name, str)}
        for row in csv.DictReader(io.StringIO(text))
    ]
    if not rows:
        raise DataError(
            f"{path} has no rows.",
            hint="the first line names the columns (model, n_gpus, gpu_type, tp, pp, ...)",
        )
    return foretell_rows(rows, open_catalog())
