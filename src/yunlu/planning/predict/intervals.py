"""Prediction intervals: 10 % and 90 % quantiles by stack. Pure.

Factors are quantiles of log errors on rows whose model (and, for unknown stacks, whose whole source)
no constant had seen: split conformal prediction (Vovk et al. 2005; Lei et al. 2018), by stack, drawn
towards all stacks where a stack has few rows, and wider where it has few models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.predict.constants import STACKS, shipped
from yunlu.planning.predict.correction import is_wide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.predict.query_batch import Column, QueryBatch

_WIDER_PER_DOUBLING = 0.1
"""Widening for each doubling of devices beyond those seen."""
_ROWS_OF_THE_POOL = 4.0
"""Weight of cold-start quantiles, in rows of a stack."""
_MODELS_OF_THE_POOL = 2
"""The same in models."""
_ENOUGH_MODELS = 3
"""With fewer models the interval is at least that of a cold start."""
_NORMAL_90 = 1.2816


@dataclass(frozen=True, slots=True)
class Spread:
    """10 % and 90 % quantiles of log(measured / predicted) by stack, and what was seen."""

    low: Column
    high: Column
    """``[stack, 0 within a node or 1 across nodes]``; cold-start quantiles for unseen stacks."""
    devices: Column
    """``[stack]``: most devices of a measured row."""
    experts: tuple[float, float] = (-0.45, 0.35)
    """Quantiles of models with experts, of any stack: a lower bound of their interval."""


def spread_factors(points: QueryBatch, spread: Spread | None = None) -> tuple[Column, Column]:
    """Factors on a predicted throughput for its 10 % and 90 % quantile."""
    spread = shipped_spread() if spread is None else spread
    stack = points.stack.astype(np.intp)
    beyond = np.log2(np.maximum(points.devices / spread.devices[stack], 1.0))
    wider = 1.0 + _WIDER_PER_DOUBLING * beyond
    wide = is_wide(points).astype(np.intp)
    low, high = spread.low[stack, wide], spread.high[stack, wide]
    routed = points.experts > 1.0
    low = np.where(routed, np.minimum(low, spread.experts[0]), low)
    high = np.where(routed, np.maximum(high, spread.experts[1]), high)
    return np.exp(low * wider), np.exp(high * wider)


def make_spread(
    errors: Column,
    points: QueryBatch,
    cold: tuple[float, float],
    unknown: tuple[float, float] | None = None,
) -> Spread:
    """From out-of-sample log errors (measured over predicted) of points, and the cold quantiles.

    ``unknown`` are those of stacks of which no row was seen; the cold ones unless given.
    """
    low, high = (np.full((len(STACKS), 2), end) for end in unknown or cold)
    most = np.full(len(STACKS), 512.0)
    wide = is_wide(points).astype(int)
    for index in sorted({int(value) for value in points.stack}):
        own = points.stack == index
        most[index] = points.devices[own].max()
        for position in (0, 1):
            mine = own & (wide == position)
            if not mine.any():
                continue
            few = _ROWS_OF_THE_POOL / (mine.sum() + _ROWS_OF_THE_POOL)
            result = np.quantile(errors[mine], (0.1, 0.9), method="weibull")
            ends = (1.0 - few) * result + few * np.array(cold)
            # Errors of one model's rows are correlated: the number of models counts.
            models = _models(points, mine)
            half = 0.5 * (ends[1] - ends[0]) * widening(models)
            lowest, highest = cold if models < _ENOUGH_MODELS else (0.0, 0.0)
            low[index, position] = min(ends.mean() - half, lowest)
            high[index, position] = max(ends.mean() + half, highest)
    return Spread(np.minimum(low, -0.01), np.maximum(high, 0.01), most)


def _models(points: QueryBatch, rows: Column) -> int:
    shapes = np.stack([points.layers, points.hidden, points.ffn, points.vocab], axis=1)
    return len(np.unique(shapes[rows], axis=0))


def widening(models: int) -> float:
    """By how much wider an interval is that few models tell: Student's t over the normal, at 90 %.

    An expansion in one over the degrees of freedom (Fisher 1925); the pool lends some.
    """
    z, freedom = _NORMAL_90, models + _MODELS_OF_THE_POOL
    first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return (z + first / freedom + second / freedom**2) / z


def read_spread(data: Mapping[str, Mapping[str, Any]]) -> Spread:
    """Inverse of ``write_spread``; missing stacks are as ``unknown``."""
    entries = [data.get(stack, data["unknown"]) for stack in STACKS]
    low, high, devices = (
        np.array([entry[key] for entry in entries]) for key in ("low", "high", "devices")
    )
    if "experts" not in data:
        return Spread(low, high, devices)
    return Spread(low, high, devices, (data["experts"]["low"], data["experts"]["high"]))


def write_spread(spread: Spread) -> dict[str, dict[str, Any]]:
    """Plain numbers for JSON."""
    by_stack: dict[str, dict[str, Any]] = {
        stack: {
            "low": np.round(spread.low[index], 4).tolist(),
            "high": np.round(spread.high[index], 4).tolist(),
            "devices": float(spread.devices[index]),
        }
        for index, stack in enumerate(STACKS)
    }
    low, high = (round(end, 4) for end in spread.experts)
    return {**by_stack, "experts": {"low": low, "high": high}}


@cache
def shipped_spread() -> Spread:
    """The spread that comes with the package."""
    usual = {"unknown": {"low": [-0.4, -0.4], "high": [0.3, 0.3], "devices": 512.0}}
    return read_spread(shipped().get("spread", usual))
