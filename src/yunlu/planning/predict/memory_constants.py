"""Constants of the memory model by stack."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.predict.constants import STACKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.predict.query_batch import Column, QueryBatch

    Table = np.ndarray[Any, np.dtype[np.float64]]

NAMES = (
    # Bytes per trained weight, where products are 16 bits wide or less.
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    # Where replicas share out the optimiser's state: flat copies, per weight.
    "shard_bytes",
    # Where weights are sharded: blocks gathered at a time, and bytes of their whole gradients.
    "gathered_units",
    "unit_gradient_bytes",
    # Kept for the backward pass of a block, per token: bytes per unit of hidden width, the same
    # where tp does not divide it (and how much of it a stack keeps), per unit of what attention and
    # the MLP compute, per pair of head and position.
    "norm_bytes",
    "whole_bytes",
    "whole_share",
    "attention_bytes",
    "mlp_bytes",
    "score_bytes",
    # Of that, what selective recomputation keeps.
    "selective_share",
    # Per token and word of the vocabulary; per token and unit of width, once.
    "logit_bytes",
    "embedding_bytes",
    # What a step of the optimiser needs beside, per weight of its share.
    "step_bytes",
    # Of libraries: for each process, and for each process they talk to.
    "framework_bytes",
    "rank_bytes",
    # 1 where the head counts among the blocks when stages are balanced.
    "head_weighs",
    # 1 where the memory that a stack reports is that of its first rank, so of the first stage.
    "first_reports",
    # Usable share of a device's memory: driver, communication buffers and fragmentation
    # take the rest.
    "usable_share",
)


@dataclass(frozen=True, slots=True)
class MemoryConstants:
    """One row for each stack of ``STACKS``."""

    values: Table
    """``[stack, name]``, as ``NAMES`` has them."""
    low: Table
    """By stack: 10 % quantile, as a factor."""
    high: Table
    habits: Mapping[int, Table]
    """By stack: weights of ``habit_features`` that predict whether gathered inputs are kept."""

    def of(self, name: str, stack: Any) -> Any:
        """One constant: for each point, or for all where they have one stack."""
        return self.values[stack, NAMES.index(name)]

    def whole_share(self, points: QueryBatch) -> Column:
        """Share of the gathered inputs that each point keeps, as observed for its stack."""
        stacks = points.stack.astype(np.int64)
        share = self.values[stacks, NAMES.index("whole_share")].copy()
        for stack, weights in self.habits.items():
            mine = stacks == stack
            if mine.any():
                share[mine] = habit_features(points.take(mine)) @ weights > 0
        return share


def habit_features(points: QueryBatch) -> Table:
    """Features that versions of a stack's software depend on: one row for each point."""
    stages, devices = np.log2(points.pp), np.log2(points.devices)
    ways, micro = np.log2(points.tp), np.log2(points.micro_batch)
    alone, two = (points.pp == 1) * 1.0, (points.pp == 2) * 1.0
    many = 1.0 - alone - two
    large, wide = (points.devices > 256) * 1.0, (points.tp > 16) * 1.0
    columns = (
        alone,
        two,
        many * (8.0 - stages),
        alone * devices,
        two * devices,
        many * devices,
        alone * large,
        many * large,
        alone * micro,
        two * micro,
        many * micro,
        alone * ways,
        two * ways,
        many * ways,
        alone * (points.zero > 0),
        many * (points.zero > 0),
        many * wide,
        alone * (points.dp >= 32),
    )
    return np.stack(columns, axis=1)


@cache
def shipped_constants() -> MemoryConstants:
    """Those of ``data/memory.json``."""
    text = files("yunlu.planning").joinpath("data", "memory.json").read_text(encoding="utf-8")
    return read_constants(json.loads(text))


def read_constants(data: Mapping[str, Any]) -> MemoryConstants:
    """Shared values; ``given`` by a stack's design instead; and fitted log deviations."""
    shared: Mapping[str, float] = data["shared"]
    rows: list[list[float]] = []
    for stack in STACKS:
        own = {**shared, **data["given"].get(stack, {})}
        departs = data["departures"].get(stack, {})
        rows.append([own[name] * float(np.exp(departs.get(name, 0.0))) for name in NAMES])
    spreads = [data["spreads"].get(stack, data["spreads"]["unknown"]) for stack in STACKS]
    return MemoryConstants(
        values=np.array(rows, dtype=np.float64),
        low=np.array([spread[0] for spread in spreads], dtype=np.float64),
        high=np.array([spread[1] for spread in spreads], dtype=np.float64),
        habits={
            STACKS.index(stack): np.array(weights, dtype=np.float64)
            for stack, weights in data["habits"].items()
        },
    )
