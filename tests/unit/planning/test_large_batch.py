from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.large_batch import (
    Rule,
    count_steps,
    efficiency,
    phases_of,
    scale_rate,
    scaling_reason,
    warmup_steps_for,
)
from yunlu.spec.train import GrowBatchSpec

rules = st.sampled_from(("none", "linear", "sqrt"))
batches = st.integers(1, 100_000)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_sixteen_times_the_batch_scales_the_rate_by_its_rule(rule: Rule, rate: float) -> None:
    assert scale_rate(0.1, batch=512, base_batch=32, rule=rule) == pytest.approx(rate)


@given(rules, batches, batches, batches)
def test_scaling_twice_is_scaling_once(rule: Rule, first: int, second: int, third: int) -> None:
    halfway = scale_rate(0.1, batch=second, base_batch=first, rule=rule)
    there = scale_rate(halfway, batch=third, base_batch=second, rule=rule)
    assert there == pytest.approx(scale_rate(0.1, batch=third, base_batch=first, rule=rule))


def test_the_reason_names_both_batches_and_is_empty_where_nothing_is_scaled() -> None:
    reason = scaling_reason(0.1, batch=512, base_batch=32, rule="linear")
    assert "0.1 at batch 32, now 512" in reason
    assert "Goyal" in reason
    assert scaling_reason(0.1, batch=32, base_batch=32, rule="linear") == ""
    assert scaling_reason(0.1, batch=512, base_batch=32, rule="none") == ""


def test_linear_scaling_warms_up_for_five_epochs_of_a_long_run() -> None:
    steps, reason = warmup_steps_for(
        steps=90 * 156, steps_per_epoch=156, batch=8192, base_batch=256, rule="linear"
    )
    assert steps == 5 * 156
    assert "5 epochs" in reason


def test_square_root_scaling_warms_up_for_the_steps_of_the_base_batch() -> None:
    steps, _ = warmup_steps_for(
        steps=3000, steps_per_epoch=100, batch=64, base_batch=32, rule="sqrt"
    )
    assert steps == 300  # 5 % of the 6000 steps that batch 32 would take


@given(st.integers(1, 10**6), st.integers(1, 10**4), batches, batches, rules)
def test_a_warm_up_is_a_fifth_of_the_run_at_most_and_never_shorter_than_usual(
    steps: int, per_epoch: int, batch: int, base: int, rule: Rule
) -> None:
    warmup, reason = warmup_steps_for(
        steps=steps, steps_per_epoch=per_epoch, batch=batch, base_batch=base, rule=rule
    )
    usual = min(500, round(0.05 * steps))
    assert usual <= warmup <= round(0.2 * steps)
    assert reason
    if rule == "none" or batch <= base:
        assert warmup == usual


@given(st.floats(0, 1e9), batches, batches)
def test_a_larger_batch_learns_less_from_a_sample_but_never_less_from_a_step(
    noise: float, first: int, second: int
) -> None:
    base, batch = sorted((first, second))
    share = efficiency(noise, batch, base)
    assert share <= 1 + 1e-12
    assert share * batch >= base * (1 - 1e-12)


def test_without_noise_a_larger_batch_gains_nothing_and_with_much_it_loses_nothing() -> None:
    assert efficiency(0.0, 64, 32) == pytest.approx(0.5)
    assert efficiency(1e12, 64, 32) == pytest.approx(1.0)


def test_the_batch_doubles_every_so_many_epochs_up_to_the_limit() -> None:
    spec = GrowBatchSpec(every=3, limit=100)
    assert phases_of(spec, 32, 10_000, 20) == ((0, 32), (3, 64), (6, 100))
    assert phases_of(spec, 32, 10_000, 6) == ((0, 32), (3, 64))
    assert phases_of(spec, 32, 50, math.inf) == ((0, 32), (3, 50))
    assert phases_of(None, 32, 10_000, 20) == ((0, 32),)


specs = st.builds(
    GrowBatchSpec,
    every=st.integers(1, 9),
    factor=st.integers(1, 5),
    limit=st.none() | st.integers(1, 5000),
)


@given(specs, st.integers(1, 300), st.integers(0, 5000), st.floats(0.1, 50))
def test_phases_grow_within_their_bounds(
    spec: GrowBatchSpec, batch: int, more: int, epochs: float
) -> None:
    samples = batch + more
    phases = phases_of(spec, batch, samples, epochs)
    firsts, sizes = zip(*phases, strict=True)
    assert phases[0] == (0, batch)
    assert list(firsts) == [spec.every * number for number in range(len(phases))]
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] <= max(batch, min(spec.limit or samples, samples))
    assert all(first < epochs for first in firsts[1:])


@given(st.integers(1, 1000), st.floats(0.01, 100))
def test_one_phase_takes_the_steps_of_a_constant_batch(per_epoch: int, epochs: float) -> None:
    assert count_steps([(0, per_epoch)], epochs) == max(1, round(epochs * per_epoch))
