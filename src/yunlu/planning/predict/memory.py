"""Peak memory of a device, by component, for many layouts at once. Pure.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), states Rajbhandari et al. 2020 (ZeRO,
arXiv 1910.02054); what these leave open is fitted. docs/planner-model.md has the formulas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

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
    # Of that, what selective recomputation keeps; bytes per unit of width that full recomputation does.
    "selective_share",
    "input_bytes",
    # Per token and word of the vocabulary; per token and unit of width, once.
    "logit_bytes",
    "embedding_bytes",
    # Per weight: copies in 16 bits that live from the forward pass to the backward pass.
    "lowered_bytes",
    # 1 where gradients are made in the room that activations leave, unless an earlier pass or the
    # exchange between replicas holds some already.
    "passing_gradients",
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


_CHUNK = 8192
"""Points at a time: the temporaries of one chunk stay in the cache."""
_INPUTS_SHARE = 0.15
"""Of what a measured block keeps: its inputs, where all else is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per trained weight, where the job knows better than the stack (another optimiser)."""

    weight: float | None = None
    gradient: float | None = None
    optimizer: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the most loaded device, at the worst moment of a step."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    """Gathered units, flat copies, and what the optimiser's step needs beyond what the pass freed."""
    framework: Column
    """What the libraries hold whatever the model."""
    low_factor: Column
    high_factor: Column

    @property
    def total(self) -> Column:
        """All of it."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.buffers
            + self.framework
        )

    @property
    def low(self) -> Column:
        """One in ten takes less."""
        return self.total * self.low_factor

    @property
    def high(self) -> Column:
        """One in ten takes more."""
        return self.total * self.high_factor


def peak_memory(
    points: QueryBatch,
    constants: MemoryConstants | None = None,
    *,
    state: StateBytes | None = None,
    stage: Literal["worst", "reported"] = "worst",
    habits: bool = False,
    whole_share: Column | None = None,
) -> PeakMemory:
    """What each point takes.

    Args:
        points: Models, work, layouts, hardware.
        constants: Other than those that ship.
        state: Bytes per trained weight, where they are known.
        stage: Of a pipeline, the worst; or that whose peak the stack's own log shows.
        habits: Whether to use what was learned of versions of a stack; the wide search does without.
        whole_share: How much of the gathered inputs each point keeps, where it is known.
    """
    constants = constants or shipped_constants()
    whole = constants.whole_share(points) if habits and whole_share is None else whole_share
    parts: list[PeakMemory] = []
    for start in range(0, max(1, len(points)), _CHUNK):
        some = slice(start, start + _CHUNK)
        part = points if len(points) <= _CHUNK else points.take(some)  # pyright: ignore[reportArgumentType]
        share = None if whole is None else whole[some]
        parts.append(_Peak(part, constants, state or StateBytes(), share).at(stage))
    if len(parts) == 1:
        return parts[0]
    return PeakMemory(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(PeakMemory)
        }
    )


def reported_memory(points: QueryBatch, constants: MemoryConstants | None = None) -> PeakMemory:
    """What each point's stack would report: for tables of measurements, not for plans."""
    return peak_memory(points, constants, stage="reported", habits=True)


def usable_bytes(points: QueryBatch, constants: MemoryConstants | None = None) -> Column:
    """What a peak may take of each point's device."""
    constants = constants or shipped_constants()
    return constants.of("usable_share", points.stack.astype(np.int64)) * points.memory_bytes


def fits(
    points: QueryBatch, memory: PeakMemory, constants: MemoryConstants | None = None
) -> Column:
    """Where the likeliest peak is within the usable memory and nothing else forbids to run."""
    return (memory.total <= usable_bytes(points, constants)) & ~cannot_run(points, constants)


def cannot_run(points: QueryBatch, constants: MemoryConstants | None = None) -> Column:
    """Where a stage of the pipeline would be left without a block, whatever the memory."""
    constants = constants or shipped_constants()
    empty = points.pp * points.virtual > points.layers
    weighs = constants.of("head_weighs", points.stack.astype(np.int64))
    if not np.any(weighs > 0):
        return empty
    # Shared out by weight, head included, blocks fill the first stages; the head and the two that
    # follow it (cast, loss) take a stage each where there are some left.
    block, _, table = _weights(points)
    share = (points.layers + weighs * table / block) / points.pp
    head = np.minimum(np.ceil(points.layers / share) - 1.0, points.layers + 1.0)
    return np.where(weighs > 0, head + 2.0 < points.pp - 1.0, empty)


def _weights(points: QueryBatch) -> tuple[Column, Column, Column]:
    """Of one block, of the experts among these, and of one table of the vocabulary."""
    table = points.vocab * points.hidden
    block = (points.parameters - table * (2.0 - points.tied)) / np.maximum(points.layers, 1.0)
    attention = 2.0 * points.hidden * points.head_dim * (points.heads + points.kv_heads)
    experts = (points.experts > 1) * np.maximum(0.0, block - attention)
    return block, experts, table


