"""The measured rows: read once, as points, with what was measured beside them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yunlu.catalog.catalog import load_catalog
from yunlu.planning.foretell.rows import measured_tokens_per_s, read_rows

if TYPE_CHECKING:
    from yunlu.planning.foretell.points import Points

SOURCES = (
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
    "finetune_fms_acceleration",
)
"""Files of the evidence, without ``.csv``."""

DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "planner"


@dataclass(frozen=True)
class Evidence:
    """Rows that can be foretold; every column has one entry for each."""

    rows: list[dict[str, str]]
    points: Points
    cores: np.ndarray
    source: np.ndarray
    model: np.ndarray
    measured: np.ndarray
    """Tokens per second and device of the row; NaN where the row failed or has none."""
    reasons: dict[str, dict[str, int]]
    """For each source: why rows cannot be foretold, and how many."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def timed(self) -> np.ndarray:
        """Rows whose throughput was measured and that the throughput protocols are about."""
        dense = self.points.experts <= 1
        kept = np.isin(self.source, [s for s in SOURCES if s != "finetune_fms_acceleration"])
        return np.isfinite(self.measured) & dense & kept


def load(folder: Path = DEFAULT_FOLDER) -> Evidence:
    """All sources of a folder, in their fixed order."""
    rows: list[dict[str, str]] = []
    source: list[str] = []
    for name in SOURCES:
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            part = list(csv.DictReader(file))
        rows += part
        source += [name] * len(part)
    reading = read_rows(rows, load_catalog())
    reasons: dict[str, dict[str, int]] = {}
    for position, reason in reading.reasons.items():
        counts = reasons.setdefault(source[position], {})
        counts[reason] = counts.get(reason, 0) + 1
    kept = [rows[i] for i in reading.index]
    ok = np.array([row["status"] == "ok" for row in kept])
    measured = np.where(ok, measured_tokens_per_s(kept), np.nan)
    return Evidence(
        rows=kept,
        points=reading.points,
        cores=reading.cores,
        source=np.array(source)[reading.index],
        model=np.array([row["model"].lower() for row in kept]),
        measured=measured,
        reasons=reasons,
    )
