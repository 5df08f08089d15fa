"""Estimates: one unit, and the digits that the interval supports."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.units import (
    estimate_count,
    estimate_dollars,
    estimate_time,
    supported_digit,
)

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("edges", "shown"),
    [
        ((883.0, 693.0, 1248.0), ("15 min", "12–21 min")),
        ((0.3524, 0.2823, 0.4784), ("350 ms", "280–480 ms")),
        ((649 * DAY_S, 500 * DAY_S, 830 * DAY_S), ("650 d", "500–830 d")),
        ((12 * 3600.0, 12 * 3600.0, 12 * 3600.0), ("12.0 h", "")),
        ((1000 * DAY_S, 1000 * DAY_S, 1000 * DAY_S), ("2.74 years", "")),
        ((3600.0, 3599.0, 3601.0), ("60.0 min", "")),
    ],
)
def test_a_time_and_its_interval_have_one_unit(
    edges: tuple[float, float, float], shown: tuple[str, str]
) -> None:
    assert estimate_time(*edges) == shown


@pytest.mark.parametrize(
    ("edges", "shown"),
    [
        ((5.47, 4.30, 7.74), ("$5.50", "$4.30–$7.70")),
        ((45_123.0, 31_000.0, 61_000.0), ("$45,000", "$31,000–$61,000")),
        ((0.0072, 0.0052, 0.0091), ("$0.0072", "$0.0052–$0.0091")),
        ((31.0, 31.0, 31.0), ("$31.00", "")),
        ((0.0, 0.0, 0.0), ("$0", "")),
        ((7.5e8, 5e8, 1e9), ("$750.0M", "$500.0M–$1.0G")),
    ],
)
def test_money_is_in_dollars_or_in_cents(
    edges: tuple[float, float, float], shown: tuple[str, str]
) -> None:
    assert estimate_dollars(*edges) == shown


def test_a_pace_is_rounded_too() -> None:
    assert estimate_count(186_000.0, 137_000.0, 232_200.0) == ("190k", "140k–230k")
    assert estimate_count(181.6, 133.8, 226.8) == ("180", "130–230")


@given(
    value=st.floats(1e-6, 1e12),
    below=st.floats(0.2, 1.0),
    above=st.floats(1.0, 5.0),
)
def test_rounding_moves_a_figure_by_less_than_its_error(
    value: float, below: float, above: float
) -> None:
    low, high = value * below, value * above
    digit = supported_digit(value, low, high)
    moved = abs(round(value / digit) * digit - value)
    assert moved <= max((high - low) / 2, value * 0.005) * (1 + 1e-9)
    assert math.isclose(math.log10(digit), round(math.log10(digit)), abs_tol=1e-9)
