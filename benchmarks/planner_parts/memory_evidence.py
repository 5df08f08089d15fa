"""Rows that say what memory they took, or that they had too little: as points."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.planner_parts.evidence import DEFAULT_FOLDER, FINE_TUNING, read_tables

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.planning.predict.query_batch import QueryBatch

SOURCES = ("nanotron_playbook", "torchtitan", FINE_TUNING)
UNIT_BYTES = {"nanotron_playbook": 2**30}
"""Bytes of the unit of ``peak_mem_gb``: nanotron's log divides by 2^30; others were converted."""
DEVICE_MIB = {
    "H100-80GB-SXM": 81559,
    "H100-96GB-500W": 97871,
    "H200-141GB": 143771,
    "A100-80GB-SXM": 81920,
}
"""What the driver says each of the devices has."""
FULL_VOICE = 150
"""Rows with which a source has its full say; more rows count together as the root of their number."""

_FINE_TUNING_DEFAULTS = {"seq_len": "4096", "act_ckpt": "full"}
"""Of the fine-tuning table's own scripts: benchmark.py packs to 4096 tokens, and defaults.yaml
has gradient_checkpointing on."""


@dataclass(frozen=True)
class MemoryEvidence:
    """Rows that can be predicted; every column has one entry for each."""

    rows: list[dict[str, str]]
    points: QueryBatch
    source: np.ndarray
    model: np.ndarray
    ran: np.ndarray
    measured_bytes: np.ndarray
    """NaN where the row failed or does not say."""
    tokens_per_s: np.ndarray
    """Per device; 0 where the row failed."""
    reasons: dict[str, dict[str, int]]
    """For each source: why rows cannot be predicted, and how many."""

    def voice(self, chosen: np.ndarray) -> np.ndarray:
        """How much each chosen row counts."""
        voice = np.empty(int(chosen.sum()))
        for name in set(self.source[chosen]):
            mine = self.source[chosen] == name
            voice[mine] = min(1.0, (FULL_VOICE / mine.sum()) ** 0.25)
        return voice


def load(folder: Path = DEFAULT_FOLDER) -> MemoryEvidence:
    """All sources of a folder that have to do with memory, in their fixed order."""
    table = read_tables(folder, SOURCES, _with_defaults)
    kept, names = table.rows, table.source
    ran = np.array([row["status"] == "ok" for row in kept])
    unit = np.array([UNIT_BYTES.get(name, 1e9) for name in names], dtype=float)
    said = np.array([float(row["peak_mem_gb"] or "nan") for row in kept])
    speed = np.array([float(row["tokens_per_s_per_gpu"] or 0) for row in kept])
    # A fused loss (Liger's kernels) never holds the logits: to the model, no vocabulary.
    fused = np.array(["liger" in row["notes"] for row in kept])
    mib = np.array([DEVICE_MIB[row["gpu_type"]] for row in kept], dtype=float)
    return MemoryEvidence(
        rows=kept,
        points=table.points.with_columns(
            memory_bytes=mib * 2**20, vocab=np.where(fused, 0.0, table.points.vocab)
        ),
        source=names,
        model=np.array([_family(row["model"]) for row in kept]),
        ran=ran,
        measured_bytes=np.where(ran, said * unit, np.nan),
        tokens_per_s=np.where(ran, speed, 0.0),
        reasons=table.reasons,
    )


def _with_defaults(source: str, row: dict[str, str]) -> dict[str, str]:
    if source != FINE_TUNING:
        return row
    # Sequences of the table's other data set are as long as they are: nobody wrote it down.
    unknown = "refs_orca" in row["source"] or "padding-free" in row["notes"]
    seq = row["seq_len"] or ("" if unknown else _FINE_TUNING_DEFAULTS["seq_len"])
    return {**row, "seq_len": seq, "act_ckpt": row["act_ckpt"] or _FINE_TUNING_DEFAULTS["act_ckpt"]}


def _family(model: str) -> str:
    """The model itself: a quantised copy of it is not another one."""
    return re.sub(r"^.*/|meta-|-gptq|-hf", "", model.lower())
