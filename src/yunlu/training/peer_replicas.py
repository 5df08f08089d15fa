"""In-memory state replicas on peers, of parts that no other worker holds live."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yunlu.training.elastic.messages import HeldState
from yunlu.training.parallel.redistribute import gather_json, redistribute
from yunlu.training.tensor_slices import TensorShard, TensorSlice, join_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.engine import Engine
    from yunlu.training.parallel.world import World

MAX_COST_SHARE = 0.02
"""Share of training time spent on replicas at most."""
_MAX_INTERVAL_STEPS = 200


@dataclass(frozen=True)
class StateReplica:
    """State of one step on one worker: its own part and its neighbour's."""

    step: int
    held_states: tuple[HeldState, ...]
    pieces: dict[str, TensorShard]
    numbers: dict[str, Any]


class PeerReplicas:
    """Replicates state to a neighbour as often as is cheap; the last replica is kept until the next is complete."""

    def __init__(
        self, engine: Engine, world: World, generation: int, *, before: Sequence[StateReplica] = ()
    ) -> None:
        """``before``: replicas of the previous generation, kept until newer ones exist."""
        self._engine, self._world, self._generation = engine, world, generation
        layout = world.layout
        self.is_needed = not layout.is_single and (layout.dp == 1 or layout.zero1)
        self.replicas: list[StateReplica] = list(before[-1:])
        self._interval_steps = 1
        self._next_step = engine.steps_done
        self._neighbour: list[TensorShard] = []
        self._described_shards = -1
        """Number of shards described to the neighbour."""
        self._step_s = math.inf

    def forget_after(self, step: int) -> None:
        """Forget replicas of later steps: the run was rolled back."""
        self.replicas = [copy for copy in self.replicas if copy.step <= step]
        self._next_step = step

    def record_step_time(self, step_s: float) -> None:
        """Record the time of the last step."""
        self._step_s = step_s

    def replicate(self, extra: dict[str, Any]) -> None:
        """Replicate if due; called on all workers at the end of a step."""
        engine = self._engine
        if not self.is_needed or engine.steps_done < self._next_step:
            return
        started_at = perf_counter()
        own = [
            replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))
            for shard in join_groups(engine.state.shards())
        ]
        if _any_true(
            self._described_shards != len(own)
        ):  # optimizers have no state before their first step
            self._neighbour, self._described_shards = self._describe_neighbour(own), len(own)
        received = [
            replace(shard, tensor=torch.empty_like(shard.tensor)) for shard in self._neighbour
        ]
        redistribute(own, received)
        place_of, size = self._world.layout.place_of, self._world.layout.world
        held_states = tuple(
            HeldState(
                step=engine.steps_done, generation=self._generation, coordinates=place_of(rank)
            )
            for rank in (self._world.rank, (self._world.rank + 1) % size)
        )
        numbers = engine.state.numbers() | {"extra": extra}
        pieces = {f"{number}:{shard.name}": shard for number, shard in enumerate([*own, *received])}
        self.replicas = [
            *self.replicas[-1:],
            StateReplica(
                step=engine.steps_done, held_states=held_states, pieces=pieces, numbers=numbers
            ),
        ]
        self._plan_next(perf_counter() - started_at)

    def _plan_next(self, cost_s: float) -> None:
        costs = torch.tensor([cost_s, self._step_s if math.isfinite(self._step_s) else 0.0])
        dist.all_reduce(costs, op=dist.ReduceOp.MAX)
        cost_s, step_s = costs.tolist()
        if step_s:
            self._interval_steps = min(
                max(math.ceil(cost_s / (MAX_COST_SHARE * step_s)), 1), _MAX_INTERVAL_STEPS
            )
        self._next_step = self._engine.steps_done + (self._interval_steps if step_s else 1)

    def _describe_neighbour(self, own: Sequence[TensorShard]) -> list[TensorShard]:
        """Shards of the next worker in the ring, as empty tensors."""
        described = gather_json([describe_shard(shard) for shard in own])
        return [
            make_empty_shard(description)
            for description in described[(self._world.rank + 1) % len(described)]
        ]


def _any_true(flag: bool) -> bool:
    """Whether the flag is set on any worker, so that all replicate together."""
    flag_tensor = torch.tensor(int(flag))
    dist.all_reduce(flag_tensor, op=dist.ReduceOp.MAX)
    return bool(flag_tensor)


def describe_shard(shard: TensorShard) -> list[Any]:
    """Metadata of a shard, as JSON."""
    kind = str(shard.tensor.dtype).removeprefix("torch.")
    return [shard.name, shard.shape, shard.region.offset, shard.region.size, kind]


def make_empty_shard(description: list[Any]) -> TensorShard:
    """An empty shard to receive into."""
    name, shape, offset, size, kind = description
    tensor = torch.empty(size, dtype=getattr(torch, kind))
    return TensorShard(name, tuple(shape), TensorSlice(tuple(offset), tuple(size)), tensor)
