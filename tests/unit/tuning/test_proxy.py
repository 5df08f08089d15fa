"""A narrow stand-in for a transformer, and what is carried over from it."""

from __future__ import annotations

from typing import Any

import pytest

from yunlu.core.errors import JobError
from yunlu.spec.job import Job
from yunlu.tuning.proxy import carry_over, check_fields, find_doubts, make_proxy


def job(args: dict[str, Any] | None = None, **parts: Any) -> Job:
    model = {"name": "transformer", "args": args or {}}
    given = {"task": "language-modeling", "model": model, "data": "synthetic:x"}
    return Job.model_validate({**given, **parts})


@pytest.mark.parametrize(
    ("args", "width", "expected"),
    [
        ({"width": 512, "heads": 8}, None, {"width": 128, "heads": 2}),
        ({}, None, {"width": 32, "heads": 1}),  # 128 wide, 4 heads
        ({"width": 256, "heads": 2}, None, {"width": 64, "heads": 2}),
        ({"width": 512, "heads": 8}, 64, {"width": 64, "heads": 1}),
        ({"width": 96, "heads": 3, "layers": 5}, 48, {"width": 48, "heads": 3, "layers": 5}),
    ],
)
def test_a_proxy_is_narrower_at_equal_depth(
    args: dict[str, Any], width: int | None, expected: dict[str, Any]
) -> None:
    target = job(args, layout="tp2", train={"batch": 7})
    proxy = make_proxy(target, width=width)
    assert proxy.model.args == expected
    assert proxy.train == target.train
    assert proxy.data == target.data
    assert proxy.layout.said_workers == 1


def test_what_was_found_comes_with_the_width_it_was_found_at() -> None:
    target = job({"width": 512, "heads": 8})
    found = carry_over({"train.optimizer.lr": 0.01}, make_proxy(target), target)
    assert found == {
        "train.optimizer.lr": 0.01,
        "model.args.mup_base": 128,
        "model.args.mup_heads": 2,
    }


def test_a_target_with_a_base_of_its_own_keeps_it() -> None:
    target = job({"width": 512, "heads": 8, "mup_base": 64})
    proxy = make_proxy(target)
    assert proxy.model.args["mup_base"] == 64
    assert carry_over({"train.batch": 8}, proxy, target) == {"train.batch": 8}


@pytest.mark.parametrize(
    ("parts", "width", "named"),
    [
        ({"task": "seq2seq"}, None, "no proxy"),
        ({"model": "hf:gpt2"}, None, "no proxy"),
        ({"model": {"name": "transformer", "adapter": "lora"}}, None, "from scratch"),
        ({"train": {"optimizer": "sgd"}}, None, "sgd"),
        ({}, 128, "narrower"),
        ({}, 0, "narrower"),
        ({}, 33, "divides neither"),
        ({"model": {"name": "transformer", "args": {"width": 32}}}, None, "small already"),
        ({"model": {"name": "transformer", "args": {"width": "wide"}}}, None, "no sizes"),
    ],
)
def test_what_has_no_proxy_is_refused(parts: dict[str, Any], width: int | None, named: str) -> None:
    given = {"task": "language-modeling", "model": "transformer", "data": "synthetic:x", **parts}
    with pytest.raises(JobError, match=named) as refused:
        make_proxy(Job.model_validate(given), width=width)
    assert refused.value.hint or named == "no sizes"


@pytest.mark.parametrize(
    "field", ["model.args.width", "model.args.mup_base", "layout.tp", "train.optimizer.name"]
)
def test_fields_that_hold_for_the_proxy_only_are_refused(field: str) -> None:
    with pytest.raises(JobError, match=field):
        check_fields(["train.optimizer.lr", field])


def test_what_may_not_carry_over_is_told() -> None:
    assert find_doubts(["train.optimizer.lr", "train.batch"]) == []
    [doubt] = find_doubts(["train.optimizer.lr", "model.args.dropout"])
    assert "model.args.dropout" in doubt
