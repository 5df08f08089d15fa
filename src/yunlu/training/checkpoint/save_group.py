"""The workers that save together: who of them writes what, and what they agree on."""

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
    """All workers of a generation, from the view of one; by default it is alone."""

    rank: int = 0
    size: int = 1
    token: str = field(default_factory=_own_token)
    """The same on all of them, and never used before: as the run's life and the generation's number."""
    group: Any = None
    """Through which they agree, between steps; none is everyone."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker publishes."""
        return self.rank == 0

    def share_of_leader(self, value: Any) -> Any:
        """The leader's value, which is JSON."""
        return value if self.size == 1 else broadcast_json(value, source=0, group=self.group)

    def agree(self, *, is_good: bool) -> bool:
        """Whether it is good on all of them."""
        if self.size == 1:
            return is_good
        flag = torch.tensor(int(is_good), device=_device(self.group))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())


class WriterAssignment:
    """Which of its pieces a worker writes, so that replicas share the writing.

    Everyone tells once what it holds. After that, one number tells whether anything has changed.
    """

    def __init__(self, crew: SaveGroup) -> None:
        self._crew = crew
        self._told: list[Any] | None = None
        self._names: frozenset[str] = frozenset()

    def of(self, shards: Sequence[TensorShard]) -> frozenset[str]:
        """The names to write; every worker of the crew calls this at the same step."""
        crew = self._crew
        if crew.size == 1:
            return frozenset(shard.name for shard in shards)
        told = [
            [shard.name, list(shard.region.offset), list(shard.region.size), shard.nbytes]
            for shard in shards
        ]
        if not crew.agree(is_good=told == self._told):
            everyone = [
                [
                    (name, TensorSlice(tuple(offset), tuple(size)), nbytes)
                    for name, offset, size, nbytes in one
                ]
                for one in gather_json(told, group=crew.group)
            ]
            self._told, self._names = told, assign_writers(everyone)[crew.rank]
        return self._names


def assign_writers(
    everyone: Sequence[Sequence[tuple[str, TensorSlice, int]]],
) -> list[frozenset[str]]:
    """Each box to one of those who hold it: the largest first, to who has least to write."""
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
        # An empty box is written too where the whole tensor is empty: its name and type count.
        writer = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writer] += sizes[key]
        names[writer].add(key[0])
    return [frozenset(one) for one in names]


def _device(group: Any) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
