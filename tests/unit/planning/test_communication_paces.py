"""What a step takes each worker, told from bursts and from steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.communication.timing import WorkerSpeed, is_doubtful, steps_of

SPANS = st.floats(1e-4, 10.0)


def bursts(*turns: float) -> list[WorkerSpeed]:
    return [WorkerSpeed(turns_per_s=each) for each in turns]


def test_a_slow_processor_is_told_before_the_first_step() -> None:
    spans = steps_of(bursts(100, 98, 25, 104), planned_s=0.1)
    assert spans == pytest.approx((0.1, 0.1, 0.4, 0.1), rel=0.02)


def test_what_differs_by_chance_is_alike() -> None:
    paces = bursts(100, 85, 110, 95)
    assert not is_doubtful(paces)
    assert steps_of(paces, planned_s=0.1) == (0.1,) * 4


def test_the_plan_was_made_on_the_leaders_machine() -> None:
    slow_leader = steps_of(bursts(25, 100, 100), planned_s=0.4)
    assert slow_leader == pytest.approx((0.4, 0.1, 0.1))


def test_steps_that_were_made_count_more_than_bursts() -> None:
    paces = [WorkerSpeed(turns_per_s=100, step_s=0.2), WorkerSpeed(turns_per_s=100, step_s=0.9)]
    assert steps_of(paces, planned_s=0.1) == (0.2, 0.9)


def test_a_newcomer_is_told_by_those_who_have_made_steps() -> None:
    paces = [
        WorkerSpeed(turns_per_s=100, step_s=0.2),
        WorkerSpeed(turns_per_s=100, step_s=0.2),
        *bursts(20),
    ]
    assert steps_of(paces, planned_s=7.0) == pytest.approx((0.2, 0.2, 1.0))


@given(turns=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8), planned_s=SPANS)
def test_the_leader_takes_what_was_planned_and_who_is_slower_takes_longer(
    turns: list[float], planned_s: float
) -> None:
    spans = steps_of(bursts(*turns), planned_s=planned_s)
    assert spans[0] == pytest.approx(planned_s)
    order = sorted(range(len(turns)), key=lambda rank: -turns[rank])
    assert [spans[rank] for rank in order] == sorted(spans[rank] for rank in order)


def test_doubt_is_of_who_does_otherwise_than_most() -> None:
    assert is_doubtful(bursts(100, 100, 100, 30))
    assert is_doubtful(bursts(100, 100, 100, 300))
