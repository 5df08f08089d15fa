"""In which order a rank of the pipeline takes its stages and micro-batches.

Stage ``s`` lives on rank ``s % ranks``. A rank follows its list to the letter: it waits for what an
action needs, and never for what it has sent. All orders keep the micro-batches of a stage ascending.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from yunlu.planning.layout import Schedule


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    micro: int


def actions(
    schedule: Schedule, *, rank: int, ranks: int, stages_per_rank: int, micros: int
) -> list[Action]:
    """What a rank does in one step, in order; any number of micro-batches from one up."""
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
    """At most ``ranks - rank`` micro-batches are kept at a time (Narayanan et al. 2021, 2.2.1)."""
    ahead = min(ranks - rank - 1, micros)
    order = [Action("forward", rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            order.append(Action("forward", rank, micro + ahead))
        order.append(Action("backward", rank, micro))
    return order


@dataclass(kw_only=True)
class _StageQueue:
    """One rank while the order is being found."""

    forwards: deque[Action]
    backwards: deque[Action]
    limit: int
    """Micro-batches kept at a time."""
    order: list[Action] = field(default_factory=list[Action])
    kept: int = 0

    def take(self, queue: deque[Action]) -> Action:
        action = queue.popleft()
        self.kept += 1 if action.kind == "forward" else -1
        self.order.append(action)
        return action


@lru_cache(maxsize=64)
def _interleaved(ranks: int, stages_per_rank: int, micros: int) -> tuple[tuple[Action, ...], ...]:
    """Several stages per rank, taken in turn for groups of micro-batches (Narayanan et al. 2021, 2.2.2).

    The paper's order needs a multiple of ``ranks`` micro-batches. Here the ranks are played through
    beat by beat and each takes what is ready, so any number does: an order that was once played
    cannot block.
    """
    stages = ranks * stages_per_rank
    lanes = [_lane(rank, ranks, stages_per_rank, micros) for rank in range(ranks)]
    done: set[Action] = set()
    while any(lane.backwards for lane in lanes):
        beat = [queue for lane in lanes if (queue := _ready(lane, done, stages)) is not None]
        if not beat:  # the limits leave nobody a move: one forward more, on the first that can
            beat = [lane.forwards for lane in lanes if _can_run(lane.forwards, done, stages)][:1]
        owner = {id(queue): lane for lane in lanes for queue in (lane.forwards, lane.backwards)}
        done.update([owner[id(queue)].take(queue) for queue in beat])
    return tuple(tuple(lane.order) for lane in lanes)


def _lane(rank: int, ranks: int, stages_per_rank: int, micros: int) -> _StageQueue:
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


def _ready(lane: _StageQueue, done: set[Action], stages: int) -> deque[Action] | None:
    # Forward as long as the limit allows: for whole groups this is the paper's order and its bubble.
    if lane.kept < lane.limit and _can_run(lane.forwards, done, stages):
        return lane.forwards
    if _can_run(lane.backwards, done, stages):
        return lane.backwards
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
