"""Writes the constants, trees and spreads that the package ships."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.planner_parts.evaluate_time import (
    cold_errors,
    cold_quantiles,
    out_of_fold_errors,
    routed_model_errors,
    unknown_errors,
    unknown_quantiles,
)
from benchmarks.planner_parts.fit_experts import fit_experts
from benchmarks.planner_parts.fit_time import fit_model
from yunlu.planning.predict import constants as product
from yunlu.planning.predict.constants import NAMES, STACKS
from yunlu.planning.predict.intervals import make_spread, write_correction, write_spread

if TYPE_CHECKING:
    from benchmarks.planner_parts.evidence import Evidence
    from benchmarks.planner_parts.fit_time import Fit

KIN = {"yunlu": "torchtitan"}
"""Of whom nothing was measured yet, by whom it is most like: the same shards, kernels and runtime."""
SHIPPED = Path(product.__file__).parents[1] / "data" / "constants.json"


def ship(evidence: Evidence, target: Path = SHIPPED) -> None:
    """Fitted on every timed row."""
    model = fit_model(evidence, evidence.timed)
    fitted = fit_experts(evidence, model.fit, evidence.routed)
    routed = np.quantile(routed_model_errors(evidence, model.fit), (0.1, 0.9), method="weibull")
    errors, folds = out_of_fold_errors(evidence)
    seen = folds >= 0
    spread = make_spread(
        errors[seen],
        evidence.points.take(np.flatnonzero(seen)),
        cold_quantiles(cold_errors(evidence)),
        unknown=unknown_quantiles(unknown_errors(evidence)),
    )
    spread = replace(spread, experts=(float(routed[0]), float(routed[1])))
    data = {
        "about": "Written by benchmarks/planner.py fit; docs/planner-model.md says what each is.",
        "shared": {
            name: float(f"{np.exp(value):.5g}")
            for name, value in zip(NAMES, fitted.shared, strict=True)
        },
        "departures": _departures(fitted),
        "spread": write_spread(spread),
        "correction": write_correction(model.correction),
    }
    text = json.dumps(data, separators=(",", ":"))
    target.write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")


def _departures(fitted: Fit) -> dict[str, dict[str, float]]:
    logs = fitted.departures.copy()
    for stack, kin in KIN.items():
        logs[STACKS.index(stack)] = logs[STACKS.index(kin)]
    return {
        STACKS[stack]: {
            name: round(float(value), 4)
            for name, value in zip(NAMES, entries, strict=True)
            if abs(value) >= 5e-4
        }
        for stack, entries in enumerate(logs)
        if np.abs(entries).max() >= 5e-4
    }
