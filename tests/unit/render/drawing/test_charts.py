"""Curves as they are thinned, smoothed and drawn."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.jobs.curves import smooth, thin
from yunlu.render.drawing.charts import Mark, Series, draw_lines, draw_stack
from yunlu.render.format import show_metric

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


@given(anything)
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    drawing = draw_lines([Series(key="x", points=numbered(values), colour=1)], unit="number")

    assert "nan" not in drawing.svg
    assert "inf" not in drawing.svg


@given(st.lists(st.floats(min_value=0, exclude_min=True, allow_infinity=False), min_size=1))
def test_any_positive_numbers_can_be_drawn_on_a_log_scale(values: list[float]) -> None:
    series = Series(key="x", points=numbered(values), colour=1)
    drawing = draw_lines([series], unit="number", log=True)

    assert "nan" not in drawing.svg
    assert all(-0.01 <= tick.at <= 1.01 for tick in drawing.y_ticks)


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    points = numbered([1.0, 2.0, math.nan, 2.0, 1.0])
    svg = draw_lines([Series(key="loss", points=points, colour=1)], unit="number").svg

    line = re.search(r'class="line c1" data-key="loss" d="([^"]+)"', svg)
    assert line is not None
    assert line[1].count("M") == 2
    assert 'class="broken" d="M500 0V400"' in svg


def test_ticks_are_round_numbers_inside_the_chart() -> None:
    points = numbered([0.13, 2.41])
    drawing = draw_lines([Series(key="x", points=points, colour=1)], unit="number")

    assert [tick.label for tick in drawing.y_ticks] == ["0", "0.5", "1", "1.5", "2", "2.5"]
    assert all(0 <= tick.at <= 1 for tick in drawing.y_ticks)


def test_memory_ticks_are_round_in_powers_of_1024() -> None:
    points = numbered([0.0, 2.2 * 2**30])
    drawing = draw_lines([Series(key="x", points=points, colour=1)], unit="bytes")

    assert [tick.label for tick in drawing.y_ticks][:3] == ["0 B", "512 MiB", "1 GiB"]


def test_a_stack_reaches_from_the_floor_to_the_roof() -> None:
    svg = draw_stack([10, 20], [[0.25, 0.5], [0.75, 0.5]]).svg

    assert 'd="M0 300L1000 200L1000 400L0 400Z"' in svg
    assert 'd="M0 0L1000 0L1000 200L0 300Z"' in svg


def test_a_stack_of_one_stretch_has_a_width() -> None:
    assert 'd="M0 0L1000 0L1000 400L0 400Z"' in draw_stack([10], [[1.0]]).svg


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("accuracy", 0.9722, "97.22 %"),
        ("accuracy", 97.22, "97.22"),
        ("rmse", 0.5, "0.5"),
        ("loss", math.nan, "nan"),
        ("macro_f1", None, "–"),
    ],
)
def test_metrics_are_shown_as_people_say_them(name: str, value: float | None, words: str) -> None:
    assert show_metric(name, value) == words


def test_the_axis_of_a_perfect_share_ends_at_100_percent() -> None:
    points = numbered([1.0, 1.0, 1.0])
    drawing = draw_lines([Series(key="accuracy", points=points, colour=1)], unit="percent")
    assert max(float(tick.label.removesuffix(" %")) for tick in drawing.y_ticks) == 100


def test_marks_stand_at_their_steps_and_take_the_place_of_broken_ones() -> None:
    series = Series(key="loss", points=[(0, 1.0), (50, math.nan), (100, 2.0)], colour=1)
    svg = draw_lines([series], unit="number", marks=[Mark(kind="skip", steps=[25, 50, 101])]).svg

    assert '<path class="mark skip" d="M250 0V400M500 0V400"/>' in svg
    assert "broken" not in svg
