"""Enumeration of all layouts over a number of devices, as columns. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yunlu.planning.predict.query_batch import Column

LAYOUT_COLUMNS = (
    *("dp", "fsdp", "tp", "sequence", "pp", "virtual", "zero"),
    *("batch", "micro_batch", "recompute"),
)
"""Columns of a ``QueryBatch`` that a grid provides."""

_UNEVEN = 1.05
"""Where even splits exist, splits that compute so much more are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """Constraints on a layout, of the model and of the job."""

    batches: tuple[int, ...]
    tensor_ways: tuple[int, ...] = (1,)
    stages: int = 1
    """Most pipeline stages."""
    barred: frozenset[str] = frozenset()
    """Axes that stay 1; ``zero1`` where replicas cannot shard the optimiser state."""
    pinned: Mapping[str, int] = field(default_factory=dict[str, int])
    """Axes of fixed size."""
    zero1: tuple[bool, ...] = (False, True)
    """Values of zero1 to try; never used where it is barred."""
    stages_per_rank: tuple[int, ...] = (1, 2)
    sequence: bool = True
    """Sequence parallelism together with tensor parallelism."""
    micro_batch: int | None = None
    recompute: tuple[int, ...] = (0, 1, 2)

    def allows(self, axis: str, size: int) -> bool:
        """Whether an axis may have this size."""
        is_said = size == self.pinned.get(axis, size)
        return is_said and (size == 1 or axis not in self.barred)


def enumerate_layouts(devices: int, domain: int, rules: LayoutRules) -> dict[str, Column]:
    """All layouts of so many devices, of which each ``domain`` are joined by fast links."""
    splits = np.array(list(_splits(devices, domain, rules)), dtype=np.float64).reshape(-1, 6)
    parts = [_with_micro_batches(splits, batch, rules) for batch in rules.batches if len(splits)]
    if not parts:
        return {name: np.empty(0) for name in LAYOUT_COLUMNS}
    return {name: np.concatenate([part[name] for part in parts]) for name in LAYOUT_COLUMNS}


def _splits(devices: int, domain: int, rules: LayoutRules) -> Iterator[tuple[float, ...]]:
    """``dp, fsdp, tp, pp, virtual, zero`` of every factoring that the model and the job allow."""
    for tp in rules.tensor_ways:
        # tp communicates in every layer: its ranks share a node, or a fast-link domain.
        if devices % tp or domain % tp or not rules.allows("tp", tp):
            continue
        for pp in divisors(devices // tp):
            if pp > rules.stages or not rules.allows("pp", pp):
                continue
            replicas = devices // (tp * pp)
            if replicas > max(rules.batches):
                continue
            for fsdp in divisors(replicas):
                dp = replicas // fsdp
                if not (rules.allows("fsdp", fsdp) and rules.allows("dp", dp)):
                    continue
                for virtual in _virtual(pp, rules):
                    for zero in _zero(dp, fsdp, rules):
                        yield dp, fsdp, tp, pp, virtual, zero


def _virtual(pp: int, rules: LayoutRules) -> tuple[float, ...]:
    if pp == 1:
        return (1.0,)
    return tuple(float(item) for item in rules.stages_per_rank if item * pp <= rules.stages)


def _zero(dp: int, fsdp: int, rules: LayoutRules) -> tuple[float, ...]:
    """What replicas shard: everything under fsdp, else the optimiser state or nothing."""
    if fsdp > 1:
        return (3.0,)
    if dp == 1:
        return (0.0,)
    return tuple(float(item) for item in rules.zero1 if not item or "zero1" not in rules.barred)


def _with_micro_batches(splits: Any, batch: int, rules: LayoutRules) -> dict[str, Column]:
    """Each split with every micro-batch up to a replica's share, and every recomputation mode."""
    replicas = splits[:, 0] * splits[:, 1]
    share = np.ceil(batch / replicas)
    sizes = _micro_batches(int(share.max(initial=1.0)), rules)
    fits = (sizes[None, :] <= share[:, None]) & _is_even(batch, replicas)[:, None]
    if rules.micro_batch is not None:  # a given size is used as it is, in every pass
        fits &= batch % (replicas * rules.micro_batch)[:, None] == 0
    rows, columns = np.nonzero(fits)
    micro = sizes[columns]
    if rules.micro_batch is None:
        # Powers of two, and the whole share.
        whole = np.flatnonzero(_is_even(batch, replicas) & (np.log2(share) % 1 != 0))
        rows, micro = np.concatenate([rows, whole]), np.concatenate([micro, share[whole]])
    if 1 in rules.stages_per_rank:
        filled = _fills_pipe(splits[rows], np.ceil(share[rows] / micro))
        rows, micro = rows[filled], micro[filled]
    kinds = np.array(rules.recompute, dtype=np.float64)
    rows, micro = np.repeat(rows, len(kinds)), np.repeat(micro, len(kinds))
    recompute = np.tile(kinds, len(rows) // len(kinds))
    dp, fsdp, tp, pp, virtual, zero = splits[rows].T
    return {
        "dp": dp,
        "fsdp": fsdp,
        "tp": tp,
        "pp": pp,
        "virtual": virtual,
        "zero": zero,
        "sequence": (tp > 1).astype(np.float64) * rules.sequence,
        "batch": np.full(len(rows), float(batch)),
        "micro_batch": micro,
        "recompute": recompute,
    }


def _fills_pipe(splits: Any, passes: Column) -> Any:
    """Whether interleaved stages have enough micro-batches to fill the pipeline."""
    _, _, _, pp, virtual, _ = splits.T
    return (virtual == 1.0) | (passes >= pp)


def _is_even(batch: int, replicas: Column) -> Any:
    """Whether a batch is split evenly: the largest share decides the time."""
    waste = np.ceil(batch / replicas) * replicas / batch
    even = (replicas <= batch) & (waste <= _UNEVEN)
    return even if even.any() else replicas <= batch


def _micro_batches(most: int, rules: LayoutRules) -> Column:
    if rules.micro_batch is not None:
        return np.array([float(rules.micro_batch)])
    return 2.0 ** np.arange(most.bit_length())


def divisors(number: int) -> list[int]:
    """Divisors in order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
