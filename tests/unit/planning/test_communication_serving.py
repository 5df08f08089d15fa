"""Asynchronous workers: what they are predicted to do, and when they are chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.test_communication import (
    HUNDRED_MBIT,
    even,
    language_model,
    with_slow_host,
)
from yunlu.planning.communication.method_choice import MethodQuery, Pinned, choose, should_switch
from yunlu.planning.communication.step_forecast import (
    ASYNCHRONOUS_S,
    MethodSetting,
    StepForecast,
    forecast,
)
from yunlu.planning.communication.timing import Clock, WireFigures

FAST = 1e9
SERVED = MethodSetting(method="asynchronous")


def computing(*spans: float, bytes_per_s: float = FAST) -> WireFigures:
    return even(len(spans), bytes_per_s=bytes_per_s).model_copy(update={"compute_s": spans})


def served(figures: WireFigures, setting: MethodSetting = SERVED, **facts: object) -> StepForecast:
    return forecast(Clock(figures), language_model(**facts), setting)


def relaxed(figures: WireFigures, *, steps: int = 5000, **asked: object) -> MethodQuery:
    work = language_model(steps=steps, compute_s=figures.compute_s[0])
    told = {"work": work, "guarantee": "relaxed", **asked}
    return MethodQuery.model_validate(told)


@settings(max_examples=50, deadline=None)
@given(
    spans=st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=6),
    rate=st.floats(1e6, 1e10),
    worse=st.floats(1.0, 10.0),
    who=st.integers(0, 5),
)
def test_nothing_gets_faster_by_a_slower_worker_or_link(
    spans: list[float], rate: float, worse: float, who: int
) -> None:
    figures = computing(*spans, bytes_per_s=rate)
    slower = [span * worse if at == who % len(spans) else span for at, span in enumerate(spans)]
    before = served(figures).step_s
    assert served(computing(*slower, bytes_per_s=rate)).step_s >= before * (1 - 1e-9)
    slow_link = with_slow_host(figures, who % len(spans), 1 / worse)
    assert served(slow_link).step_s >= before * (1 - 1e-9)
    assert before >= served(figures).exchange_s


def test_a_slow_worker_costs_its_own_part_only() -> None:
    even_s, uneven_s = (served(computing(0.1, 0.1, 0.1, last)).step_s for last in (0.1, 0.4))
    assert uneven_s / even_s == pytest.approx(4 / 3.25, rel=0.05)


def test_who_is_too_late_is_waited_for_after_all() -> None:
    figures = computing(0.1, 0.1, 0.1, 10.0)
    bound = served(figures, staleness=4)
    assert bound.step_s == pytest.approx(10.0 / 5, rel=0.05)
    assert served(figures, staleness=9).step_s == pytest.approx(bound.step_s / 2, rel=0.05)


def test_all_share_the_link_of_the_servers_host() -> None:
    figures = computing(*[0.3] * 4, bytes_per_s=HUNDRED_MBIT)
    as_it_is, theirs, another = (
        served(each).step_s
        for each in (figures, with_slow_host(figures, 0, 0.25), with_slow_host(figures, 3, 0.25))
    )
    assert theirs > 1.5 * as_it_is
    assert another < 1.25 * as_it_is


def test_what_is_packed_travels_faster() -> None:
    figures = computing(*[0.3] * 4, bytes_per_s=HUNDRED_MBIT / 4)
    plain = served(figures)
    packed = served(figures, MethodSetting(method="asynchronous", codec="int8"))
    assert packed.step_s < 0.9 * plain.step_s
    assert packed.bytes_per_step == plain.bytes_per_step / 4


def test_a_slow_processor_makes_workers_asynchronous() -> None:
    told = choose(computing(0.1, 0.1, 0.1, 0.6), relaxed(computing(0.1)))
    assert told.setting.method == "asynchronous"
    assert "worker 3 takes 600.0 ms a step and takes fewer turns than the others" in told.reason
    assert "more steps" in told.reason


@pytest.mark.parametrize("guarantee", ["exact", "near"])
def test_only_who_asks_for_relaxed_gets_them(guarantee: str) -> None:
    figures = computing(0.1, 0.1, 0.1, 0.6)
    told = choose(figures, relaxed(figures, guarantee=guarantee))
    assert told.setting.method != "asynchronous"
    reasons = {each.name: each.reason for each in told.refused}
    assert reasons["asynchronous"] == f"it is relaxed, {guarantee} was asked for"


@pytest.mark.parametrize("slow_s", [0.1, 0.12])
def test_even_workers_stay_together(slow_s: float) -> None:
    figures = computing(0.1, 0.1, 0.1, slow_s)
    assert choose(figures, relaxed(figures)).setting.method != "asynchronous"


def test_a_short_run_does_not_repay_the_change() -> None:
    figures = computing(0.1, 0.1, 0.1, 0.6)
    gain_s = 0.6 - served(figures).cost_s
    few = round(0.2 * ASYNCHRONOUS_S / gain_s)
    assert choose(figures, relaxed(figures, steps=few)).setting.method != "asynchronous"
    assert choose(figures, relaxed(figures, steps=50 * few)).setting.method == "asynchronous"


def test_why_a_run_cannot_use_them_is_said() -> None:
    figures = computing(0.1, 0.1, 0.6)
    question = relaxed(
        figures, available=("all-reduce", "local"), hindrances={"asynchronous": "it is a trial"}
    )
    told = choose(figures, question)
    assert told.setting.method != "asynchronous"
    assert "it is a trial" in {each.reason for each in told.refused}


def test_they_pack_only_what_is_known_to_do() -> None:
    figures = computing(0.1, 0.1, 0.1, 0.9, bytes_per_s=HUNDRED_MBIT)
    told = choose(figures, relaxed(figures, pinned=Pinned(method="asynchronous")))
    assert {each.setting.codec for each in told.candidates} == {"none", "fp16", "int8", "int4"}


def test_a_worker_that_becomes_slow_makes_them_worth_it_if_steps_are_left() -> None:
    figures, slow = computing(0.1, 0.1, 0.1, 0.1), computing(0.1, 0.1, 0.1, 0.8)
    decision = choose(figures, relaxed(figures))
    assert decision.setting.method != "asynchronous"
    found = should_switch(decision, slow, steps_left=1000)
    assert found is not None
    assert found.setting.method == "asynchronous"
    left = should_switch(decision, slow, steps_left=10)
    assert left is None or left.setting.method != "asynchronous"
