from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from yunlu.core.errors import TrainingError
from yunlu.spec.train import GuardSpec
from yunlu.training.guard import Guard, StepVerdict, diverged

Curve = NDArray[np.float64]
STEPS = 5000

SHAPES = {
    "flat": np.ones_like,
    "language model": lambda t: 2 + 6 * np.exp(-t / 300) + 1.5 / (1 + t / 500),
    "cosine": lambda t: 0.05 + 2 * (1 + np.cos(np.pi * t / STEPS)),
    "towards zero": lambda t: 3 * np.exp(-t / 800) + 1e-4,
    "rising and falling": lambda t: 2 + np.sin(t / 100),
}
NOISES = {
    "smooth": lambda r: np.exp(0.001 * r.normal(size=STEPS)),
    "normal": lambda r: np.exp(0.05 * r.normal(size=STEPS)),
    "wide": lambda r: np.clip(1 + 0.3 * r.normal(size=STEPS), 0.01, None),
    "skewed": lambda r: np.exp(0.5 * r.normal(size=STEPS)),
    "exponential": lambda r: r.exponential(size=STEPS),
    "heavy tails": lambda r: 1 + 0.05 * r.standard_t(5, size=STEPS),
    "two sided": lambda r: 1 + 0.2 * r.laplace(size=STEPS),
    "of two kinds": lambda r: (
        np.where(r.random(STEPS) < 0.2, 3, 1) * np.exp(0.1 * r.normal(size=STEPS))
    ),
}


def make(*, skips: int = 3, rollbacks: int = 3, spikes: float | None = 10.0) -> Guard:
    return Guard(GuardSpec(skips=skips, rollbacks=rollbacks, spikes=spikes))


def judge(guard: Guard, losses: Curve | list[float], first: int = 0) -> list[StepVerdict]:
    return [guard.judge(first + i, float(loss), 1.0, False) for i, loss in enumerate(losses)]


def actions(verdicts: list[StepVerdict]) -> list[str]:
    return [verdict.action for verdict in verdicts]


def healthy(count: int, level: float = 3.0, seed: int = 0) -> list[float]:
    return (level + 0.1 * np.random.default_rng(seed).normal(size=count)).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(sorted(NOISES)),
    st.floats(1e-3, 1e3),
    st.integers(0, 9),
)
def test_a_healthy_curve_triggers_nothing(shape: str, noise: str, scale: float, seed: int) -> None:
    steps = np.arange(STEPS, dtype=float)
    curve = scale * SHAPES[shape](steps) * NOISES[noise](np.random.default_rng(seed))
    assert set(actions(judge(make(), curve))) == {"good"}


def test_losses_below_zero_are_healthy_too() -> None:
    curve = np.array(healthy(1000)) - np.linspace(0, 10, 1000)
    assert set(actions(judge(make(), curve))) == {"good"}


