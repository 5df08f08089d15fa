"""Query batch: many (model, layout, hardware) combinations as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Column = np.ndarray[Any, np.dtype[Any]]
"""One number for each point."""

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBatch:
    """Columns of one length. Counts are integers kept as floats: NumPy is faster with one kind."""

    # The model, as ``ModelShape`` and ``planning.models.shape`` give it.
    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    ffn: Column
    """Inner width of the MLP per token: of all active experts together."""
    gated: Column
    vocab: Column
    tied: Column
    causal: Column
    experts: Column
    """1 where there are none."""
    active_experts: Column
    parameters: Column
    """All weights."""
    active_parameters: Column
    """Weights used by one token, without embedding lookups."""
    trainable: Column
    base_bytes: Column
    """Bytes of each frozen weight; meaningless where all are trained."""
    flops_per_token: Column
    """Forward and backward, without recomputation; attention as computed (half if causal)."""

    # The work.
    seq: Column
    batch: Column
    """Sequences per step, on all devices."""
    micro_batch: Column

    # How it is split: devices = dp * fsdp * tp * pp * cp.
    devices: Column
    dp: Column
    """Whole replicas (of what tp and pp leave)."""
    fsdp: Column
    """Ways in which weights, gradients and optimiser state are sharded; each shard has its own samples."""
    zero: Column
    """What the dp * fsdp replicas shard: 0 nothing, 1 optimiser state, 2 gradients too, 3 all."""
    tp: Column
    sequence: Column
    """1 with sequence parallelism under tp."""
    pp: Column
    virtual: Column
    """Stages per device under pp; 1 is plain 1F1B."""
    cp: Column
    ep: Column
    recompute: Column
    """Index in ``RECOMPUTE``."""

    # What it runs on.
    precision: Column
    """Index in ``PRECISIONS``: precision of matrix products."""
    peak_flops: Column
    """Dense peak of one device in that precision."""
    memory_bytes: Column
    memory_bytes_per_s: Column
    link_bytes_per_s: Column
    """Bandwidth of one device to others of its node, in one direction."""
    node_devices: Column
    """Devices joined by that link."""
    network_bytes_per_s: Column
    """Bandwidth of one device to other nodes, in one direction."""
    stack: Column
    """Index in ``constants.STACKS``."""
    reachable: Column | None = None
    """Measured share of the 16-bit peak in large products; NaN where not measured."""
    activation_bytes: Column | None = None
    """Activations of one sequence for the backward pass, in FP32, of a measured model; NaN otherwise."""

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, index: NDArray[Any]) -> QueryBatch:
        """Some of the points: by index, or by a mask."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: None if column is None else column[index] for name, column in columns.items()
        }
        return QueryBatch(**taken)

    def with_columns(self, **columns: Any) -> QueryBatch:
        """The same points with some columns replaced; scalars are repeated."""
        count = len(self)
        full = {
            name: np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
            for name, value in columns.items()
        }
        return replace(self, **full)

    @property
    def replicas(self) -> Column:
        """Number of data-parallel replicas."""
        return self.dp * self.fsdp

    @property
    def micros(self) -> Column:
        """Micro-batches per replica and step."""
        return np.maximum(1.0, np.ceil(self.batch / (self.replicas * self.micro_batch)))

    @property
    def tokens(self) -> Column:
        """Tokens of one micro-batch on one replica."""
        return self.micro_batch * self.seq


def make_queries(count: int, **columns: Any) -> QueryBatch:
    """Points from scalars and columns; every column without a default must be given."""
    full = {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
        for name, value in columns.items()
    }
    return QueryBatch(**full)


def concatenate(parts: Iterable[QueryBatch]) -> QueryBatch:
    """Concatenation."""
    every = [
        part.with_columns(
            **{field.name: np.nan for field in fields(part) if getattr(part, field.name) is None}
        )
        for part in parts
    ]
    return QueryBatch(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in every])
            for field in fields(QueryBatch)
        }
    )
