"""Values as text."""

from __future__ import annotations

import math

import pytest

from yunlu.render.format import show_metric


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("accuracy", 0.9722, "97.22 %"),
        ("accuracy", 97.22, "97.22"),
        ("rmse", 0.5, "0.5"),
        ("loss", math.nan, "nan"),
        ("macro_f1", None, "–"),
    ],
)
def test_metrics_are_shown_as_people_say_them(name: str, value: float | None, shown: str) -> None:
    assert show_metric(name, value) == shown
