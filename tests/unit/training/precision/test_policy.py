"""Ranges and the verdict on them, against what the formats really do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yunlu.training.precision.adaptive import POWERS, judge
from yunlu.training.precision.ranges import LOST_SHARE, FloatFormat, ValueRange, measure, read

FP16 = FloatFormat.of("fp16", torch.float16)


def range_of(values: torch.Tensor) -> ValueRange:
    return read({("m", "k"): [measure(values)]})["m", "k"]


def spread(size: float, *, count: int = 512, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=made, dtype=torch.float64).mul(size).float()


def test_the_formats_have_their_known_limits() -> None:
    assert FP16.largest == 65504
    assert FP16.lowest_power == -25
    assert FloatFormat.of("bf16", torch.bfloat16).lowest_power == -134


@given(st.integers(-60, 10), st.integers(-14, 24))
def test_what_is_said_to_vanish_does(size: int, power: int) -> None:
    values = spread(2.0**size)
    scaled = values.double() * 2.0**power
    lost = scaled.abs()[scaled.half() == 0].sum() / scaled.abs().sum()
    # A power of two is counted as one size: the share is right within that.
    assert range_of(values).lost_share(power, FP16) == pytest.approx(float(lost), abs=0.08)


@given(st.integers(-60, 20))
def test_the_band_is_where_nothing_overflows_and_little_vanishes(size: int) -> None:
    values = spread(2.0**size)
    span = range_of(values)
    lowest, highest = span.band(FP16)
    assert (values.double() * 2.0**highest).half().isfinite().all()
    assert not (values.double() * 2.0 ** (highest + 2)).half().isfinite().all()
    assert span.lost_share(lowest, FP16) <= LOST_SHARE
    assert span.lost_share(lowest - 1, FP16) > LOST_SHARE


def test_zeros_that_are_right_do_not_count() -> None:
    values = spread(1e-3)
    sparse = torch.cat([values, torch.zeros(100_000)])
    assert range_of(sparse).band(FP16)[0] == range_of(values).band(FP16)[0]
    nothing = range_of(torch.zeros(5))
    assert nothing.lost_share(0, FP16) == 0
    assert nothing.band(FP16)[0] < min(POWERS)


def test_several_tensors_are_one_range_and_infinities_show() -> None:
    both = read({("m", "k"): [measure(torch.tensor([1.0])), measure(torch.tensor([-8.0, 0.0]))]})
    assert both["m", "k"].top == 8
    assert sum(both["m", "k"].counts) == 3
    assert math.isinf(range_of(torch.tensor([1.0, math.inf])).top)
    assert math.isnan(range_of(torch.tensor([1.0, math.nan])).top)


def gradients(**sizes: float) -> dict[str, dict[str, ValueRange]]:
    """Modules with ordinary activations and gradients of these sizes, seen at scale 2**16."""
    calm = range_of(spread(1.0))
    return {
        name: {"outputs": calm, "weight gradients": range_of(spread(size * 2.0**16))}
        for name, size in sizes.items()
    }


def test_a_scale_that_suits_all_moves_no_one() -> None:
    ranges = gradients(a=1e-3, b=1e-6)
    verdict = judge(ranges, {"a": 1, "b": 1}, FP16, power=16, scales=True)
    assert verdict.power == 16
    assert verdict.unfit == {}
    assert verdict.judged == {"a", "b"}


@pytest.mark.parametrize(("size", "rises"), [(1e4, False), (1e-12, True)])
def test_what_another_scale_mends_is_left_to_the_scale(size: float, rises: bool) -> None:
    ranges = gradients(a=size, b=size)
    fixed = judge(ranges, {"a": 1, "b": 1}, FP16, power=16, scales=False)
    assert set(fixed.unfit) == {"a", "b"}
    verdict = judge(ranges, {"a": 1, "b": 1}, FP16, power=16, scales=True)
    assert verdict.unfit == {}
    assert (verdict.power > 16) is rises


def test_what_no_scale_can_hold_together_is_parted_so_that_most_stays_low() -> None:
    ranges = gradients(loud=1e3, quiet=1e-13, silent=1e-13)
    heavy_loud = judge(ranges, {"loud": 9, "quiet": 1, "silent": 1}, FP16, power=16, scales=True)
    assert set(heavy_loud.unfit) == {"quiet", "silent"}
    assert "vanish in fp16 at loss scale" in heavy_loud.unfit["quiet"]
    light_loud = judge(ranges, {"loud": 1, "quiet": 1, "silent": 1}, FP16, power=16, scales=True)
    assert set(light_loud.unfit) == {"loud"}
    assert "too much for fp16" in light_loud.unfit["loud"]


def test_activations_are_beyond_the_help_of_a_scale() -> None:
    for values, word in ((spread(1e5), "reach"), (spread(1e-9), "vanish")):
        ranges = {"m": {"outputs": range_of(values)}}
        verdict = judge(ranges, {"m": 1}, FP16, power=16, scales=True)
        assert verdict.power == 16
        assert word in verdict.unfit["m"]


def test_a_module_that_is_not_finite_is_not_judged() -> None:
    ranges = {"m": {"outputs": range_of(torch.tensor([math.nan]))}}
    verdict = judge(ranges, {"m": 1}, FP16, power=16, scales=True)
    assert verdict.judged == frozenset()
    assert verdict.unfit == {}
