"""What the benchmark of communication makes of its runs, and the text that it trains on."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from itertools import pairwise

import pytest
from benchmarks.comm import _list_cases
from benchmarks.comm_parts.figures import (
    bound_s,
    judge_sums,
    judge_training,
    loss_at,
    make_sum_tables,
    make_training_tables,
    time_to,
)
from benchmarks.comm_parts.sums_trial import SumTime
from benchmarks.comm_parts.trial import Result
from benchmarks.comm_parts.workload import Workload, entropy, make_text, read_samples
from benchmarks.comm_parts.yunlu_trial import _show_choice


def _result(method: str, step_s: float, losses: list[float], **changes: object) -> Result:
    """Evaluated after every step."""
    given: dict[str, object] = {
        "method": method,
        "rate": "100mbit",
        "hosts": 4,
        "setting": "",
        "round": 0,
        "step_s": step_s,
        "mean_step_s": step_s,
        "step_bytes": 1000.0,
        "wire_bytes": None,
        "cpu_step_s": 0.01,
        "ends_s": tuple(step_s * (step + 1) for step in range(len(losses))),
        "losses": tuple(losses),
        "held_out": tuple((step + 1, loss) for step, loss in enumerate(losses)),
        "is_equal": True,
    }
    return Result(**{**given, **changes})  # pyright: ignore[reportArgumentType]


def test_the_bound_is_what_a_ring_needs() -> None:
    assert bound_s(4, 1_000_000, "100mbit") == pytest.approx(0.12)
    assert bound_s(2, 1_000_000, "1gbit") == pytest.approx(0.008)
    assert bound_s(4, 1_000_000, "none") is None


def test_the_target_is_met_on_the_line_between_two_evaluations() -> None:
    result = _result("ddp", 2.0, [4.0, 3.0, 1.0])
    assert time_to(result, 2.0) == pytest.approx(5.0)
    assert time_to(result, 4.5) == pytest.approx(2.0)
    assert time_to(result, 0.5) is None
    assert loss_at(result, 4.1) == 3.0
    assert loss_at(result, 1.0) is None


def test_without_evaluations_the_loss_of_training_is_smoothed() -> None:
    losses = [3.0] * 20 + [1.0] * 20
    result = _result("yunlu exact", 1.0, losses, held_out=())
    assert time_to(result, 2.0) is None
    assert time_to(result, 2.0, smooth=True) == pytest.approx(30.0)


def test_ratios_are_to_undisturbed_dense_training_of_the_same_round() -> None:
    results = [
        _result("ddp", 1.0, [3.0, 2.0, 1.0]),
        _result("int8", 0.5, [3.0, 2.0, 1.0], step_bytes=250.0),
        _result("ddp", 3.0, [3.0, 2.0, 1.0], setting="slow"),
        _result("ddp", 8.0, [3.0, 2.0, 1.0], round=1),
        _result("int8", 2.0, [3.0, 2.0, 1.0], round=1, step_bytes=250.0),
    ]
    verdicts = {(v["setting"], v["method"]): v for v in judge_training(results, 1.0)}
    assert verdicts["", "int8"]["to_target"] == pytest.approx(3.0)  # 2 and 4
    assert verdicts["", "int8"]["fewer_bytes"] == pytest.approx(4.0)
    assert verdicts["", "ddp"]["to_target"] == pytest.approx(1.0)
    assert verdicts["slow", "ddp"]["to_target"] == pytest.approx(1 / 3)
    assert (
        verdicts["", "ddp"]["loss_then"] == 3.0
    )  # after its first step; in the other round it had done none
    shown = make_training_tables(results, 1.0)
    assert "3.00 (2.00 to 4.00)" in shown
    assert "**Training, 100 Mbit/s, slow**" in shown


def test_workers_that_differ_are_told_of() -> None:
    shown = make_training_tables([_result("ring", 1.0, [2.0, 1.0], is_equal=False)], 1.5)
    assert "workers differ" in shown


def test_sums_are_compared_with_the_bound_and_with_gloo() -> None:
    times = [
        SumTime(hosts=4, rate=rate, way=way, bytes=1 << 20, round=number, s=s * (number + 1))
        for number in range(3)
        for rate in ("100mbit", "none")
        for way, s in (("gloo", 0.2), ("doubling", 0.1))
    ]
    verdicts = {(v["rate"], v["way"]): v for v in judge_sums(times)}
    assert verdicts["none", "doubling"]["to_gloo"] == pytest.approx(0.5)
    assert verdicts["none", "doubling"]["to_bound"] is None
    assert verdicts["100mbit", "gloo"]["to_bound"] == pytest.approx(0.4 / 0.12582912)
    shown = make_sum_tables(times)
    assert "| doubling | 200.0 (0.50) |" in shown
    assert "| gloo | 400.0 (3.18) |" in shown


def test_the_text_is_the_same_each_time_and_parts_are_not() -> None:
    work = Workload()
    assert make_text(work, 50, part=0) == make_text(work, 50, part=0)
    assert make_text(work, 60, part=0).startswith(make_text(work, 50, part=0))
    assert make_text(work, 50, part=0) != make_text(work, 50, part=1)
    samples = read_samples(make_text(work, 50, part=0), work)
    assert samples.shape == (50, work.length + 1)
    assert (samples[1:, 0] == samples[:-1, -1]).all()


def test_the_entropy_is_that_of_the_words() -> None:
    """Counted: how well the word before predicts a word, in a long text."""
    work = Workload(words=6)
    words = make_text(work, 8000, part=0).decode().split(" ")[:-1]
    pairs = Counter(pairwise(words))
    before = Counter(words[:-1])
    nats = -sum(many * math.log(many / before[first]) for (first, _), many in pairs.items())
    letters = sum(len(word) + 1 for word in words[1:])
    assert nats / letters == pytest.approx(entropy(work), rel=0.02)


def test_what_was_chosen_among_stragglers_is_told_with_its_prediction() -> None:
    told = {"chosen": "direct int4", "predicted": {"step_s": 0.25964}}
    assert _show_choice(told) == "direct int4 (0.260 s predicted)"
    assert _show_choice({"chosen": "all-reduce"}) == "all-reduce"  # on one host nothing is measured


def test_ddp_among_stragglers_can_be_left_out() -> None:
    asked = Namespace(
        only=["straggler"],
        host_counts=[4],
        rates="100mbit,20mbit",
        rounds=1,
        methods=["ddp", "yunlu near"],
        undisturbed_ddp=True,
    )
    cases = [(case.method, case.setting) for case in _list_cases(asked)]
    slowed = [("yunlu near", "one link at a quarter"), ("yunlu near", "one host busy")]
    assert cases == [("ddp", ""), *slowed]
    asked.undisturbed_ddp = False
    assert len([*_list_cases(asked)]) == 5
