"""The measured rows: read once, as points, with what was measured beside them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.catalog import load_catalog
from yunlu.planning.predict.rows import measured_tokens_per_s, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.planning.predict.query_batch import QueryBatch

COLD_SOURCES = (
    "vtrain_single",
    "vtrain_multi",
    "llm_foundry",
    "megatron_bridge",
    "nemo",
    "torchtitan",
    "fms_fsdp",
    "ascend",
    "nanotron_playbook",
    "tpu_maxtext",
    "trainium",
)
"""Files of the evidence, without ``.csv``, that the throughput protocols are about."""
FINE_TUNING = "finetune_fms_acceleration"
SOURCES = (*COLD_SOURCES, FINE_TUNING)

DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "planner"


@dataclass(frozen=True)
class Evidence:
    """Rows that can be predicted; every column has one entry for each."""

    rows: list[dict[str, str]]
    points: QueryBatch
    cores: np.ndarray
    source: np.ndarray
    model: np.ndarray
    measured: np.ndarray
    """Tokens per second and device of the row; NaN where the row failed or has none."""
    reasons: dict[str, dict[str, int]]
    """For each source: why rows cannot be predicted, and how many."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def timed(self) -> np.ndarray:
        """Rows whose throughput was measured and that the throughput protocols are about."""
        return self._judged & (self.points.experts <= 1)

    @property
    def routed(self) -> np.ndarray:
        """The same of models with experts; apart, since the frozen protocols are about dense ones."""
        return self._judged & (self.points.experts > 1)

    @property
    def _judged(self) -> np.ndarray:
        return np.isfinite(self.measured) & np.isin(self.source, COLD_SOURCES)


@dataclass(frozen=True)
class Table:
    """Rows of several files that can be predicted, and why the others cannot."""

    rows: list[dict[str, str]]
    points: QueryBatch
    cores: np.ndarray
    source: np.ndarray
    reasons: dict[str, dict[str, int]]


def read_tables(
    folder: Path,
    names: Sequence[str],
    complete: Callable[[str, dict[str, str]], dict[str, str]] = lambda _, row: row,
) -> Table:
    """The named files in their order; ``complete`` may fill in what a source says elsewhere."""
    rows: list[dict[str, str]] = []
    source: list[str] = []
    for name in names:
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            part = [complete(name, row) for row in csv.DictReader(file)]
        rows += part
        source += [name] * len(part)
    reading = read_rows(rows, load_catalog())
    reasons: dict[str, dict[str, int]] = {}
    for position, reason in reading.reasons.items():
        counts = reasons.setdefault(source[position], {})
        counts[reason] = counts.get(reason, 0) + 1
    return Table(
        rows=[rows[place] for place in reading.index],
        points=reading.points,
        cores=reading.cores,
        source=np.array(source)[reading.index],
        reasons=reasons,
    )


def load(folder: Path = DEFAULT_FOLDER) -> Evidence:
    """All sources of a folder, in their fixed order."""
    table = read_tables(folder, SOURCES)
    ran = np.array([row["status"] == "ok" for row in table.rows])
    return Evidence(
        rows=table.rows,
        points=table.points,
        cores=table.cores,
        source=table.source,
        model=np.array([row["model"].lower() for row in table.rows]),
        measured=np.where(ran, measured_tokens_per_s(table.rows), np.nan),
        reasons=table.reasons,
    )
