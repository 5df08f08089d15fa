"""Probing: which layout to try next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.planning.predict.test_memory import EIGHT_B
from yunlu.planning.predict.query_batch import QueryBatch, make_queries
from yunlu.planning.search.probe_selection import (
    Predictions,
    chance_to_run,
    expected_speed,
    next_probe,
)


def candidates(**columns: Any) -> QueryBatch:
    count = max(len(values) for values in columns.values())
    return make_queries(count, **{**EIGHT_B, **columns})


def predictions(speed: list[float], **columns: Any) -> Predictions:
    count = len(speed)
    told: dict[str, Any] = {
        "spread": np.full(count, 0.3),
        "room": np.full(count, 1.0),
        "room_spread": np.full(count, 0.1),
        "runs": np.ones(count),
    }
    return Predictions(
        speed=np.array(speed), **{**told, **{k: np.array(v) for k, v in columns.items()}}
    )


def test_the_fastest_that_fits_is_tried_first() -> None:
    points = candidates(tp=[1, 2, 4, 8])
    told = predictions([100, 90, 80, 70], room=[-1.0, 1.0, 1.0, 1.0])
    assert next_probe(points, told, [], []) == 1


def test_what_is_known_not_to_run_is_tried_last() -> None:
    points = candidates(tp=[1, 2])
    told = predictions([100, 1], runs=[0.0, 1.0])
    assert next_probe(points, told, [], []) == 1


def test_nothing_is_tried_twice() -> None:
    points = candidates(tp=[1, 2, 4, 8])
    told = predictions([100, 90, 80, 70])
    tried: list[int] = []
    for _ in range(4):
        tried.append(next_probe(points, told, tried, [50.0] * len(tried)))
    assert sorted(tried) == [0, 1, 2, 3]


def test_a_slow_probe_lowers_its_neighbours_more_than_others() -> None:
    points = candidates(tp=[1, 1, 8], micro_batch=[1, 2, 1])
    told = predictions([100, 99, 90])
    speed, spread = expected_speed(points, told, [0], [20.0])
    assert speed[0] == pytest.approx(20, rel=0.4)
    assert speed[1] / 99 < speed[2] / 90 < 1
    assert spread[0] < spread[1] < spread[2]
    assert next_probe(points, told, [0], [20.0]) == 2


def test_a_failure_warns_of_all_that_need_as_much_memory() -> None:
    points = candidates(tp=[1, 2, 4])
    told = predictions([100, 95, 60], room=[0.05, 0.04, 0.8])
    before = chance_to_run(points, told, [], [])
    after = chance_to_run(points, told, [0], [0.0])
    assert after[1] < before[1]
    assert after[2] > 0.85
    assert next_probe(points, told, [0], [0.0]) == 2


def test_a_run_that_fits_reassures() -> None:
    points = candidates(tp=[1, 2])
    told = predictions([100, 95], room=[0.0, 0.0])
    assert chance_to_run(points, told, [0], [90.0])[1] > chance_to_run(points, told, [], [])[1]
