"""How good each part of a plane of two dimensions is, judged by the trials around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.render.figures.values import DensityGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NUM_LEVELS = 7
_COLUMNS, _ROWS = 100, 50
"""Divisors of the drawing's size: cells with uneven edges would leave gaps."""
_BANDWIDTH = 0.13
"""How far a trial speaks for its surroundings, as a share of the whole."""
_OTHER_CHOICE = 0.02
_KNOWN = 0.08


def estimate_density(
    trials: Sequence[tuple[float, float, float]], *, x_choices: int = 0, y_choices: int = 0
) -> DensityGrid:
    """Levels of equal width; -1 where no trial was near.

    Args:
        trials: Of each its share from the left, from the bottom, and its rank (0 is best).
        x_choices: Choices from left to right; 0: numbers.
        y_choices: The same from bottom to top.
    """
    columns, rows = x_choices or _COLUMNS, y_choices or _ROWS
    known = np.asarray(trials, dtype=np.float64)
    # Nadaraya-Watson: the mean of the trials around, weighted by their distance.
    across = _weights((np.arange(columns) + 0.5) / columns, known[:, 0], x_choices)
    along = _weights((np.arange(rows) + 0.5) / rows, known[:, 1], y_choices)
    weights = along[:, None, :] * across[None, :, :]
    total = weights.sum(axis=2)
    mean = (weights @ known[:, 2]) / np.maximum(total, 1e-12)
    levels = np.minimum((mean * NUM_LEVELS).astype(int), NUM_LEVELS - 1)
    levels[total < _KNOWN] = -1
    return DensityGrid(levels=tuple(map(tuple, levels.tolist())))


def _weights(
    middles: NDArray[np.float64], trials: NDArray[np.float64], choices: int
) -> NDArray[np.float64]:
    distance = middles[:, None] - trials[None, :]
    if choices:
        return np.where(np.abs(distance) < 0.5 / choices, 1.0, _OTHER_CHOICE)
    return np.exp(-0.5 * (distance / _BANDWIDTH) ** 2)
