"""Observations for the surrogate: few points, on a scale that is robust to outliers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from yunlu.tuning.methods.surrogate import CurveObservations
from yunlu.tuning.methods.trial_table import TrialTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.encoding import Encoder
    from yunlu.tuning.values import Params, Trial

    Array = NDArray[np.float64]
    Indices = NDArray[np.intp]

_DISTRUST = 0.5
"""Noise variance of values of earlier studies, relative to ours (1)."""
_REMEMBERED = 30
"""Number of best trials of an earlier study, and of others, that are used."""


@dataclass(frozen=True, slots=True)
class RankScale:
    """Values by their rank among those of the trials, as a normal distribution would have it.

    Diverged runs and the metric's own unit then make no difference.
    """

    knots: Array
    heights: Array
    mean: float = 0.0
    deviation: float = 1.0

    def rate(self, values: Array) -> Array:
        """Smaller is better; infinite values rank as the worst."""
        return (np.interp(values, self.knots, self.heights) - self.mean) / self.deviation


def make_scale(values: Array) -> RankScale:
    """From the values of trials; only finite ones count."""
    knots = np.unique(values[np.isfinite(values)])
    knots = knots if len(knots) else np.zeros(1)
    return RankScale(knots, ndtri((np.arange(len(knots)) + 0.5) / len(knots)))


def observe(
    table: TrialTable, rows: Indices, rungs: Indices, scale: RankScale
) -> tuple[CurveObservations, RankScale]:
    """Each of these trials at a rung and at half of it, and the scale on which they vary by 1.

    Two points tell whether a curve still falls.
    """
    matches: list[tuple[int, int, float]] = []
    for row, rung in zip(rows.tolist(), rungs.tolist(), strict=True):
        last = table.best_at(row, rung)
        earlier = table.best_at(row, max(rung // 2, 1))
        matches.append((row, *last))
        if earlier[0] != last[0]:
            matches.append((row, *earlier))
    trials = np.array([item[0] for item in matches], dtype=np.intp)
    raw = scale.rate(np.array([item[2] for item in matches]))
    scale = replace(scale, mean=float(raw.mean()), deviation=float(raw.std()) or 1.0)
    seen = CurveObservations(
        table.features[trials],
        np.log([item[1] for item in matches]),
        trials,
        (raw - scale.mean) / scale.deviation,
        np.zeros(len(matches)),
    )
    return seen, scale


def add_failures(table: TrialTable, seen: CurveObservations, rungs: int) -> CurveObservations:
    """Trials that failed without a value, as bad as the worst seen."""
    rows = np.flatnonzero(table.failed)[-_REMEMBERED:]
    if not len(rows):
        return seen
    return seen.join(
        CurveObservations(
            table.features[rows],
            np.full(len(rows), np.log(rungs)),
            rows,
            np.full(len(rows), seen.values.max()),
            np.full(len(rows), _DISTRUST),
        )
    )


class PastTrials:
    """Trials of earlier studies: less trusted than our own."""

    def __init__(self, trials: Sequence[Trial], encoder: Encoder, *, seed: int) -> None:
        """Those with a value."""
        table = TrialTable(encoder, seed=seed).update(trials, [1])
        rows = np.flatnonzero(np.isfinite(table.bests))
        order = rows[np.argsort(table.bests[rows], kind="stable")]
        rest = order[_REMEMBERED:]
        rest = rest[np.argsort(table.lots[rest])[:_REMEMBERED]]
        rows = np.concatenate([order[:_REMEMBERED], rest])
        self.best: list[Params] = [encoder.to_params(units) for units in table.units[order[:3]]]
        """A few, the best first, within the bounds of our dimensions."""
        self._features = table.features[rows]
        self._share = table.rungs[rows] / max(int(table.rungs.max(initial=1)), 1)
        self._heights = make_scale(table.bests[rows]).rate(table.bests[rows])

    def join(self, seen: CurveObservations, scale: RankScale, rungs: int) -> CurveObservations:
        """Observations and these, on the scale of the others."""
        if not self.best:
            return seen
        strangers = np.full(len(self._heights), -1, dtype=np.intp)
        return seen.join(
            CurveObservations(
                self._features,
                np.log(np.maximum(self._share * rungs, 1.0)),
                strangers,
                (self._heights - scale.mean) / scale.deviation,
                np.full(len(strangers), _DISTRUST),
            )
        )
