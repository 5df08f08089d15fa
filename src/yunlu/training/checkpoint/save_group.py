"""The workers that save a checkpoint together, and the assignment of shards to writers."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yunlu.training.parallel.redistribute import broadcast_json, gather_json
from yunlu.training.parallel.tensor_slices import TensorShard, TensorSlice

if TYPE_CHECKING:
    from collections.abc import Sequence


def _own_token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGroup:
    """All workers of a generation, seen by one; a single worker by default."""

    rank: int = 0
    size: int = 1
    token: str = field(default_factory=_own_token)
    """The same on all workers, and unique: e.g. the attempt and the generation."""
    group: Any = None
    """Process group; None for all workers."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker publishes the checkpoint."""
        return self.rank == 0

    def broadcast_from_leader(self, value: Any) -> Any:
        """The leader's value, as JSON, on all workers."""
        return value if self.size == 1 else broadcast_json(value, source=0, group=self.group)

    def all_good(self, *, is_good: bool) -> bool:
        """Whether ``is_good`` holds on all workers."""
        if self.size == 1:
            return is_good
        flag = torch.tensor(int(is_good), device=_device(self.group))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())


class WriterAssignment:
    """Assigns shards to writers, so that replicas share the writing.

    Workers exchange their shards once. After that, one flag checks that nothing has changed.
    """

    def __init__(self, group: SaveGroup) -> None:
        self._group = group
        self._described: list[Any] | None = None
        self._names: frozenset[str] = frozenset()

    def of(self, shards: Sequence[TensorShard]) -> frozenset[str]:
        """Names of the shards to write; every worker of the group calls this at the same step."""
        group = self._group
        if group.size == 1:
            return frozenset(shard.name for shard in shards)
        described = [
            [shard.name, list(shard.region.offset), list(shard.region.size), shard.nbytes]
            for shard in shards
        ]
        if not group.all_good(is_good=described == self._described):
            everyone = [
                [
                    (name, TensorSlice(tuple(offset), tuple(size)), nbytes)
                    for name, offset, size, nbytes in described_shards
                ]
                for described_shards in gather_json(described, group=group.group)
            ]
            self._described, self._names = described, assign_writers(everyone)[group.rank]
        return self._names


def assign_writers(
    everyone: Sequence[Sequence[tuple[str, TensorSlice, int]]],
) -> list[frozenset[str]]:
    """Assign each region to one of its holders: the largest first, to the least loaded."""
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    sizes: dict[tuple[str, TensorSlice], int] = {}
    for rank, held in enumerate(everyone):
        for name, region, nbytes in held:
            holders.setdefault((name, region), []).append(rank)
            sizes[name, region] = nbytes
    loads = [0] * len(everyone)
    names: list[set[str]] = [set() for _ in everyone]
    order = sorted(holders, key=lambda key: (-sizes[key], key[0], key[1].offset, key[1].size))
    for key in order:
        # An empty region is written too if the tensor is empty: its name and type count.
        writer = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writer] += sizes[key]
        names[writer].add(key[0])
    return [frozenset(described_shards) for described_shards in names]


def _device(group: Any) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
