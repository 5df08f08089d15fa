"""Published rules for rate and batch, and moving them by small runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.hyperparameter_transfer import (
    DEEPSEEK,
    STEP_LAW,
    Observed,
    RateAndBatch,
    TransferScale,
    advise,
    fit_shift,
    why_no_rule,
)
from yunlu.spec.job import Job

SMALL = TransferScale(parameters=2e8, tokens=4e9)
LARGE = TransferScale(parameters=1e9, tokens=5e10)


def job(**parts: Any) -> Job:
    return Job.model_validate(
        {"task": "language-modeling", "model": "transformer", "data": "synthetic:x", **parts}
    )


def test_the_rules_say_what_their_papers_report() -> None:
    # DeepSeek-AI 2024, table 2: 7 G weights, 2 T tokens: 4.2e-4 and 2,304 sequences of 4,096 tokens.
    deepseek = DEEPSEEK.at(TransferScale(parameters=7e9, tokens=2e12))
    assert deepseek.lr == pytest.approx(4.2e-4, rel=0.02)
    assert deepseek.batch_tokens == pytest.approx(2304 * 4096, rel=0.05)


def test_step_law_is_the_published_formula() -> None:
    # Li et al. 2025, https://arxiv.org/abs/2503.04715, equation 1.
    for scale in (SMALL, LARGE):
        told = STEP_LAW.at(scale)
        lr = 1.79 * scale.parameters**-0.713 * scale.tokens**0.307
        assert told.lr == pytest.approx(lr, rel=1e-3)
        assert told.batch_tokens == pytest.approx(0.58 * scale.tokens**0.571, rel=1e-3)


def bowl(
    shift: tuple[float, float], scale: TransferScale, *, curvature: tuple[float, float]
) -> Any:
    """Losses of a training whose best rate and batch lie so many octaves from the rule's."""

    def observe(x: float, y: float) -> Observed:
        told = STEP_LAW.at(scale)
        above = curvature[0] * (x - shift[0]) ** 2 + curvature[1] * (y - shift[1]) ** 2
        return Observed(
            scale=scale,
            setting=RateAndBatch(lr=told.lr * 2**x, batch_tokens=told.batch_tokens * 2**y),
            loss=2.5 * math.exp(above / 200),
        )

    return observe


CROSS = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)]


@given(x=st.floats(-1, 1), y=st.floats(-1, 1))
def test_nine_runs_find_where_the_ground_of_a_bowl_is(x: float, y: float) -> None:
    observe = bowl((x, y), SMALL, curvature=(0.8, 0.6))
    found = fit_shift(observe(*place) for place in CROSS)
    # Drawn to the usual curvature, which couples rate and batch a little.
    assert found.lr == pytest.approx(x, abs=0.35)
    assert found.batch == pytest.approx(y, abs=0.35)


def test_two_scales_are_laid_through_one_bowl() -> None:
    runs = [
        bowl((0.5, -0.5), scale, curvature=(0.8, 0.6))(*place)
        for scale in (SMALL, TransferScale(parameters=2e8, tokens=1e10))
        for place in CROSS
    ]
    found = fit_shift(runs)
    assert (found.lr, found.batch) == (
        pytest.approx(0.5, abs=0.2),
        pytest.approx(-0.5, abs=0.2),
    )


def test_runs_that_diverged_are_left_out() -> None:
    observe = bowl((0.0, 0.0), SMALL, curvature=(0.8, 0.6))
    runs = [observe(*place) for place in CROSS]
    wild = Observed(scale=SMALL, setting=runs[1].setting, loss=math.inf)
    lost = Observed(scale=SMALL, setting=runs[3].setting, loss=9.0)
    found = fit_shift([*runs, wild, lost])
    assert abs(found.lr) < 0.1
    assert abs(found.batch) < 0.1


def test_no_runs_leave_the_rule_as_published() -> None:
    assert STEP_LAW.at(LARGE, fit_shift([])) == STEP_LAW.at(LARGE)


def test_each_scale_gets_the_rule_that_was_fitted_on_its_like() -> None:
    found = advise(job(), LARGE)
    assert found is not None
    assert found.rule is STEP_LAW
    assert "arXiv 2503.04715" in found.reason
    huge = advise(job(), TransferScale(parameters=7e9, tokens=2e12))
    assert huge is not None
    assert huge.rule is DEEPSEEK
    assert advise(job(), TransferScale(parameters=8e5, tokens=1e6)) is None


def test_a_batch_that_is_chosen_already_gets_its_own_rate() -> None:
    best = advise(job(), LARGE)
    assert best is not None
    same = advise(job(), LARGE, batch_tokens=best.setting.batch_tokens)
    small = advise(job(), LARGE, batch_tokens=best.setting.batch_tokens / 16)
    assert same is not None
    assert small is not None
    assert same.setting.lr == pytest.approx(best.setting.lr)
    assert small.setting.lr == pytest.approx(best.setting.lr * 16**-0.3)
    assert "batches of 745.7k (best: 745.7k)" in same.reason


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"task": "text-classification"}, "language models"),
        ({"model": "hf:gpt2"}, "from scratch"),
        ({"model": {"name": "transformer", "adapter": "lora"}}, "from scratch"),
        ({"model": "module:Class"}, "transformers"),
        ({"train": {"optimizer": "sgd"}}, "Adam"),
        ({"model": {"name": "transformer", "args": {"mup_base": 64}}}, "base width"),
        ({"model": {"name": "hf:gpt2", "pretrained": False}}, ""),
    ],
)
def test_jobs_of_another_kind_get_no_rule(parts: dict[str, Any], why: str) -> None:
    asked = job(**parts)
    assert why in why_no_rule(asked)
    assert bool(why_no_rule(asked)) == (advise(asked, LARGE) is None) == bool(why)
