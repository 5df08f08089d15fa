"""Ranges of axes and their labels."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from yunlu.render.figure_values import Axis, dimension_axis, metric_axis, place_on
from yunlu.render.html_page import find_ticks
from yunlu.render.study_figures import estimate_density
from yunlu.tuning.values import Dimension


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_any_values_have_an_axis(values: list[float], smaller: bool, share: bool) -> None:
    shown = [value for value in values if abs(value) < 1e100 or not math.isfinite(value)]
    axis = metric_axis(shown, "accuracy" if share else "loss", smaller_is_better=smaller)
    assert axis.low < axis.high
    for value in shown:
        assert 0 <= axis.share(value) <= 1
    for tick in find_ticks(axis):
        assert 0 <= tick.at <= 1
    finite = [value for value in shown if math.isfinite(value)]
    if finite:  # the good end is always inside
        best = min(finite) if smaller else max(finite)
        assert axis.low <= best <= axis.high


def test_outliers_do_not_squeeze_the_rest() -> None:
    axis = metric_axis([0.3, 0.31, 0.35, 0.4, 1e6], "loss", smaller_is_better=True)
    assert axis.share(0.4) - axis.share(0.3) > 0.5
    assert axis.share(1e6) == 1


def test_axes_have_round_labels() -> None:
    labels = [tick.label for tick in find_ticks(Axis(low=0, high=95, unit="duration"))]
    assert labels == ["0", "30 s", "1 min", "1:30 min"]
    rate = dimension_axis(Dimension(name="lr", low=1e-5, high=1e-1, log=True))
    assert [tick.label for tick in find_ticks(rate)] == ["1e-5", "1e-4", "0.001", "0.01", "0.1"]
    named = dimension_axis(Dimension(name="o", choices=("a", None, True)))
    assert [tick.label for tick in find_ticks(named)] == ["a", "none", "true"]
    small = [tick.label for tick in find_ticks(Axis(low=0, high=0.001))]
    assert small == ["0", "0.0002", "0.0004", "0.0006", "0.0008", "0.001"]


@given(st.integers(0, 10_000), st.sampled_from(["a", "b", "c"]))
def test_choices_never_leave_their_part(number: int, value: str) -> None:
    dimension = Dimension(name="o", choices=("a", "b", "c"))
    part = ("a", "b", "c").index(value)
    share = dimension_axis(dimension).share(place_on(dimension, value, beside=number))
    assert part / 3 < share < (part + 1) / 3


def test_the_background_is_blank_where_no_trial_has_been() -> None:
    levels = estimate_density([(0.1, 0.1, 0.0), (0.15, 0.1, 0.1)]).levels
    assert {level for row in levels[32:] for level in row} == {-1}  # the upper part
    assert 0 in levels[5]
