"""Writes the constants, trees and spreads that the package ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.planner_parts.evaluate_time import (
    cold_errors,
    cold_quantiles,
    out_of_fold_errors,
)
from benchmarks.planner_parts.fit_time import fit_model
from yunlu.planning.foretell import constants as product
from yunlu.planning.foretell.constants import NAMES, STACKS
from yunlu.planning.foretell.correction import write_correction
from yunlu.planning.foretell.intervals import make_spread, write_spread

if TYPE_CHECKING:
    from benchmarks.planner_parts.evidence import Evidence

SHIPPED = Path(product.__file__).parents[1] / "data" / "constants.json"


def ship(evidence: Evidence, target: Path = SHIPPED) -> None:
    """Fitted on every timed row."""
    model = fit_model(evidence, evidence.timed)
    errors, folds = out_of_fold_errors(evidence)
    seen = folds >= 0
    spread = make_spread(
        errors[seen],
        evidence.points.take(np.flatnonzero(seen)),
        cold_quantiles(cold_errors(evidence)),
    )
    data = {
        "about": "Written by benchmarks/planner.py fit; docs/planner-model.md says what each is.",
        "shared": {
            name: float(f"{np.exp(value):.5g}")
            for name, value in zip(NAMES, model.fit.shared, strict=True)
        },
        "departures": {
            STACKS[stack]: {
                name: round(float(value), 4)
                for name, value in zip(NAMES, entries, strict=True)
                if abs(value) >= 5e-4
            }
            for stack, entries in enumerate(model.fit.departures)
            if np.abs(entries).max() >= 5e-4
        },
        "spread": write_spread(spread),
        "correction": write_correction(model.correction),
    }
    text = json.dumps(data, separators=(",", ":"))
    target.write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")
