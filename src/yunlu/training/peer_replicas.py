"""Copies of the state that workers keep for each other: of parts that nobody else holds alive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yunlu.training.elastic.messages import HeldState
from yunlu.training.parallel.redistribute import gather_json, redistribute
from yunlu.training.parallel.tensor_slices import TensorShard, TensorSlice, join_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.engine import Engine
    from yunlu.training.parallel.world import World

COST = 0.02
"""Of the time of training, spent on copies at most."""
_MOST_STEPS = 200


@dataclass(frozen=True)
class StateReplica:
    """The state after some steps, as far as one worker keeps it: its own part, and its neighbour's."""

    step: int
    held_states: tuple[HeldState, ...]
    pieces: dict[str, TensorShard]
    numbers: dict[str, Any]


class PeerReplicas:
    """Makes copies now and then, as often as they are cheap; the one before stays until the next is whole."""

    def __init__(
        self, engine: Engine, world: World, generation: int, *, before: Sequence[StateReplica] = ()
    ) -> None:
        """``before`` are copies of the generation before, kept until there are newer ones."""
        self._engine, self._world, self._generation = engine, world, generation
        layout = world.layout
        self.is_needed = not layout.is_single and (layout.dp == 1 or layout.zero1)
        self.replicas: list[StateReplica] = list(before[-1:])
        self._every = 1
        self._next_step = engine.steps_done
        self._neighbour: list[TensorShard] = []
        self._described = -1
        """How many pieces we told of."""
        self._step_s = math.inf

    def forget_after(self, step: int) -> None:
        """The run went back: copies of later steps are of a past that is no more."""
        self.replicas = [copy for copy in self.replicas if copy.step <= step]
        self._next_step = step

    def note(self, step_s: float) -> None:
        """A step took so long."""
        self._step_s = step_s

    def keep(self, kept: dict[str, Any]) -> None:
        """At a step's end, on all workers alike: copy if it is time to."""
        engine = self._engine
        if not self.is_needed or engine.steps_done < self._next_step:
            return
        started_at = perf_counter()
        own = [
            replace(piece, tensor=piece.tensor.detach().cpu().clone())
            for piece in join_groups(engine.state.pieces())
        ]
        if _any_true(
            self._described != len(own)
        ):  # optimisers remember nothing before their first step
            self._neighbour, self._described = self._describe_neighbour(own), len(own)
        theirs = [
            replace(piece, tensor=torch.empty_like(piece.tensor)) for piece in self._neighbour
        ]
        redistribute(own, theirs)
        place_of, size = self._world.layout.place_of, self._world.layout.world
        held_states = tuple(
            HeldState(step=engine.steps_done, generation=self._generation, place=place_of(rank))
            for rank in (self._world.rank, (self._world.rank + 1) % size)
        )
        numbers = engine.state.numbers() | {"extra": kept}
        pieces = {f"{number}:{piece.name}": piece for number, piece in enumerate([*own, *theirs])}
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
            self._every = min(max(math.ceil(cost_s / (COST * step_s)), 1), _MOST_STEPS)
        self._next_step = self._engine.steps_done + (self._every if step_s else 1)

    def _describe_neighbour(self, own: Sequence[TensorShard]) -> list[TensorShard]:
        """What the next worker in the round holds, as empty tensors."""
        everyone = gather_json([describe(piece) for piece in own])
        return [make_blank(about) for about in everyone[(self._world.rank + 1) % len(everyone)]]


def _any_true(flag: bool) -> bool:
    """Whether it is true of anyone: what all must do together, all must begin together."""
    found = torch.tensor(int(flag))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def describe(piece: TensorShard) -> list[Any]:
    """A piece without its numbers, as JSON."""
    kind = str(piece.tensor.dtype).removeprefix("torch.")
    return [piece.name, piece.shape, piece.box.offset, piece.box.size, kind]


def make_blank(about: list[Any]) -> TensorShard:
    """A piece as described, to be filled."""
    name, shape, offset, size, kind = about
    tensor = torch.empty(size, dtype=getattr(torch, kind))
    return TensorShard(name, tuple(shape), TensorSlice(tuple(offset), tuple(size)), tensor)
