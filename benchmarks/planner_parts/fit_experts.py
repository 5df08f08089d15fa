"""Fits what only models with experts have, everything else held as dense models left it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import least_squares

from yunlu.planning.predict.constants import NAMES, OF_EXPERTS, PRIORS
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from benchmarks.planner_parts.evidence import Evidence
    from benchmarks.planner_parts.fit_time import Fit

SOURCE = "megatron_bridge"
"""The one that tells how its experts are laid out."""
NOISE = 0.15
_FITTED = [name for name in OF_EXPERTS if name != "exchange_exposed"]
"""The source's stack hides its exchange almost wholly; others do not, so its rows do not speak for them."""
_PLACES = [NAMES.index(name) for name in _FITTED]
_START = np.log([PRIORS[name].value for name in _FITTED])
_SPREADS = np.array([PRIORS[name].spread for name in _FITTED])


def fit_experts(evidence: Evidence, dense: Fit, rows: np.ndarray) -> Fit:
    """The dense fit with the constants of experts from the chosen rows."""
    chosen = rows & (evidence.source == SOURCE)

    def costs(logs: np.ndarray) -> np.ndarray:
        z = routed_errors(evidence, _with(dense, logs), chosen) / NOISE
        # Of each, the root of its soft-L1 cost: the solver squares.
        bent = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z**2) - 1.0))
        return np.concatenate([bent, (logs - _START) / _SPREADS])

    return _with(dense, least_squares(costs, _START).x)


def routed_errors(evidence: Evidence, fitted: Fit, rows: np.ndarray) -> np.ndarray:
    """Logs of measured over predicted."""
    points = evidence.points.take(np.flatnonzero(rows))
    pace = points.batch * points.seq / points.devices / step_time(points, fitted.constants).total_s
    return np.log(evidence.measured[rows] / (pace * evidence.cores[rows]))


def _with(dense: Fit, logs: np.ndarray) -> Fit:
    shared = dense.shared.copy()
    shared[_PLACES] = logs
    return replace(dense, shared=shared)
