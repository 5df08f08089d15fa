"""Learned correction of the step-time model: boosted trees on its residuals. Pure.

For stacks of which enough rows were measured. It is for the best few thousand points of a search, not
for all: it costs more than the formulas themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.predict.constants import STACKS, shipped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.predict.query_batch import Column, QueryBatch
    from yunlu.planning.predict.step_parts import StepTime

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
