"""Orders of a pipeline: complete, on the right rank, and never blocked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.layouts import Schedule
from yunlu.training.parallel.pipeline_schedules import Action, actions

shapes = st.tuples(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 17),
)


def _orders(schedule: Schedule, ranks: int, chunks: int, micros: int) -> list[list[Action]]:
    return [
        actions(schedule, rank=rank, ranks=ranks, stages_per_rank=chunks, micros=micros)
        for rank in range(ranks)
    ]


def _beats(orders: list[list[Action]], stages: int) -> int:
    """Play the ranks, each waiting for what its next action needs; beats until all are done."""
    done: set[Action] = set()
    places = [0] * len(orders)
    beats = 0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moves = []
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            kind, stage, micro = order[places[rank]]
            before = stage - 1 if kind == "forward" else stage + 1
            if before in {-1, stages} or Action(kind, before, micro) in done:
                moves.append(rank)
        assert moves, f"blocked at {places}"
        for rank in moves:
            done.add(orders[rank][places[rank]])
            places[rank] += 1
        beats += 1
    return beats


@given(shapes)
def test_every_pass_is_made_once_where_its_stage_lives(
    shape: tuple[Schedule, int, int, int],
) -> None:
    _, ranks, chunks, micros = shape
    for rank, order in enumerate(_orders(*shape)):
        stages = range(rank, ranks * chunks, ranks)
        expected = {
            Action(kind, stage, micro)
            for kind in ("forward", "backward")
            for stage in stages
            for micro in range(micros)
        }
        assert len(order) == len(expected)
        assert set(order) == expected
        for stage in stages:
            for micro in range(micros):
                forward = order.index(Action("forward", stage, micro))
                assert forward < order.index(Action("backward", stage, micro))


@given(shapes)
def test_ranks_that_wait_for_each_other_never_block(shape: tuple[Schedule, int, int, int]) -> None:
    _beats(_orders(*shape), shape[1] * shape[2])


@given(shapes)
def test_micro_batches_pass_a_stage_in_order(shape: tuple[Schedule, int, int, int]) -> None:
    for order in _orders(*shape):
        for kind in ("forward", "backward"):
            for stage in {action.stage for action in order}:
                passed = [one.micro for one in order if one.kind == kind and one.stage == stage]
                assert all(first < second for first, second in pairwise(passed))


def _most_kept(order: list[Action]) -> int:
    kept = most = 0
    for action in order:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most


@given(st.integers(1, 6), st.integers(1, 17))
def test_one_forward_one_backward_keeps_few_micro_batches(ranks: int, micros: int) -> None:
    for rank, order in enumerate(_orders("1f1b", ranks, 1, micros)):
        assert _most_kept(order) <= ranks - rank


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_full_groups_have_the_bubble_of_the_paper(ranks: int, chunks: int, groups: int) -> None:
    micros = groups * ranks
    beats = _beats(_orders("interleaved", ranks, chunks, micros), ranks * chunks)
    assert beats == 2 * micros * chunks + 2 * (ranks - 1)


@given(shapes)
def test_interleaving_wastes_no_more_than_one_stage_per_rank(
    shape: tuple[Schedule, int, int, int],
) -> None:
    _, ranks, chunks, micros = shape
    # A stage is `chunks` times as long where a rank holds but one.
    plain = _beats(_orders("1f1b", ranks, 1, micros), ranks) * chunks
    assert _beats(_orders("interleaved", ranks, chunks, micros), ranks * chunks) <= plain


@given(st.integers(2, 6), st.integers(2, 4), st.integers(4, 40))
def test_interleaving_does_not_keep_everything(ranks: int, chunks: int, micros: int) -> None:
    for order in _orders("interleaved", ranks, chunks, micros):
        assert _most_kept(order) <= (chunks + 2) * ranks


def test_senseless_places_are_refused() -> None:
    with pytest.raises(ValueError, match="no order"):
        actions("1f1b", rank=2, ranks=2, stages_per_rank=1, micros=1)
    with pytest.raises(ValueError, match="no order"):
        actions("gpipe", rank=0, ranks=2, stages_per_rank=1, micros=0)
