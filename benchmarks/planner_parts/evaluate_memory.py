"""Memory, predicted out of fold: errors, intervals, and who would have failed.

The protocols are in ``memory_protocols.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.planner_parts import memory_evidence
from benchmarks.planner_parts.fit_memory import Fit, fit, predict_peak
from benchmarks.planner_parts.memory_protocols import SWEEP, leave_model_out
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.intervals import widening
from yunlu.planning.predict.memory import cannot_run, peak_memory

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.planner_parts.memory_evidence import MemoryEvidence

LOW, HIGH = 0.1, 0.9
FEW = 2
"""Sources with no more models to learn from borrow from others what their spread may be."""
Row = dict[str, str | float]


def evaluate(folder: Path = memory_evidence.DEFAULT_FOLDER) -> list[Row]:
    """One row of the table for each source, and one for the screen."""
    evidence = memory_evidence.load(folder)
    folds = Folds(evidence)
    return [*(judge(folds, source) for source in memory_evidence.SOURCES), screen(folds)]


class Folds:
    """Fits that leave models out; each is made once."""

    def __init__(self, evidence: MemoryEvidence) -> None:
        self.evidence = evidence
        self._fits: dict[frozenset[tuple[str, str]], Fit] = {}

    def without(self, *held: tuple[str, str]) -> Fit:
        """Fitted on all rows but those of the models (source, model)."""
        key = frozenset(held)
        if key not in self._fits:
            rows = np.ones(len(self.evidence.rows), dtype=bool)
            for source, model in key:
                rows &= ~((self.evidence.source == source) & (self.evidence.model == model))
            self._fits[key] = fit(self.evidence, rows)
        return self._fits[key]

    def errors(self, source: str, model: str, *others: tuple[str, str]) -> np.ndarray:
        """Logs of predicted over measured of a model that the fit has not seen, nor the others."""
        evidence = self.evidence
        rows = (evidence.source == source) & (evidence.model == model)
        rows &= np.isfinite(evidence.measured_bytes)
        fitted = self.without((source, model), *others)
        return np.log(predict_peak(evidence, fitted, rows) / evidence.measured_bytes[rows])

    def models(self, source: str) -> list[str]:
        """Those of the source of which something is known."""
        known = (self.evidence.source == source) & np.isfinite(self.evidence.measured_bytes)
        return sorted(set(self.evidence.model[known]))


def judge(folds: Folds, source: str) -> Row:
    """Errors and coverage of a source, each model predicted without itself."""
    errors: list[np.ndarray] = []
    inside: list[np.ndarray] = []
    models = folds.models(source)
    for model in models:
        error = folds.errors(source, model)
        # The interval, too, comes from models that it is not judged on.
        seen = [folds.errors(source, other, (source, model)) for other in models if other != model]
        low, high = _ends(folds, source, seen, (source, model))
        errors.append(error)
        inside.append((-error >= low) & (-error <= high))
    error = np.concatenate(errors)
    return {
        "source": source,
        "protocol": "memory LOMO",
        "rows": len(error),
        "median APE": float(np.median(np.abs(np.expm1(error)))),
        "MAPE": float(np.mean(np.abs(np.expm1(error)))),
        "within 10 %": float(np.mean(np.abs(np.expm1(error)) < 0.1)),
        "covered by 80 %": float(np.concatenate(inside).mean()),
    }


def screen(folds: Folds) -> Row:
    """Who of the sweep would fail, against who failed."""
    evidence = folds.evidence
    own = evidence.source == SWEEP
    said = np.zeros(len(evidence.rows), dtype=bool)
    for fold in leave_model_out(evidence.source, evidence.model, SWEEP):
        fitted = folds.without((SWEEP, fold.name))
        usable = sweep_usable_share(folds, fitted, without=fold.name)
        said[fold.test] = _fullness(evidence, fitted, fold.test) > usable
    failed = ~evidence.ran
    hits = float((said & failed)[own].sum())
    return {
        "source": SWEEP,
        "protocol": "screen LOMO",
        "rows": int(own.sum()),
        "recall": hits / float(failed[own].sum()),
        "precision": hits / float(said[own].sum()),
    }


def sweep_usable_share(folds: Folds, fitted: Fit, *, without: str = "") -> float:
    """The share of memory that tells best who of the sweep ran, but for those of one model."""
    own = (folds.evidence.source == SWEEP) & (folds.evidence.model != without)
    return round(usable_share(_fullness(folds.evidence, fitted, own), folds.evidence.ran[own]), 3)


def _fullness(evidence: MemoryEvidence, fitted: Fit, rows: np.ndarray) -> np.ndarray:
    """Predicted peaks over the devices' memory; without end where a run is known not to work."""
    points, constants = evidence.points.take(np.flatnonzero(rows)), fitted.constants
    share = peak_memory(points, constants).total / points.memory_bytes
    return np.where(cannot_run(points, constants), np.inf, share)


def usable_share(fullness: np.ndarray, ran: np.ndarray) -> float:
    """The share of memory above which to refuse, so that the fewest are told wrongly."""
    shares = np.linspace(0.6, 1.0, 81)
    wrong = np.array([int(((fullness > share) == ran).sum()) for share in shares])
    return float(np.median(shares[wrong == wrong.min()]))


def spreads(folds: Folds) -> dict[str, list[float]]:
    """For each stack, and for one we know nothing of: the factors of its 10-90 % interval."""
    evidence = folds.evidence
    found: dict[str, list[float]] = {}
    every: list[np.ndarray] = []
    for source in memory_evidence.SOURCES:
        errors = [folds.errors(source, model) for model in folds.models(source)]
        low, high = _ends(folds, source, errors)
        stack = STACKS[int(evidence.points.stack[evidence.source == source][0])]
        found[stack] = [round(float(np.exp(low)), 3), round(float(np.exp(high)), 3)]
        every.append(np.concatenate(errors))
    # A stack that was never seen: as if each source were a draw, and wider by half for what differs.
    low, high = _quantiles(every)
    found["unknown"] = [round(float(np.exp(1.5 * low)), 3), round(float(np.exp(1.5 * high)), 3)]
    return found


def _ends(
    folds: Folds, source: str, errors: list[np.ndarray], *held: tuple[str, str]
) -> tuple[float, float]:
    """The quantiles of a source; of few models with what others tell, and wider."""
    if len(errors) > FEW:
        return _quantiles(errors)
    low, high = _quantiles([*errors, *_elsewhere(folds, source, *held)])
    middle, half = (low + high) / 2, (high - low) / 2 * widening(len(errors))
    return middle - half, middle + half


def _elsewhere(folds: Folds, source: str, *held: tuple[str, str]) -> list[np.ndarray]:
    return [
        folds.errors(other, model, *held)
        for other in memory_evidence.SOURCES
        if other != source
        for model in folds.models(other)
    ]


def _quantiles(errors: list[np.ndarray]) -> tuple[float, float]:
    """Of measured over predicted, in logs; every group counts the same."""
    if not errors:
        return -0.2, 0.2
    values = -np.concatenate(errors)
    weight = np.concatenate([np.full(len(error), 1 / len(error)) for error in errors])
    order = np.argsort(values)
    reached = np.cumsum(weight[order]) / weight.sum()
    low, high = np.minimum(np.searchsorted(reached, [LOW, HIGH]), len(values) - 1)
    return float(values[order][low]), float(values[order][high])
