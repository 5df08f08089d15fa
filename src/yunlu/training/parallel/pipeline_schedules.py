"""Pipeline schedules: the order of stages and micro-batches on each rank.

Stage ``s`` is on rank ``s % ranks``. A rank executes its list in order: it waits for the inputs of an
action, and never for its sends. The micro-batches of a stage are always in ascending order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from yunlu.planning.layouts import Schedule


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    micro: int


def actions(
    schedule: Schedule, *, rank: int, ranks: int, stages_per_rank: int, micros: int
) -> list[Action]:
    """Actions of a rank in one step, in order, for one or more micro-batches."""
    if micros < 1 or not 0 <= rank < ranks or stages_per_rank < 1:
        raise ValueError(f"no order for rank {rank} of {ranks} with {micros} micro-batches")
    if schedule == "gpipe":
        return _gpipe(rank, ranks, stages_per_rank, micros)
    if stages_per_rank == 1:
        return _one_forward_one_backward(rank, ranks, micros)
    return list(_interleaved(ranks, stages_per_rank, micros)[rank])


def _gpipe(rank: int, ranks: int, stages_per_rank: int, micros: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    forwards = [Action("forward", stage, micro) for stage in stages for micro in range(micros)]
    backwards = [
        Action("backward", stage, micro) for stage in reversed(stages) for micro in range(micros)
    ]
    return forwards + backwards


def _one_forward_one_backward(rank: int, ranks: int, micros: int) -> list[Action]:
    """1F1B: at most ``ranks - rank`` micro-batches in flight (Narayanan et al. 2021, 2.2.1)."""
    ahead = min(ranks - rank - 1, micros)
    order = [Action("forward", rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            order.append(Action("forward", rank, micro + ahead))
        order.append(Action("backward", rank, micro))
    return order


@dataclass(kw_only=True)
class _StageQueue:
    """One rank during the simulation of the schedule."""

    forwards: deque[Action]
    backwards: deque[Action]
    limit: int
    """Most micro-batches in flight."""
    order: list[Action] = field(default_factory=list[Action])
    in_flight: int = 0

    def take(self, queue: deque[Action]) -> Action:
        action = queue.popleft()
        self.in_flight += 1 if action.kind == "forward" else -1
        self.order.append(action)
        return action


@lru_cache(maxsize=64)
def _interleaved(ranks: int, stages_per_rank: int, micros: int) -> tuple[tuple[Action, ...], ...]:
    """Interleaved 1F1B: several stages per rank, by groups of micro-batches (Narayanan et al. 2021, 2.2.2).

    The paper's order needs a multiple of ``ranks`` micro-batches. Here the ranks are simulated tick by
    tick and each takes a ready action, so any number works: a simulated order cannot deadlock.
    """
    stages = ranks * stages_per_rank
    queues_by_rank = [_make_queue(rank, ranks, stages_per_rank, micros) for rank in range(ranks)]
    done: set[Action] = set()
    while any(rank_queue.backwards for rank_queue in queues_by_rank):
        tick = [
            queue
            for rank_queue in queues_by_rank
            if (queue := _ready(rank_queue, done, stages)) is not None
        ]
        if not tick:  # limits block all ranks: allow one more forward on the first rank that can
            tick = [
                rank_queue.forwards
                for rank_queue in queues_by_rank
                if _can_run(rank_queue.forwards, done, stages)
            ][:1]
        owner = {
            id(queue): rank_queue
            for rank_queue in queues_by_rank
            for queue in (rank_queue.forwards, rank_queue.backwards)
        }
        done.update([owner[id(queue)].take(queue) for queue in tick])
    return tuple(tuple(rank_queue.order) for rank_queue in queues_by_rank)


def _make_queue(rank: int, ranks: int, stages_per_rank: int, micros: int) -> _StageQueue:
    stages = range(rank, ranks * stages_per_rank, ranks)
    groups = [range(start, min(start + ranks, micros)) for start in range(0, micros, ranks)]
    return _StageQueue(
        forwards=deque(
            Action("forward", stage, micro)
            for group in groups
            for stage in stages
            for micro in group
        ),
        backwards=deque(
            Action("backward", stage, micro)
            for group in groups
            for stage in reversed(stages)
            for micro in group
        ),
        limit=2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1,
    )


def _ready(rank_queue: _StageQueue, done: set[Action], stages: int) -> deque[Action] | None:
    # Forward while the limit allows: for full groups this is the paper's order and bubble.
    if rank_queue.in_flight < rank_queue.limit and _can_run(rank_queue.forwards, done, stages):
        return rank_queue.forwards
    if _can_run(rank_queue.backwards, done, stages):
        return rank_queue.backwards
    return None


def _can_run(queue: deque[Action], done: set[Action], stages: int) -> bool:
    if not queue:
        return False
    kind, stage, micro = queue[0]
    if kind == "forward":
        return stage == 0 or Action("forward", stage - 1, micro) in done
    if Action("forward", stage, micro) not in done:
        return False
    return stage == stages - 1 or Action("backward", stage + 1, micro) in done