class _Peak:
    """The arithmetic of one chunk; every attribute is a column, or a number that holds for all."""

    def __init__(
        self,
        points: QueryBatch,
        constants: MemoryConstants,
        state: StateBytes,
        whole: Column | None,
    ) -> None:
        stack: Any = points.stack.astype(np.int64)
        if len(stack) == 0 or (stack == stack[0]).all():
            stack = int(stack[0]) if len(stack) else 0
        row = constants.values[stack]
        self.c = {name: row[..., index] for index, name in enumerate(NAMES)}
        self.c["whole_share"] = self.c["whole_share"] if whole is None else whole
        self.points = points
        self.is_wide = points.precision <= 1.0
        self.spread = (constants.low[stack], constants.high[stack])
        self.state = state
        self._share_out()
        self._keep()

    def at(self, stage: str) -> PeakMemory:
        """The columns at the worse of the first stage and the last, or at the one that is reported."""
        pp, layers = self.points.pp, self.points.layers
        c, table = self.c, self.table
        even = np.ceil(layers / pp)
        first, last = even, np.maximum(0.0, layers - even * (pp - 1.0))
        if np.any(c["head_weighs"] > 0):
            weight = c["head_weighs"] * table / self.block
            share = (layers + weight) / pp
            uneven = c["head_weighs"] > 0
            first = np.where(uneven, np.minimum(np.floor(share) + 1.0, layers), first)
            last = np.where(uneven, np.maximum(0.0, np.ceil(share - weight)), last)
        alone = pp == 1.0
        columns = self._stage(np.where(alone, layers, first), first=True)
        if not alone.all():
            other = self._stage(last, first=False)
            worse = (sum(other.values()) > sum(columns.values())) & ~alone
            if stage == "reported":
                worse &= c["first_reports"] == 0.0
            columns = {name: np.where(worse, other[name], columns[name]) for name in columns}
        count = len(self.points)
        low, high = (np.broadcast_to(factor, (count,)) for factor in self.spread)
        columns["framework"] = np.broadcast_to(columns["framework"], (count,))
        return PeakMemory(**columns, low_factor=low, high_factor=high)

    def _share_out(self) -> None:
        """Bytes per weight, and among how many each kind of state is shared out."""
        points, c = self.points, self.c
        self.block, self.experts, self.table = _weights(points)
        trained = points.trainable / points.parameters

        def pick(given: float | None, full: float, name: str) -> Any:
            return given if given is not None else np.where(self.is_wide, full, c[name])

        weight = pick(self.state.weight, 4.0, "weight_bytes")
        self.weight_bytes = trained * weight + (1.0 - trained) * points.base_bytes
        self.gradient_bytes = trained * pick(self.state.gradient, 4.0, "gradient_bytes")
        self.optimizer_bytes = trained * pick(self.state.optimizer, 8.0, "optimizer_bytes")
        self.trained = trained
        # Who has another part of the same sequence has the same weights, and shares what is shared.
        whole = points.dp * points.cp
        sharded = points.fsdp > 1.0
        shards = points.fsdp * points.cp
        self.weight_ways = np.where(sharded, shards, np.where(points.zero >= 3.0, whole, 1.0))
        self.gradient_ways = np.where(sharded, shards, np.where(points.zero >= 2.0, whole, 1.0))
        self.optimizer_ways = np.where(sharded, shards, np.where(points.zero >= 1.0, whole, 1.0))

    def _keep(self) -> None:
        """Bytes kept of a block for the backward pass, and of what is computed again."""
        points, c = self.points, self.c
        cut = np.where(points.sequence > 0.0, points.tp, 1.0)
        self.tokens = points.micro_batch * points.seq / points.cp
        self.scale = np.where(self.is_wide, 2.0, 1.0) * self.tokens
        heads = 2.0 * points.head_dim * (points.heads + points.kv_heads)
        inner = (
            2.0 + 2.0 * points.gated
        ) * points.ffn + 2.0 * points.hidden * points.active_experts * (points.experts > 1.0)
        rows = c["norm_bytes"] * points.hidden / cut
        uncut = c["whole_bytes"] * c["whole_share"] * points.hidden * (cut > 1.0)
        computed = (
            rows + uncut + (c["attention_bytes"] * heads + c["mlp_bytes"] * inner) / points.tp
        )
        everything = computed
        if np.any(c["score_bytes"] > 0):
            everything = computed + c["score_bytes"] * points.heads * points.seq / points.tp
        thrifty = np.where(
            points.recompute == 1.0,
            c["selective_share"] * computed,
            c["input_bytes"] * points.hidden / cut,
        )
        self.edge = c["embedding_bytes"] * points.hidden / cut
        if points.activation_bytes is not None:
            is_measured = np.isfinite(points.activation_bytes)
            # Measured in FP32, of one sequence and all blocks.
            seen = points.activation_bytes / (2.0 * points.seq * np.maximum(points.layers, 1.0))
            everything = np.where(is_measured, seen, everything)
            again = np.where(points.recompute == 1.0, c["selective_share"], _INPUTS_SHARE)
            thrifty = np.where(is_measured, again * seen, thrifty)
            self.edge = np.where(is_measured, 0.0, self.edge)
        self.kept = np.where(points.recompute == 0.0, everything, thrifty)
        self.again = everything - self.kept

    def _stage(self, layers: Column, *, first: bool) -> dict[str, Column]:
        points, c = self.points, self.c
        alone = points.pp == 1.0
        tables = self.table * np.where(alone, 2.0 - points.tied, 1.0)
        dense = (layers * (self.block - self.experts) + tables) / points.tp
        experts = layers * self.experts / points.tp

        def shared(ways: Column) -> Column:
            # Experts are already shared out among ep of the replicas.
            return dense / ways + experts / np.maximum(points.ep, ways)

        flying = self._flying() if first else 1.0
        activations = self.scale * (self.kept * layers * flying + self.edge)
        logits = c["logit_bytes"] * self.tokens * points.vocab / points.tp
        if first:
            logits = logits * alone
        # Logits are gone before the first block is computed again; what was fitted adds up both.
        again = self.scale * self.again
        activations = activations + np.where(
            c["passing_gradients"] > 0.0, np.maximum(0.0, again - logits), again
        )
        whole = dense + experts / points.ep
        if np.any(c["lowered_bytes"] > 0):
            # Recomputed from gathered weights, a block's copies last as long as the block.
            lasts = ~self.is_wide & ((self.weight_ways == 1.0) | (points.recompute == 0.0))
            activations = activations + c["lowered_bytes"] * lasts * self.trained * whole
        gradients = self.gradient_bytes * shared(self.gradient_ways)
        if np.any(c["passing_gradients"] > 0):
            gradients = self._held_gradients(gradients, activations + logits)
        mine = shared(self.optimizer_ways)
        step = c["step_bytes"] * self.trained * mine
        gathered = self._gathered(whole)
        if np.any(c["passing_gradients"] > 0):
            gathered = self._passing_units(gathered, logits)
        buffers = gathered + np.maximum(0.0, step - activations - logits)
        flat = c["shard_bytes"] * self.trained * whole
        buffers += np.where((self.optimizer_ways > 1.0) & (self.weight_ways == 1.0), flat, 0.0)
        return {
            "weights": self.weight_bytes * shared(self.weight_ways),
            "gradients": gradients,
            "optimizer": self.optimizer_bytes * mine,
            "activations": activations,
            "logits": logits,
            "buffers": buffers,
            "framework": c["framework_bytes"] + c["rank_bytes"] * points.devices,
        }

    def _passing_units(self, gathered: Column, logits: Column) -> Column:
        """Beside logits only the last block and the tables are whole; its gradients come when they go."""
        points = self.points
        unit = self.block - self.experts + self.experts / points.ep
        width = np.where(self.trained < 1.0, points.base_bytes, 4.0)
        least = width * (unit + self.table) / points.tp
        fewer = np.maximum(np.minimum(gathered, least), gathered - logits)
        return np.where(self.c["passing_gradients"] > 0.0, fewer, gathered)

    def _held_gradients(self, gradients: Column, passing: Column) -> Column:
        """Gradients beside what a pass keeps at its fullest.

        Those of earlier passes, once; of replicas also the buckets that they are exchanged in. Else
        they take the place of activations, and count where they are more.
        """
        points, c = self.points, self.c
        buckets = (points.dp > 1.0) & (points.fsdp == 1.0)
        held = gradients * (1.0 * buckets + (points.micros > 1.0))
        rest = np.where(held > 0.0, held, np.maximum(0.0, gradients - passing))
        return np.where(c["passing_gradients"] > 0.0, rest, gradients)

    def _flying(self) -> Column:
        """Passes that the first stage has begun and not ended, in whole stages.

        1F1B begins one for each stage that follows, itself included; interleaved a few more
        (Narayanan et al. 2021, arXiv 2104.04473).
        """
        points = self.points
        stages = points.pp
        more = np.where(points.virtual > 1.0, (stages - 1.0) / points.virtual, 0.0)
        return np.minimum(points.micros, stages + more)

    def _gathered(self, stage: Column) -> Column:
        """Whole units of a sharded model: blocks in use and fetched ahead, and a table.

        Of a pipeline's stage all of it, with its gradients: gathering anew for every micro-batch
        would cost more than it saves, so FSDP does not.
        """
        points, c = self.points, self.c
        width = np.where(self.trained < 1.0, points.base_bytes, np.where(self.is_wide, 4.0, 2.0))
        gradients = c["unit_gradient_bytes"] * self.trained
        unit = self.block - self.experts + self.experts / points.ep
        passing = (
            unit * (c["gathered_units"] * width + gradients) + self.table * width
        ) / points.tp
        lasting = stage * (width + 2.0 * gradients)
        held = np.where(points.pp > 1.0, lasting, passing)
        return np.where(self.weight_ways > 1.0, held, 0.0)
