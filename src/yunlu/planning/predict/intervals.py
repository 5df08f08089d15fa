"""Learned correction of the step-time model, and 10 % and 90 % quantiles by stack. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.predict.constants import STACKS, shipped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.predict.local import StepTime
    from yunlu.planning.predict.query_batch import Column, QueryBatch

    Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees of one depth, stored as heaps: node i has the children 2i + 1 and 2i + 2."""

    base: float
    feature: np.ndarray[Any, np.dtype[np.int64]]
    """``[tree, inner node]``"""
    threshold: Table
    leaf: Table
    """``[tree, leaf]``"""
    near: float = 1.0
    wide: float = 1.0
    """Applied share within a node, and across nodes."""

    def evaluate(self, features: Table) -> Column:
        """The sum over trees for each row of features."""
        total = np.full(len(features), self.base)
        inner = self.feature.shape[1]
        rows = np.arange(len(features))
        for feature, threshold, leaf in zip(self.feature, self.threshold, self.leaf, strict=True):
            node = np.zeros(len(features), dtype=np.int64)
            while node.size and node[0] < inner:
                node = 2 * node + 1 + (features[rows, feature[node]] > threshold[node])
            total += leaf[node - inner]
        return total


Correction = dict[int, Forest]
"""By index in ``STACKS``; stacks without trees are not corrected."""


def feature_table(points: QueryBatch, time: StepTime) -> Table:
    """Features of the trees: logarithms of sizes, and shares of the predicted time."""
    p, total = points, time.total_s
    inside = p.node_devices / (p.tp * p.pp * p.replicas)
    return np.column_stack(
        [
            np.log2(p.tokens / p.cp),
            np.log2(np.maximum(p.hidden, 1.0) / p.tp),
            np.log2(np.maximum(p.hidden, 1.0)),
            np.log2(p.tp),
            np.log2(p.pp),
            np.log2(p.replicas),
            np.log2(p.micros),
            np.log2(p.micro_batch),
            np.log2(p.seq),
            np.log2(p.devices),
            p.recompute,
            p.precision,
            p.zero,
            np.log2(p.memory_bytes),
            np.log2(p.peak_flops),
            np.clip(np.log2(inside), -8.0, 0.0),
            time.tp_s / total,
            time.pp_bubble_s / total,
            time.dp_s / total,
            time.other_s / total,
            (p.replicas * p.tp > p.node_devices).astype(float),
            np.log2(np.maximum(p.head_dim, 1.0)),
            np.log2(np.maximum(p.layers, 1.0) / p.pp),
        ]
    )


def is_wide(points: QueryBatch) -> Column:
    """Whether a point spans several nodes."""
    return points.devices > points.node_devices


def correct(points: QueryBatch, time: StepTime, correction: Correction | None = None) -> Column:
    """Factor on the predicted seconds of each point."""
    forests = shipped_correction() if correction is None else correction
    factor = np.ones(len(points))
    for stack, forest in forests.items():
        mine = np.flatnonzero(points.stack == stack)
        if len(mine):
            table = feature_table(points, time)[mine]
            trust = np.where(is_wide(points)[mine], forest.wide, forest.near)
            factor[mine] = np.exp(trust * forest.evaluate(table))
    return factor


def read_correction(data: Mapping[str, Mapping[str, Any]]) -> Correction:
    """Inverse of ``write_correction``."""
    return {
        STACKS.index(stack): Forest(
            base=entry["base"],
            feature=np.array(entry["feature"], dtype=np.int64),
            threshold=np.array(entry["threshold"], dtype=np.float64),
            leaf=np.array(entry["leaf"], dtype=np.float64),
            near=entry["near"],
            wide=entry["wide"],
        )
        for stack, entry in data.items()
    }


def write_correction(correction: Correction) -> dict[str, dict[str, Any]]:
    """Plain numbers for JSON."""
    return {
        STACKS[stack]: {
            "base": round(forest.base, 5),
            "near": forest.near,
            "wide": forest.wide,
            "feature": forest.feature.tolist(),
            "threshold": np.round(forest.threshold, 4).tolist(),
            "leaf": np.round(forest.leaf, 4).tolist(),
        }
        for stack, forest in correction.items()
    }


@cache
def shipped_correction() -> Correction:
    """The trees that come with the package."""
    return read_correction(shipped().get("correction", {}))


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
