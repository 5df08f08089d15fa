"""No more is computed again than memory asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.planner import plan_recompute

KEPT = {"none": 100.0, "selective": 60.0, "full": 20.0}
CHEAP_SELECTIVE = {"none": 0.0, "selective": 0.1, "full": 0.3}
DEAR_SELECTIVE = {"none": 0.0, "selective": 0.2, "full": 0.3}


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (100.0, ("none", 0.0)),
        (80.0, ("selective", 0.5)),
        (60.0, ("selective", 1.0)),
        (40.0, ("full", 0.75)),
        (20.0, ("full", 1.0)),
        (5.0, ("full", 1.0)),
    ],
)
def test_the_smallest_share_that_fits(room: float, expected: tuple[str, float]) -> None:
    assert plan_recompute(KEPT, room, extra_time=CHEAP_SELECTIVE) == expected


def test_few_blocks_in_full_may_cost_less_time_than_many_in_part() -> None:
    assert plan_recompute(KEPT, 80.0, extra_time=DEAR_SELECTIVE) == ("full", 0.25)


def test_a_model_without_blocks_computes_nothing_again() -> None:
    assert plan_recompute({"none": 100.0}, 5.0) == ("none", 0.0)


@given(
    none=st.floats(1, 1e12),
    selective=st.floats(0.01, 1.2),
    full=st.floats(0.01, 1.2),
    room=st.floats(0, 1.5),
)
def test_what_is_planned_fits_wherever_anything_fits(
    none: float, selective: float, full: float, room: float
) -> None:
    kept = {"none": none, "selective": none * selective, "full": none * full}
    mode, share = plan_recompute(kept, none * room)
    assert 0 <= share <= 1
    holds = none + share * (kept[mode] - none)
    if min(kept.values()) <= none * room:
        assert holds <= none * room * (1 + 1e-9)
    else:
        assert holds == pytest.approx(min(kept.values()))
