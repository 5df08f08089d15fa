"""Fits the constants of the memory model, and what versions of a stack were seen to do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.planner_parts import memory_evidence
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.memory import (
    NAMES,
    MemoryConstants,
    habit_features,
    peak_memory,
    read_constants,
)

if TYPE_CHECKING:
    from benchmarks.planner_parts.memory_evidence import MemoryEvidence

WRITTEN = Path(__file__).resolve().parents[2] / "src/yunlu/planning/data/memory.json"
NOISE = 0.05
"""Spread of log errors that no model would explain."""
PRIORS: dict[str, tuple[float, float, float]] = {
    # value, spread of the shared log about it, spread of a stack's departure (0: none departs)
    "weight_bytes": (2.0, 0.05, 0.05),
    "gradient_bytes": (4.0, 0.1, 0.2),
    "optimizer_bytes": (12.0, 0.05, 0.1),
    "shard_bytes": (0.5, 0.5, 0.0),
    "gathered_units": (2.0, 0.15, 0.8),
    "unit_gradient_bytes": (2.0, 0.3, 0.0),
    "norm_bytes": (10.0, 0.4, 0.3),
    "whole_bytes": (4.0, 0.4, 0.0),
    "attention_bytes": (2.0, 0.2, 0.2),
    "mlp_bytes": (2.0, 0.2, 0.2),
    "selective_share": (0.6, 0.2, 0.2),
    "logit_bytes": (10.0, 0.4, 0.3),
    "embedding_bytes": (6.0, 0.5, 0.0),
    "step_bytes": (4.0, 0.5, 0.0),
    "framework_bytes": (4e8, 0.7, 0.7),
    "rank_bytes": (1e5, 0.7, 0.0),
}
GIVEN: dict[str, dict[str, float]] = {
    # 16-bit weights with 32-bit copies, gradients and moments, unless a stack's design differs.
    "nanotron": {"head_weighs": 1.0, "first_reports": 1.0},
    "torchtitan": {
        "weight_bytes": 4.0,
        "gradient_bytes": 4.0,
        "optimizer_bytes": 8.0,
        "whole_share": 1.0,
    },
    # By its design and by rehearsals of it (benchmarks/rehearsal.py --formulas): no table has rows of it.
    "yunlu": {
        "weight_bytes": 4.0,
        "gradient_bytes": 4.0,
        "optimizer_bytes": 8.0,
        "whole_share": 1.0,
        "passing_gradients": 1.0,
        "lowered_bytes": 2.0,
        "input_bytes": 4.0,
        "attention_bytes": 2.0,
        "mlp_bytes": 2.0,
        "gathered_units": 9.989,
        "unit_gradient_bytes": 1.1645,
        "whole_bytes": 5.7003,
        "selective_share": 0.54968,
        "embedding_bytes": 3.6127,
        "shard_bytes": 0.45722,
        "norm_bytes": 9.3794,
        "logit_bytes": 13.981,
    },
    "transformers": {"weight_bytes": 2.0, "gradient_bytes": 2.0, "optimizer_bytes": 4.0},
    "megatron-deepspeed": {"score_bytes": 5.0},
    # Gradients are as wide as their weights unless a stack's documentation says otherwise.
    "unknown": {"gradient_bytes": 2.0},
    "unknown-flash-1": {"gradient_bytes": 2.0},
    "unknown-scores": {"gradient_bytes": 2.0, "score_bytes": 5.0},
    # Written out, each norm keeps its result and a 32-bit copy of its input.
    "unknown-norms": {"gradient_bytes": 2.0, "norm_bytes": 22.0},
    "unknown-flash-1-norms": {"gradient_bytes": 2.0, "norm_bytes": 22.0},
    "unknown-scores-norms": {"gradient_bytes": 2.0, "score_bytes": 5.0, "norm_bytes": 22.0},
}
FIXED = {
    "whole_share": 0.0,
    "input_bytes": 2.0,
    "lowered_bytes": 0.0,
    "passing_gradients": 0.0,
    "score_bytes": 0.0,
    "head_weighs": 0.0,
    "first_reports": 0.0,
    "usable_share": 0.92,
}
HABITUAL = "nanotron"
TELLING = 0.2
"""Log difference from which two habits can be told apart by the memory."""
ROUNDS = 4
STEPS = 10


@dataclass(frozen=True)
class Fit:
    """Logs of what was fitted, as ``data/memory.json`` has it."""

    shared: dict[str, float]
    departures: dict[str, dict[str, float]]
    habits: dict[str, list[float]]
    spreads: dict[str, list[float]]
    usable: dict[str, float] = field(default_factory=dict)
    """Of a stack that was seen to fail: the share of memory from which it does."""

    def as_json(self) -> dict[str, Any]:
        """For ``read_constants``."""
        return {
            "shared": {**FIXED, **self.shared},
            "given": {
                **GIVEN,
                **{k: {**GIVEN.get(k, {}), "usable_share": v} for k, v in self.usable.items()},
            },
            "departures": self.departures,
            "habits": self.habits,
            "spreads": self.spreads,
        }

    @property
    def constants(self) -> MemoryConstants:
        """For ``peak_memory``."""
        return read_constants(self.as_json())


def fit(evidence: MemoryEvidence, rows: np.ndarray) -> Fit:
    """Constants from those of the rows that ran and said what they took."""
    chosen = rows & np.isfinite(evidence.measured_bytes)
    points = evidence.points.take(np.flatnonzero(chosen))
    target = np.log(evidence.measured_bytes[chosen])
    habitual = points.stack == STACKS.index(HABITUAL)
    problem = _Problem(points, target, evidence.voice(chosen))
    # Which habit a row had is not written down: guess, fit, look which explains it better, again.
    keeps = np.where(habitual, 1.0, problem.start.whole_share(points))
    logs = problem.first
    for _ in range(ROUNDS if habitual.any() else 1):
        logs = problem.solve(logs, keeps)
        if not habitual.any():
            break
        without, with_ = (problem.residual(logs, np.where(habitual, k, keeps)) for k in (0.0, 1.0))
        keeps = np.where(habitual, np.abs(with_) < np.abs(without), keeps)
    fitted = problem.read(logs)
    if habitual.any():
        telling = habitual & (with_ - without > TELLING)
        weights = _logistic(habit_features(points.take(telling)), keeps[telling])
        fitted = replace(fitted, habits={HABITUAL: [round(float(w), 4) for w in weights]})
    return fitted


def predict_peak(
    evidence: MemoryEvidence, fitted: Fit, rows: np.ndarray, **options: Any
) -> np.ndarray:
    """Bytes of the rows, of the stage that their source reports."""
    points = evidence.points.take(np.flatnonzero(rows))
    return peak_memory(
        points, fitted.constants, **{"stage": "reported", "habits": True, **options}
    ).total


def fit_and_write(folder: Path = memory_evidence.DEFAULT_FOLDER, path: Path = WRITTEN) -> Fit:
    """Fits on everything, states the spreads found out of fold, and writes the package's constants."""
    from benchmarks.planner_parts import evaluate_memory  # noqa: PLC0415 - it fits, too

    evidence = memory_evidence.load(folder)
    fitted = fit(evidence, np.ones(len(evidence.rows), dtype=bool))
    folds = evaluate_memory.Folds(evidence)
    fitted = replace(
        fitted,
        spreads=evaluate_memory.spreads(folds),
        usable={HABITUAL: evaluate_memory.sweep_usable_share(folds, fitted)},
    )
    path.write_text(json.dumps(fitted.as_json(), indent=1) + "\n", encoding="utf-8")
    return fitted


