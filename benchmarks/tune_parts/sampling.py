"""Random settings of a space, drawn the same way for all who begin at random."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Dimension, Params, ParamValue


def sample(dimensions: Sequence[Dimension], count: int, *, seed: int) -> list[Params]:
    """Independent settings."""
    rng = np.random.default_rng(seed)
    return [draw(dimensions, rng) for _ in range(count)]


def draw(dimensions: Sequence[Dimension], rng: np.random.Generator) -> Params:
    """One setting."""
    return {each.name: _draw_value(each, float(rng.random())) for each in dimensions}


def _draw_value(dimension: Dimension, share: float) -> ParamValue:
    if dimension.choices:
        return dimension.choices[int(share * len(dimension.choices))]
    # Every whole number gets an equal share, the first and the last, too.
    margin = 0.5 if dimension.is_int else 0.0
    low, high = dimension.low - margin, dimension.high + margin
    if dimension.log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    if dimension.is_int:
        return int(min(max(round(value), dimension.low), dimension.high))
    return min(max(value, dimension.low), dimension.high)
