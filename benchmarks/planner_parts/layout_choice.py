"""The layout chosen first, and the best of the first few tried, against the best that was measured.

The protocol is in ``memory_protocols.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor

from benchmarks.planner_parts import evidence as timed_evidence
from benchmarks.planner_parts import fit_time, memory_evidence
from benchmarks.planner_parts.evaluate_memory import Folds, sweep_usable_share
from benchmarks.planner_parts.memory_protocols import (
    PROBES,
    SWEEP,
    MemoryFold,
    leave_model_out,
    sweep_groups,
)
from yunlu.planning.predict.memory import cannot_run, peak_memory
from yunlu.planning.predict.step_time import step_time
from yunlu.planning.search.probe_selection import Predictions, next_probe

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.planner_parts.evidence import Evidence
    from yunlu.planning.predict.memory import MemoryConstants
    from yunlu.planning.predict.query_batch import QueryBatch

SPREAD = 0.35
"""Of the log error of a predicted speed among the layouts that are worth a try."""
ROOM_SPREAD = 0.12
"""Of the log error of a predicted peak."""


def evaluate(folder: Path = timed_evidence.DEFAULT_FOLDER) -> list[dict[str, Any]]:
    """A row for each group of the sweep, and one for all."""
    evidence = timed_evidence.load(folder)
    folds = Folds(memory_evidence.load(folder))
    predictions = predict_sweep(evidence, folds)
    ran = np.isfinite(evidence.measured)
    points = evidence.points
    rows: list[dict[str, Any]] = []
    shuffle = np.random.default_rng(0)
    for model, devices, group in sweep_groups(
        evidence.source, evidence.model, points.devices, points.batch, ran
    ):
        # The table is sorted by what was measured: the order of candidates must say nothing.
        found = probe(evidence, predictions, shuffle.permutation(group))
        rows.append(
            {
                "source": SWEEP,
                "protocol": "layouts LOMO",
                "model": model,
                "devices": devices,
                **found,
            }
        )
    every = {
        name: float(np.mean([row[name] for row in rows]))
        for name in ("top-1", f"after {PROBES} probes")
    }
    return [*rows, {"source": SWEEP, "protocol": "layouts LOMO", "rows": len(rows), **every}]


def predict_sweep(evidence: Evidence, folds: Folds) -> Predictions:
    """Of the sweep's rows, each by what was learned from the other models."""
    count = len(evidence)
    speed, room, runs = np.ones(count), np.zeros(count), np.zeros(count)
    for fold in leave_model_out(evidence.source, evidence.model, SWEEP):
        points = evidence.points.take(np.flatnonzero(fold.test))
        speed[fold.test] = _speeds(evidence, folds, fold)
        fitted = folds.without((SWEEP, fold.name))
        peak = peak_memory(points, fitted.constants).total
        usable = sweep_usable_share(folds, fitted, without=fold.name)
        room[fold.test] = np.log(usable * points.memory_bytes / peak)
        runs[fold.test] = np.where(cannot_run(points, fitted.constants), 1e-6, 1.0)
    return Predictions(
        speed=speed,
        spread=np.full(count, SPREAD),
        room=room,
        room_spread=np.full(count, ROOM_SPREAD),
        runs=runs,
    )


def _speeds(evidence: Evidence, folds: Folds, fold: MemoryFold) -> np.ndarray:
    """The step-time model without the fold's model, and what its errors on the others have in common."""
    own = evidence.source == SWEEP
    known = fold.fit & evidence.timed
    constants = folds.without((SWEEP, fold.name)).constants
    errors: list[np.ndarray] = []
    layouts: list[np.ndarray] = []
    for other in sorted(set(evidence.model[own & fold.fit])):
        asked = known & own & (evidence.model == other)
        told = _pace(evidence, fit_time.fit(evidence, known & ~asked), asked)
        errors.append(np.log(evidence.measured[asked] / told))
        layouts.append(_features(evidence.points.take(np.flatnonzero(asked)), constants))
    # Speeds of the sweep have two humps (docs/planner-model.md): trees, and a loss that forgives.
    trees = GradientBoostingRegressor(
        loss="huber",
        max_depth=4,
        n_estimators=300,
        learning_rate=0.05,
        subsample=0.6,
        min_samples_leaf=8,
        random_state=0,
    ).fit(np.concatenate(layouts), np.clip(np.concatenate(errors), -2.5, 1.5))
    ahead = _features(evidence.points.take(np.flatnonzero(fold.test)), constants)
    return _pace(evidence, fit_time.fit(evidence, known), fold.test) * np.exp(trees.predict(ahead))


def _pace(evidence: Evidence, fitted: fit_time.Fit, rows: np.ndarray) -> np.ndarray:
    points = evidence.points.take(np.flatnonzero(rows))
    with np.errstate(all="ignore"):
        return (
            points.batch
            * points.seq
            / (step_time(points, fitted.constants).total_s * points.devices)
        )


def _features(points: QueryBatch, constants: MemoryConstants) -> np.ndarray:
    """Where a layout lies, in doublings, and how full it makes the memory."""
    full = np.log(peak_memory(points, constants).total / points.memory_bytes)
    splits = (
        points.devices,
        points.tp,
        points.pp,
        points.replicas,
        points.micro_batch,
        points.micros,
    )
    return np.stack(
        [*(np.log2(split) for split in splits), points.zero, np.clip(full, -1.2, 0.3)], axis=1
    )


def probe(evidence: Evidence, predictions: Predictions, group: np.ndarray) -> dict[str, float]:
    """Tries the layouts of a group one after another."""
    points = evidence.points.take(group)
    mine = Predictions(
        **{name: getattr(predictions, name)[group] for name in Predictions.__dataclass_fields__}
    )
    measured = np.nan_to_num(evidence.measured[group])
    tried: list[int] = []
    for _ in range(min(PROBES, len(group))):
        tried.append(next_probe(points, mine, tried, [float(measured[i]) for i in tried]))
    share = measured[tried] / measured.max()
    return {"top-1": float(share[0]), f"after {PROBES} probes": float(share.max())}