@given(
    st.lists(st.sampled_from([1.0, 2.0, 50.0, math.nan, math.inf, -math.inf]), max_size=80),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_loss_that_is_not_finite_is_never_good(
    losses: list[float], overflow: bool, skips: int, rollbacks: int
) -> None:
    guard = make(skips=skips, rollbacks=rollbacks)
    for step, loss in enumerate(losses):
        verdict = guard.judge(step, loss, loss, overflow)
        if not math.isfinite(loss):
            assert verdict.action != "good"
            assert verdict.reason == "not finite"
        if verdict.action == "rollback":
            guard.rolled_back(0)


def test_an_overflow_that_the_scaler_deals_with_is_not_bad() -> None:
    guard = make()
    assert guard.judge(0, 1.0, math.inf, True).action == "good"
    assert guard.judge(1, 1.0, math.nan, True).action == "good"
    assert guard.judge(2, 1.0, math.inf, False) == StepVerdict("skip", "not finite")
    assert guard.judge(3, math.nan, 1.0, True) == StepVerdict("skip", "not finite")
    assert guard.bad_steps == {2, 3}


@pytest.mark.parametrize("height", [6.0, 8.0, 100.0])
def test_a_spike_is_left_out_and_training_goes_on(height: float) -> None:
    guard = make()
    verdicts = judge(guard, [*healthy(200), height, *healthy(50)])
    assert verdicts[200] == StepVerdict("skip", "spike")
    assert actions(verdicts).count("good") == 250
    assert guard.bad_steps == {200}


def test_spikes_are_not_looked_for_where_the_job_says_so_or_too_little_is_known() -> None:
    assert actions(judge(make(spikes=None), [*healthy(200), 1000.0])).count("good") == 201
    assert actions(judge(make(), [*healthy(40), 1000.0])).count("good") == 41


def test_outliers_that_keep_coming_are_not_left_out_for_ever() -> None:
    curve = np.array(healthy(STEPS))
    curve[::50] = 30.0  # one batch in fifty is of another kind
    assert actions(judge(make(), curve[1:])).count("skip") <= 2


def test_a_burst_is_skipped_as_long_as_the_job_allows() -> None:
    guard = make(skips=3)
    verdicts = judge(guard, [*healthy(10), *[math.nan] * 3, *healthy(10)])
    assert actions(verdicts)[10:13] == ["skip"] * 3
    assert set(actions(verdicts)[13:]) == {"good"}


def test_a_longer_burst_rolls_back_past_the_bad_steps_and_some_before() -> None:
    guard = make(skips=3)
    verdicts = judge(guard, [*healthy(100), *[math.nan] * 4])
    assert verdicts[-1] == StepVerdict("rollback", "not finite", no_later_than=96)
    assert guard.bad_steps == set(range(96, 104))


def test_each_rollback_reaches_further_back_until_the_run_fails() -> None:
    guard = make(skips=1, rollbacks=2)
    judge(guard, healthy(200))
    assert judge(guard, [math.nan] * 2, 200)[-1] == StepVerdict("rollback", "not finite", 198)
    guard.rolled_back(150)
    assert judge(guard, [math.nan] * 2, 202)[-1] == StepVerdict("rollback", "not finite", 190)
    guard.rolled_back(150)
    assert judge(guard, [math.nan] * 2, 204)[-1] == StepVerdict("fail", "not finite")


@pytest.mark.parametrize(("skips", "rollbacks", "last"), [(0, 1, "rollback"), (0, 0, "fail")])
def test_a_job_may_allow_nothing(skips: int, rollbacks: int, last: str) -> None:
    assert actions(judge(make(skips=skips, rollbacks=rollbacks), [math.nan])) == [last]


def test_a_level_that_lasts_is_accepted_after_one_rollback_and_never_fails() -> None:
    guard = make(skips=3)
    step, rolled_back, seen = 0, 0, []
    while step < 2000:
        if step not in guard.bad_steps:
            verdict = guard.judge(
                step, healthy(1, 3.0 if step < 500 else 30.0, step)[0], 1.0, False
            )
            seen.append(verdict.action)
            if verdict.action == "rollback":
                rolled_back, step = rolled_back + 1, 400
                guard.rolled_back(400)
                continue
        step += 1
    assert rolled_back == 1
    assert seen.count("skip") == 6
    assert set(seen[-1400:]) == {"good"}


def test_spikes_never_end_a_run_that_may_not_roll_back() -> None:
    verdicts = judge(make(skips=2, rollbacks=0), [*healthy(300), *healthy(300, 50.0)])
    assert actions(verdicts)[300:303] == ["skip", "skip", "good"]
    assert set(actions(verdicts)[303:]) == {"good"}


def live(losses: list[float], guard: Guard, step: int, until: int, every: int) -> list[str]:
    """A run with checkpoints: every verdict, as an engine would meet them."""
    saved, story = (step, guard.state()), []
    while step < until:
        if step not in guard.bad_steps:
            verdict = guard.judge(step, losses[step], 1.0, False)
            story.append(f"{step} {verdict}")
            if verdict.action == "rollback":
                step = saved[0]
                guard.rolled_back(step)
                continue
        step += 1
        if step % every == 0:
            saved = step, guard.state()
    return story


@pytest.mark.parametrize("stop", [100, 300, 350, 400, 450, 500])
def test_a_resumed_run_judges_as_an_uninterrupted_one(stop: int) -> None:
    losses = healthy(600)
    losses[120] = 20.0
    losses[330:340] = [math.nan] * 10
    losses[349:351] = [40.0, math.nan]  # a streak that a checkpoint cuts in two
    losses[420:430] = [25.0] * 10
    whole = make()
    story = live(losses, whole, 0, 600, 50)
    first, second = make(), make()
    told = live(losses, first, 0, stop, 50)
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    told += live(losses, second, stop, 600, 50)
    assert told == story
    assert second.state() == whole.state()


def test_after_a_rollback_only_what_was_known_then_is_known() -> None:
    guard, fresh = make(), make()
    judge(guard, healthy(120))
    judge(fresh, healthy(80))
    guard.rolled_back(80)
    assert guard.state() == fresh.state()


def test_the_error_says_what_is_not_finite_and_what_to_do() -> None:
    error = diverged(7, math.nan, 1.0, 0.01)
    assert isinstance(error, TrainingError)
    assert "The loss is not finite at step 7" in error.message
    assert "gradient is not finite" in diverged(7, 1.0, math.inf, 0.01).message
    assert error.hint is not None
    assert "train.optimizer.lr" in error.hint
