"""Settings become rows of [0, 1] and come back the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.tuning.encoding import ABSENT, Encoder
from yunlu.tuning.values import Dimension

if TYPE_CHECKING:
    from yunlu.tuning.values import Params

RATE = Dimension(name="optimizer.rate", low=1e-5, high=1e-1, log=True)
MOMENTUM = Dimension(name="optimizer.momentum", low=0.1, high=0.99)
LAYERS = Dimension(name="model.layers", low=1, high=5, is_int=True)
UNITS = Dimension(name="model.units", low=64, high=1024, log=True, is_int=True)
DROPOUT = Dimension(name="model.dropout", low=0.0, high=0.5, step=0.1)
BATCH = Dimension(name="train.batch", choices=(64, 16, 32))
KIND = Dimension(name="optimizer.name", choices=("sgd", "adam", "lion"))
NESTEROV = Dimension(
    name="optimizer.nesterov", choices=(True, False), when={"optimizer.name": ("sgd",)}
)
DEPTH_RATE = Dimension(name="model.skip", low=0.0, high=1.0, when={"model.layers": (4, 5)})
ALL = (RATE, MOMENTUM, LAYERS, UNITS, DROPOUT, BATCH, KIND, NESTEROV, DEPTH_RATE)


@given(seed=st.integers(0, 2**32 - 1))
def test_settings_come_back_from_their_rows(seed: int) -> None:
    encoder = Encoder(ALL)
    for params in encoder.sample(np.random.default_rng(seed), 4):
        row = encoder.encode([params])[0]
        assert ((row >= 0.0) & (row <= 1.0)).all()
        assert _rounded(encoder.decode(row)) == _rounded(params)


@given(seed=st.integers(0, 2**32 - 1))
def test_every_row_is_a_setting_within_the_bounds(seed: int) -> None:
    encoder = Encoder(ALL)
    rng = np.random.default_rng(seed)
    for units in rng.choice([0.0, 1.0, rng.random()], size=(8, len(ALL))):
        params = encoder.to_params(units)
        assert 1e-5 <= _number(params, "optimizer.rate") <= 1e-1
        assert params["model.layers"] in {1, 2, 3, 4, 5}
        assert 64 <= _number(params, "model.units") <= 1024
        assert isinstance(params["model.units"], int)
        tenths = _number(params, "model.dropout") * 10
        assert tenths == pytest.approx(round(tenths))
        assert ("optimizer.nesterov" in params) == (params["optimizer.name"] == "sgd")
        assert ("model.skip" in params) == (params["model.layers"] in {4, 5})


def test_what_does_not_exist_makes_no_difference() -> None:
    encoder = Encoder((KIND, NESTEROV))
    units = np.array([[0.5, 0.1], [0.5, 0.9]])
    first, second = encoder.featurize(units)
    assert encoder.to_params(units[0]) == {"optimizer.name": "adam"}
    assert (first == second).all()
    assert first.tolist() == [0.0, 1.0, 0.0, ABSENT]


def test_conditions_on_what_does_not_exist_do_not_hold() -> None:
    outer = Dimension(name="a", choices=("x", "y"))
    middle = Dimension(name="b", choices=("x", "y"), when={"a": ("x",)})
    inner = Dimension(name="c", low=0.0, high=1.0, when={"b": ("x",)})
    assert Encoder((inner, middle, outer)).to_params(np.array([0.3, 0.1, 0.9])) == {"a": "y"}


def test_choices_that_are_numbers_keep_their_order() -> None:
    rows = Encoder((BATCH,)).encode([{"train.batch": n} for n in (16, 32, 64)])
    assert rows[:, 0].tolist() == [0.0, 0.5, 1.0]


def test_true_is_not_one() -> None:
    encoder = Encoder((Dimension(name="a", choices=(1, True, "x")),))
    for value in (1, True, "x"):
        back = encoder.decode(encoder.encode([{"a": value}])[0])["a"]
        assert back == value
        assert type(back) is type(value)


def test_numbers_of_a_grid_are_equally_likely() -> None:
    drawn = Encoder((LAYERS,)).sample(np.random.default_rng(0), 5000)
    counts = np.bincount([int(_number(params, "model.layers")) for params in drawn])[1:]
    assert counts.min() > 900


def test_a_dimension_of_one_value_has_that_value() -> None:
    encoder = Encoder((Dimension(name="a", low=3, high=3, is_int=True), MOMENTUM))
    params = encoder.sample(np.random.default_rng(0), 1)[0]
    assert params["a"] == 3
    assert np.isfinite(encoder.encode([params])).all()


def test_beliefs_draw_settings_to_them() -> None:
    sure = Dimension(name="rate", low=1e-5, high=1e-1, log=True, likely=(-3.0, 0.2))
    encoder = Encoder((sure, MOMENTUM))
    for drawn in (encoder.sample(np.random.default_rng(0), 256), encoder.sobol(256, seed=0)):
        logs = np.log10([_number(params, "rate") for params in drawn])
        assert logs.mean() == pytest.approx(-3.0, abs=0.05)
        assert logs.std() == pytest.approx(0.2, abs=0.05)
    believed = encoder.prior_score(encoder.locate([{"rate": 1e-3}, {"rate": 10**-3.2}]))
    assert believed == pytest.approx([0.0, -0.5])


def test_beliefs_outside_the_bounds_end_at_them() -> None:
    far = Dimension(name="rate", low=1e-5, high=1e-1, log=True, likely=(4.0, 0.1))
    drawn = Encoder((far,)).sample(np.random.default_rng(0), 8)
    assert [params["rate"] for params in drawn] == pytest.approx([1e-1] * 8)


def test_sobol_fills_every_part_of_the_space() -> None:
    encoder = Encoder((MOMENTUM, RATE))
    cells = {tuple((row * 4).astype(int)) for row in encoder.sobol_units(16, seed=3)}
    assert len(cells) == 16
    assert encoder.sobol(5, seed=3) == encoder.sobol(16, seed=3)[:5]


def test_unknown_values_stand_in_the_middle() -> None:
    units = Encoder((KIND, RATE)).locate([{"optimizer.name": "gone", "optimizer.rate": "many"}])
    assert (units == ABSENT).all()


def _number(params: Params, name: str) -> float:
    value = params[name]
    assert isinstance(value, int | float)
    return value


def _rounded(params: Params) -> Params:
    return {
        name: float(f"{value:.9g}") if isinstance(value, float) else value
        for name, value in params.items()
    }
