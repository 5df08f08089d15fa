"""The ground under a scatter of trials: how good its parts seem, and how far they are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BANDS = 7
"""Heights told apart."""
_COLUMNS, _ROWS = 100, 50
"""Divisors of the drawing's size: cells with uneven edges would leave gaps."""
_REACH = 0.13
"""How far a trial speaks for its surroundings, as a share of the whole."""
_OTHER_CHOICE = 0.02
_KNOWN = 0.08


def draw_ground(
    known: Sequence[tuple[float, float, float]],
    x_parts: int,
    y_parts: int,
    width: int,
    height: int,
) -> Markup:
    """Bands of equal height, blank where no trial was near.

    Args:
        known: Of each trial its place from the left, from the bottom, and its rank (0 is best).
        x_parts: Choices from left to right; 0: numbers.
        y_parts: The same from bottom to top.
        width: Of the drawing.
        height: Of the drawing.
    """
    columns, rows = x_parts or _COLUMNS, y_parts or _ROWS
    left = (np.arange(columns) + 0.5) / columns
    up = (np.arange(rows) + 0.5) / rows
    places = np.asarray(known, dtype=np.float64)
    # Nadaraya and Watson's mean of the trials around, each weighed by how near it is.
    across = _nearness(left, places[:, 0], x_parts)
    along = _nearness(up, places[:, 1], y_parts)
    weights = along[:, None, :] * across[None, :, :]
    total = weights.sum(axis=2)
    mean = (weights @ places[:, 2]) / np.maximum(total, 1e-12)
    band = np.minimum((mean * BANDS).astype(int), BANDS - 1)
    band[total < _KNOWN] = -1
    drawn = Markup("")
    for level in range(BANDS):
        pieces = _rectangles(band == level, width / columns, height / rows, height)
        if pieces:
            drawn += Markup('<path class="ground g{}" d="{}"/>').format(level, "".join(pieces))
    return drawn


def _nearness(
    middles: NDArray[np.float64], places: NDArray[np.float64], parts: int
) -> NDArray[np.float64]:
    apart = middles[:, None] - places[None, :]
    if parts:
        return np.where(np.abs(apart) < 0.5 / parts, 1.0, _OTHER_CHOICE)
    return np.exp(-0.5 * (apart / _REACH) ** 2)


def _rectangles(cells: NDArray[np.bool_], width: float, height: float, bottom: float) -> list[str]:
    """Neighbours in a row become one piece."""
    pieces: list[str] = []
    for row, line in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        top = bottom - (row + 1) * height
        pieces += [
            f"M{start * width:g} {top:g}h{(end - start) * width:g}v{height:g}h{(start - end) * width:g}z"
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
    return pieces
