"""Line and stack figures as SVG."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from yunlu.render.figure_values import (
    EventMarks,
    LineFigure,
    Series,
    StackFigure,
    StackLayer,
    fit_axis,
    step_axis,
)
from yunlu.render.html_page import draw_chart
from yunlu.render.i18n import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.render.html_page import Drawing

anything = st.lists(st.floats(), min_size=1, max_size=400)


def draw_line(
    values: Sequence[float],
    *,
    steps: Sequence[int] | None = None,
    log: bool = False,
    marks: tuple[EventMarks, ...] = (),
    **axis: Any,
) -> Drawing:
    at = tuple(steps or range(1, len(values) + 1))
    figure = LineFigure(
        id="x",
        title=same("x"),
        x=step_axis(at, same("step")),
        y=fit_axis(values, padding=0.06, **axis),
        log_y=fit_axis(values, log=True, padding=0.06, **axis) if log else None,
        series=(Series(key="x", name=same("x"), x=at, y=tuple(values)),),
        marks=marks,
    )
    return draw_chart(figure)["log" if log else "linear"]


def draw_stack(positions: Sequence[int], layers: Sequence[Sequence[float]]) -> Drawing:
    figure = StackFigure(
        id="x",
        title=same("x"),
        x=step_axis(positions, same("step")),
        positions=tuple(positions),
        layers=tuple(
            StackLayer(key=str(number), name=same("x"), shares=tuple(shares))
            for number, shares in enumerate(layers)
        ),
    )
    return draw_chart(figure)["linear"]


@given(anything)
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    drawing = draw_line(values)

    assert "nan" not in drawing.svg
    assert "inf" not in drawing.svg


@given(st.lists(st.floats(min_value=0, exclude_min=True, allow_infinity=False), min_size=1))
def test_any_positive_numbers_can_be_drawn_on_a_log_scale(values: list[float]) -> None:
    drawing = draw_line(values, log=True)

    assert "nan" not in drawing.svg
    assert all(0 <= tick.at <= 1 for tick in drawing.y_ticks)


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    drawing = draw_line([1.0, 2.0, math.nan, 2.0, 1.0])

    line = re.search(r'class="line c1" data-key="x" d="([^"]+)"', drawing.svg)
    assert line is not None
    assert line[1].count("M") == 2
    assert 'class="broken" d="M500 0V400"' in drawing.svg
    assert drawing.has_breaks


def test_ticks_are_round_numbers_inside_the_chart() -> None:
    drawing = draw_line([0.13, 2.41])

    assert [tick.label for tick in drawing.y_ticks] == ["0", "0.5", "1", "1.5", "2", "2.5"]
    assert all(0 <= tick.at <= 1 for tick in drawing.y_ticks)


def test_memory_ticks_are_round_in_powers_of_1024() -> None:
    drawing = draw_line([0.0, 2.2 * 2**30], unit="bytes")

    assert [tick.label for tick in drawing.y_ticks][:3] == ["0 B", "512 MiB", "1 GiB"]


def test_a_stack_reaches_from_the_floor_to_the_roof() -> None:
    svg = draw_stack([10, 20], [[0.25, 0.5], [0.75, 0.5]]).svg

    assert 'd="M0 300L1000 200L1000 400L0 400Z"' in svg
    assert 'd="M0 0L1000 0L1000 200L0 300Z"' in svg


def test_a_stack_of_one_stretch_has_a_width() -> None:
    assert 'd="M0 0L1000 0L1000 400L0 400Z"' in draw_stack([10], [[1.0]]).svg


def test_the_axis_of_a_perfect_share_ends_at_100_percent() -> None:
    drawing = draw_line([1.0, 1.0, 1.0], unit="percent")
    assert max(float(tick.label.removesuffix(" %")) for tick in drawing.y_ticks) == 100


def test_marks_stand_at_their_steps_and_take_the_place_of_broken_ones() -> None:
    marks = (EventMarks(kind="skip", name=same("skip"), x=(25, 50, 101)),)
    svg = draw_line([1.0, math.nan, 2.0], steps=[0, 50, 100], marks=marks).svg

    assert '<path class="mark skip" d="M250 0V400M500 0V400"/>' in svg
    assert "broken" not in svg
