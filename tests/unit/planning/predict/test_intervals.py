"""Intervals hold what they say, and grow where less is known; trees survive the trip to JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planning.predict.test_time import points
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.intervals import (
    Forest,
    correct,
    feature_table,
    make_spread,
    read_correction,
    read_spread,
    shipped_correction,
    shipped_spread,
    spread_factors,
    write_correction,
    write_spread,
)
from yunlu.planning.predict.step_time import step_time

COLD = (-0.5, 0.4)


def spread_of(errors: np.ndarray, stack: str = "yunlu", models: int = 100):
    layers = 1.0 + np.arange(len(errors)) % models
    asked = points(len(errors), stack=STACKS.index(stack)).with_columns(layers=layers)
    return make_spread(errors, asked, COLD)


def test_eight_of_ten_lie_inside() -> None:
    generator = np.random.default_rng(0)
    spread = spread_of(generator.normal(0.0, 0.1, 4000))
    low, high = spread_factors(points(stack=STACKS.index("yunlu")), spread)
    fresh = generator.normal(0.0, 0.1, 4000)
    inside = np.mean((fresh > np.log(low)) & (fresh < np.log(high)))
    assert 0.77 < inside < 0.84


def test_few_rows_are_drawn_towards_a_cold_start() -> None:
    few, many = (spread_of(np.linspace(-0.02, 0.02, count)) for count in (5, 500))
    place = STACKS.index("yunlu")
    assert few.low[place, 0] < many.low[place, 0] < 0 < many.high[place, 0] < few.high[place, 0]


def test_one_or_two_models_say_no_more_than_a_cold_start() -> None:
    errors = np.random.default_rng(0).normal(0.0, 0.01, 600)
    place = STACKS.index("yunlu")
    two, three = (spread_of(errors, models=count) for count in (2, 3))
    assert (two.low[place, 0], two.high[place, 0]) == COLD
    assert COLD[0] < three.low[place, 0] < three.high[place, 0] < COLD[1]


def test_stacks_without_rows_have_quantiles_of_their_own() -> None:
    asked = points(20, stack=STACKS.index("yunlu"))
    spread = make_spread(np.linspace(-0.1, 0.1, 20), asked, COLD, unknown=(-0.9, 0.8))
    place = STACKS.index("unknown")
    assert (spread.low[place, 1], spread.high[place, 1]) == (-0.9, 0.8)


def test_few_models_tell_less_however_many_their_rows() -> None:
    errors = np.random.default_rng(0).normal(0.0, 0.1, 600)
    place = STACKS.index("yunlu")
    widths = [
        spread.high[place, 0] - spread.low[place, 0]
        for spread in (spread_of(errors, models=count) for count in (1, 3, 100))
    ]
    assert widths[0] > 1.1 * widths[1] > 1.1 * widths[2]


def test_a_model_with_experts_is_no_surer_than_those_seen() -> None:
    spread = replace(spread_of(np.linspace(-0.02, 0.02, 500)), experts=(-0.3, 0.2))
    dense = points(stack=STACKS.index("yunlu"))
    routed = dense.with_columns(experts=8.0)
    low, high = spread_factors(routed, spread)
    assert (np.log(low[0]), np.log(high[0])) == pytest.approx((-0.3, 0.2))
    assert spread_factors(dense, spread)[0][0] > low[0]


def test_an_unseen_stack_is_as_a_cold_start() -> None:
    low, high = spread_factors(points(), spread_of(np.zeros(9)))
    assert (np.log(low[0]), np.log(high[0])) == pytest.approx(COLD)


def test_more_devices_than_ever_seen_are_less_sure() -> None:
    few, many = points(dp=512.0), points(dp=8192.0)
    spread = shipped_spread()
    (low, high), (lower, higher) = spread_factors(few, spread), spread_factors(many, spread)
    assert lower[0] < low[0]
    assert higher[0] > high[0]


def test_spread_survives_json() -> None:
    spread = spread_of(np.linspace(-0.1, 0.2, 30))
    again = read_spread(json.loads(json.dumps(write_spread(spread))))
    assert np.allclose(again.low, spread.low, atol=1e-4)
    assert np.allclose(again.high, spread.high, atol=1e-4)
    assert again.experts == pytest.approx(spread.experts, abs=1e-4)


def forest() -> Forest:
    """Depth 2: on the first feature, then on the second."""
    return Forest(
        0.5,
        np.array([[0, 1, 1]]),
        np.array([[0.0, -1.0, 1.0]]),
        np.array([[1.0, 2.0, 3.0, 4.0]]),
    )


@pytest.mark.parametrize(
    ("features", "value"),
    [((-1, -2), 1.5), ((-1, 0), 2.5), ((1, 0), 3.5), ((1, 2), 4.5), ((0, -1), 1.5)],
)
def test_a_tree_goes_left_up_to_its_threshold(features, value) -> None:
    assert forest().evaluate(np.array([features], dtype=float))[0] == value


def test_trees_survive_json() -> None:
    place = STACKS.index("yunlu")
    again = read_correction(json.loads(json.dumps(write_correction({place: forest()}))))
    table = np.random.default_rng(0).normal(size=(50, 2))
    assert np.array_equal(again[place].evaluate(table), forest().evaluate(table))


def test_only_the_stack_with_trees_is_corrected() -> None:
    both = points(2, stack=[STACKS.index("yunlu"), STACKS.index("unknown")])
    time = step_time(both)
    factor = correct(both, time, {STACKS.index("yunlu"): forest()})
    assert factor[0] != 1.0
    assert factor[1] == 1.0


def test_shipped_trees_look_at_features_there_are() -> None:
    width = feature_table(points(), step_time(points())).shape[1]
    for stack, trees in shipped_correction().items():
        assert trees.feature.max() < width, STACKS[stack]
        assert np.abs(trees.leaf.sum(axis=0)).max() < 5