class _Problem:
    """Shared logs and departures of stacks, against log errors and priors."""

    def __init__(self, points: Any, target: np.ndarray, voice: np.ndarray) -> None:
        self.points, self.target, self.voice = points, target, voice
        self.stacks = [STACKS[int(place)] for place in sorted(set(points.stack))]
        self.names = list(PRIORS)
        self.free = [name for name in self.names if PRIORS[name][2] > 0]
        priors = np.array([PRIORS[name] for name in self.names])
        self.values, self.spreads = np.log(priors[:, 0]), priors[:, 1]
        self.stack_spreads = np.tile([PRIORS[name][2] for name in self.free], len(self.stacks))
        self.first = np.concatenate([self.values, np.zeros(len(self.stack_spreads))])
        self.start = self.read(self.first).constants

    def read(self, logs: np.ndarray) -> Fit:
        count = len(self.names)
        shared = {
            n: float(f"{np.exp(v):.5g}") for n, v in zip(self.names, logs[:count], strict=True)
        }
        rest = logs[count:].reshape(len(self.stacks), -1)
        departures = {
            stack: {n: round(float(v), 4) for n, v in zip(self.free, row, strict=True)}
            for stack, row in zip(self.stacks, rest, strict=True)
        }
        return Fit(shared, departures, {}, {"unknown": [0.8, 1.25]})

    def residual(self, logs: np.ndarray, keeps: np.ndarray) -> np.ndarray:
        constants = self.start
        values = constants.values.copy()
        count = len(self.names)
        places = [NAMES.index(name) for name in self.names]
        values[:, places] *= np.exp(logs[:count] - self.values)
        rest = logs[count:].reshape(len(self.stacks), -1)
        own = [NAMES.index(name) for name in self.free]
        for stack, row in zip(self.stacks, rest, strict=True):
            values[STACKS.index(stack), own] *= np.exp(row)
        constants = replace(constants, values=values)
        peak = _peak(self.points, constants, keeps)
        return np.log(peak) - self.target

    def solve(self, logs: np.ndarray, keeps: np.ndarray) -> np.ndarray:
        """Damped Gauss-Newton steps; a stack's departure moves its rows as the shared log does."""
        residual, damping = self.residual(logs, keeps), 1e-2
        cost = self._cost(residual, logs)
        for _ in range(STEPS):
            matrix, pull = self._normal(residual, logs, keeps)
            move = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -pull)
            trial = logs + np.clip(move, -0.7, 0.7)
            left = self.residual(trial, keeps)
            new = self._cost(left, trial)
            if new < cost:
                done = cost - new < 1e-3 * cost
                logs, residual, cost, damping = trial, left, new, max(damping / 5, 1e-6)
                if done:
                    break
            else:
                damping *= 6
        return logs

    def _spread(self) -> np.ndarray:
        return np.concatenate([self.spreads, self.stack_spreads])

    def _cost(self, residual: np.ndarray, logs: np.ndarray) -> float:
        z = residual / NOISE * self.voice
        # Cauchy's law: a run gone wrong does not pull.
        return float(
            4 * np.log1p(z**2 / 4).sum() + (((logs - self.first) / self._spread()) ** 2).sum()
        )

    def _normal(
        self, residual: np.ndarray, logs: np.ndarray, keeps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        shared = np.empty((len(residual), len(self.names)))
        for place in range(len(self.names)):
            moved = logs.copy()
            moved[place] += 1e-4
            shared[:, place] = (self.residual(moved, keeps) - residual) / 1e-4
        own = shared[:, [self.names.index(name) for name in self.free]]
        masks = [self.points.stack == STACKS.index(stack) for stack in self.stacks]
        slopes = np.concatenate([shared, *(own * mask[:, None] for mask in masks)], axis=1)
        z = residual / NOISE * self.voice
        weight = (self.voice / NOISE) ** 2 / (1 + z**2 / 4)
        matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(1 / self._spread() ** 2)
        pull = slopes.T @ (weight * residual) + (logs - self.first) / self._spread() ** 2
        return matrix, pull


def _peak(points: Any, constants: MemoryConstants, keeps: np.ndarray) -> np.ndarray:
    return peak_memory(points, constants, stage="reported", whole_share=keeps).total


def _logistic(features: np.ndarray, labels: np.ndarray, ridge: float = 0.5) -> np.ndarray:
    """Weights of a logistic regression, by Newton's steps."""
    weights = np.zeros(features.shape[1])
    for _ in range(30):
        chance = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        slope = features.T @ (labels - chance) - ridge * weights
        adapt_rules = features.T @ (features * (chance * (1 - chance))[:, None])
        weights += np.linalg.solve(adapt_rules + ridge * np.eye(len(weights)), slope)
    return weights
