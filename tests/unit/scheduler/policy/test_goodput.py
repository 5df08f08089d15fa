"""Useful samples a second, and the batch that gives most of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.scheduler.policy.fitting import fit_residuals
from yunlu.scheduler.policy.goodput import (
    BatchLimits,
    FittedSpeed,
    GradientNoise,
    ShapeList,
    Throughput,
    compute_goodputs,
)

THROUGHPUT = Throughput(0.05, 0.002, 0.2, 0.01, 0.02, 0.003, 2.0)
LIMITS = BatchLimits(base=128, most=4096, local_least=32, local_most=512)
SPEED = FittedSpeed(throughputs={"t4": THROUGHPUT}, limits=LIMITS, noise=GradientNoise(1.0, 8.0))


def by_hand(nodes: int, devices: int, local: int, accumulation: int) -> float:
    """The formulas of Pollux, written down once more."""
    gradient = 0.05 + 0.002 * local
    more = max(devices - 2, 0)
    summing = 0.0
    if devices > 1:
        summing = 0.02 + 0.003 * more if nodes == 1 else 0.2 + 0.01 * more
    step = accumulation * gradient + (gradient**2 + summing**2) ** 0.5
    total = devices * local * (accumulation + 1)
    scale = 128 * 8.0 / 1.0
    return total / step * (scale + 128) / (scale + total)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)])
def test_goodput_is_that_of_the_batch_it_chooses(nodes: int, devices: int) -> None:
    told = SPEED.goodput("t4", np.array([nodes]), np.array([devices]))[0]
    batch = SPEED.choose_batch("t4", nodes, devices)
    assert told == pytest.approx(by_hand(nodes, devices, batch.local, batch.accumulation))


def test_no_other_batch_is_much_better() -> None:
    told = SPEED.goodput("t4", np.array([1]), np.array([4]))[0]
    best = max(by_hand(1, 4, local, 0) for local in range(32, 513))
    assert told <= best + 1e-9
    assert told >= 0.995 * best


@given(st.integers(1, 64), st.floats(1e-3, 1e3), st.floats(0, 1e3))
@settings(max_examples=60, deadline=None)
def test_batches_stay_within_the_limits(devices: int, sqr: float, var: float) -> None:
    speed = FittedSpeed(
        throughputs={"t4": THROUGHPUT}, limits=LIMITS, noise=GradientNoise(sqr, var)
    )
    nodes = -(-devices // 4)
    batch = speed.choose_batch("t4", nodes, devices)
    assert 1 <= batch.local <= LIMITS.local_most
    assert batch.total(devices) <= LIMITS.most
    if devices == 1 and batch.total(1) > LIMITS.base:
        assert batch.accumulation >= 1  # or its noise could not be measured


def test_noisier_gradients_are_worth_larger_batches() -> None:
    quiet = FittedSpeed(
        throughputs={"t4": THROUGHPUT}, limits=LIMITS, noise=GradientNoise(1.0, 0.1)
    )
    loud = FittedSpeed(
        throughputs={"t4": THROUGHPUT}, limits=LIMITS, noise=GradientNoise(1.0, 100.0)
    )
    assert loud.choose_batch("t4", 1, 4).total(4) > quiet.choose_batch("t4", 1, 4).total(4)


def test_too_many_devices_for_the_smallest_local_batch_are_of_no_use() -> None:
    told = SPEED.goodput("t4", np.array([16, 64]), np.array([128, 256]))
    assert told[0] > 0
    assert told[1] == 0


def test_nothing_is_promised_beyond_what_was_explored() -> None:
    speed = FittedSpeed(throughputs={"t4": THROUGHPUT}, limits=LIMITS, max_devices=4)
    assert speed.goodput("t4", np.array([1, 2]), np.array([4, 8])).tolist()[1] == 0


def test_a_fixed_batch_is_kept() -> None:
    limits = BatchLimits(base=128, most=4096, local_least=32, local_most=512, fixed=1024)
    speed = FittedSpeed(
        throughputs={"t4": THROUGHPUT}, limits=limits, noise=GradientNoise(1.0, 8.0)
    )
    assert speed.choose_batch("t4", 1, 4).total(4) == 1024
    assert speed.goodput("t4", np.array([16]), np.array([64]))[0] == 0


def test_what_was_measured_is_believed_more_than_the_formula() -> None:
    local = np.array([32.0, 64.0, 128.0, 256.0, 512.0])
    ones = np.ones(5, dtype=np.int64)
    twice = fit_residuals(ones, 4 * ones, local, np.log(2.0) * ones)
    slow = Throughput(0.05, 0.002, 0.2, 0.01, 0.02, 0.003, 2.0, measured=twice)
    speed = FittedSpeed(throughputs={"t4": slow}, limits=LIMITS, noise=GradientNoise(1.0, 8.0))
    shapes = np.array([1, 1]), np.array([3, 4])
    ratio = speed.goodput("t4", *shapes) / SPEED.goodput("t4", *shapes)
    assert ratio == pytest.approx(
        [0.5, 0.5], rel=0.1
    )  # nor is a neighbour better for being unknown


def test_many_jobs_at_once_are_told_as_one_by_one() -> None:
    speeds = [
        FittedSpeed(throughputs={"t4": THROUGHPUT}, limits=LIMITS, noise=GradientNoise(1.0, var))
        for var in (0.5, 5.0, 50.0)
    ] + [FittedSpeed(throughputs={}, limits=LIMITS, max_devices=2)]
    shapes = ShapeList((1, 1, 1, 2), (1, 2, 4, 8))
    together = compute_goodputs(speeds, "t4", shapes)
    alone = [s.goodput("t4", np.array(shapes.nodes), np.array(shapes.devices)) for s in speeds]
    assert np.array_equal(together, np.array(alone))
    assert together[3].tolist() == [1.0, 2.0, 0.0, 0.0]  # never seen: as if it scaled perfectly
