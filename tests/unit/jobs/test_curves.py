"""Curves as they are thinned and smoothed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.jobs.curve_buckets import MOST_BUCKETS, MOST_POINTS, CurveBuckets, smooth, thin
from yunlu.runs.value_sample import ValueSample

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


@given(
    st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=60),
    st.integers(1, 200),
    st.integers(1, 700),
)
def test_a_long_curve_keeps_ends_extremes_and_what_broke(
    values: list[float], repeats: int, size: int
) -> None:
    every = np.array(values * repeats)
    steps = np.arange(1, len(every) + 1, dtype=np.float64)
    curve = CurveBuckets()
    for first in range(0, len(every), size):
        curve.add(steps[first : first + size], every[first : first + size])
    points = curve.points()

    assert len(points) <= min(MOST_POINTS, len(every))
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert (points[0][0], points[-1][0]) == (1, len(every))
    assert all(
        value == every[step - 1] or math.isnan(value) == math.isnan(every[step - 1])
        for step, value in points
    )
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert {min(finite), max(finite)} <= {value for _, value in points}
    if len(finite) < len(values):
        assert any(math.isnan(value) for _, value in points)
    if len(every) <= MOST_POINTS:
        assert len(points) == len(every)


def test_a_curve_takes_no_more_room_however_long_it_is() -> None:
    curve, sizes = CurveBuckets(), list[int]()
    for batch in range(60):
        steps = np.arange(batch * 4096, (batch + 1) * 4096, dtype=np.float64)
        curve.add(steps, np.sin(steps))
        sizes.append(curve.used_buckets)
    assert curve.count == 60 * 4096
    assert max(sizes) < MOST_BUCKETS
    assert min(sizes[1:]) >= MOST_BUCKETS // 4  # nor does it become coarse
    assert len(curve.points()) <= MOST_POINTS
    assert len(curve.smoothed()) <= MOST_BUCKETS


def test_a_long_curve_is_smoothed_like_a_short_one() -> None:
    steps = np.arange(1, 20_001, dtype=np.float64)
    values = np.exp(-steps / 5000) + 0.01 * np.sin(steps)
    curve = CurveBuckets()
    curve.add(steps, values)
    exact = dict(
        smooth([(int(step), float(value)) for step, value in zip(steps, values, strict=True)])
    )
    for step, value in curve.smoothed():
        assert value == pytest.approx(exact[step], abs=0.01)


def test_a_sample_of_many_values_keeps_their_order_and_middle() -> None:
    sample = ValueSample(capacity=1000)
    values = np.arange(100_000, dtype=np.float64)
    for first in range(0, 100_000, 777):
        sample.add(values[first : first + 777])
    kept = sample.values
    assert 500 <= len(kept) <= 1000
    assert np.all(np.diff(kept) == kept[1] - kept[0])
    assert np.median(kept) == pytest.approx(50_000, rel=0.01)
    assert sample.latest_quarter().min() == pytest.approx(75_000, rel=0.01)
