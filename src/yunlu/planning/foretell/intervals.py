"""How sure a foretold figure is: where 8 of 10 measurements lie about it. Pure.

Factors are quantiles of log errors on rows whose model (and, for unknown stacks, whose whole source)
no constant had seen: split conformal prediction (Vovk et al. 2005; Lei et al. 2018), by stack, drawn
towards all stacks where a stack has few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.foretell.constants import STACKS, shipped
from yunlu.planning.foretell.correction import is_wide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.foretell.points import Column, Points

_WIDER_PER_DOUBLING = 0.1
"""By how much an interval widens for each doubling of devices beyond those seen."""
_ROWS_OF_THE_POOL = 8.0
"""As how many rows of a stack the quantiles of a cold start count."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Logs of measured over foretold: the 10 % and 90 % quantiles by stack, and what was seen."""

    low: Column
    high: Column
    """``[stack, 0 inside a node or 1 beyond]``; of stacks never seen, those of a cold start."""
    devices: Column
    """``[stack]``: most devices of a measured row."""


def spread_factors(points: Points, spread: Spread | None = None) -> tuple[Column, Column]:
    """By what to multiply a foretold throughput for its 10 % and its 90 % quantile."""
    spread = shipped_spread() if spread is None else spread
    stack = points.stack.astype(np.intp)
    beyond = np.log2(np.maximum(points.devices / spread.devices[stack], 1.0))
    wider = 1.0 + _WIDER_PER_DOUBLING * beyond
    wide = is_wide(points).astype(np.intp)
    return np.exp(spread.low[stack, wide] * wider), np.exp(spread.high[stack, wide] * wider)


def make_spread(errors: Column, points: Points, cold: tuple[float, float]) -> Spread:
    """From out-of-sample log errors (measured over foretold) of points, and the cold quantiles."""
    low, high = np.full((len(STACKS), 2), cold[0]), np.full((len(STACKS), 2), cold[1])
    most = np.full(len(STACKS), 512.0)
    wide = is_wide(points).astype(int)
    for index in sorted({int(value) for value in points.stack}):
        own = points.stack == index
        most[index] = points.devices[own].max()
        for place in (0, 1):
            mine = own & (wide == place)
            if not mine.any():
                continue
            few = _ROWS_OF_THE_POOL / (mine.sum() + _ROWS_OF_THE_POOL)
            for table, level, other in ((low, 0.1, cold[0]), (high, 0.9, cold[1])):
                told = float(np.quantile(errors[mine], level, method="weibull"))
                table[index, place] = (1.0 - few) * told + few * other
    return Spread(np.minimum(low, -0.01), np.maximum(high, 0.01), most)


def read_spread(data: Mapping[str, Mapping[str, Any]]) -> Spread:
    """From what ``write_spread`` made; stacks left out are as ``unknown``."""
    entries = [data.get(stack, data["unknown"]) for stack in STACKS]
    return Spread(
        *(np.array([entry[key] for entry in entries]) for key in ("low", "high", "devices"))
    )


def write_spread(spread: Spread) -> dict[str, dict[str, Any]]:
    """Plain numbers for JSON."""
    return {
        stack: {
            "low": np.round(spread.low[index], 4).tolist(),
            "high": np.round(spread.high[index], 4).tolist(),
            "devices": float(spread.devices[index]),
        }
        for index, stack in enumerate(STACKS)
    }


@cache
def shipped_spread() -> Spread:
    """The spread that comes with the package."""
    usual = {"unknown": {"low": [-0.4, -0.4], "high": [0.3, 0.3], "devices": 512.0}}
    return read_spread(shipped().get("spread", usual))
