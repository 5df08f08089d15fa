"""Curves as they are thinned and smoothed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.jobs.curve_buckets import smooth, thin

anything = st.lists(st.floats(), min_size=1, max_size=400)


def numbered(values: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


@given(anything, st.integers(20, 80))
def test_thinning_keeps_ends_extremes_and_what_broke(values: list[float], limit: int) -> None:
    points = numbered(values)
    kept = thin(points, limit)

    assert len(kept) <= max(limit, 1)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert {step for step, _ in kept} <= {step for step, _ in points}
    assert (kept[0][0], kept[-1][0]) == (1, len(points))
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert {min(finite), max(finite)} <= {value for _, value in kept}
    if len(finite) < len(values):
        assert any(not math.isfinite(value) for _, value in kept)


def test_one_spike_among_a_hundred_thousand_steps_stays_visible() -> None:
    points = numbered([1.0] * 100_000)
    points[61_803] = (61_804, 50.0)

    kept = thin(points)
    assert len(kept) <= 1000
    assert (61_804, 50.0) in kept


def test_a_smoothed_line_does_not_trail_a_falling_one() -> None:
    points = numbered([100.0 - step for step in range(100)])

    middle = smooth(points)[30:70]
    assert [value for _, value in middle] == pytest.approx([v for _, v in points[30:70]], abs=0.1)


def test_smoothing_passes_over_what_is_not_finite() -> None:
    assert smooth([(1, 2.0), (2, math.nan), (3, 2.0)]) == [(1, 2.0), (3, 2.0)]
