"""The search: the faster setting wins, within the budget, and says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.plan import StepSettings
from yunlu.training.autotune.tune import Knob, search

START = StepSettings(threads=2, micro_batch=8)


class TableTimer:
    """Knows how long each setting takes."""

    def __init__(self, seconds: Callable[[StepSettings], float | None]) -> None:
        self.seconds = seconds
        self.compared: list[StepSettings] = []

    def compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        self.compared.append(after)
        then, now = self.seconds(before), self.seconds(after)
        assert then is not None, "the settings to beat have run before"
        return None if now is None else (then, now)

    def comparison_s(self, settings: StepSettings) -> float:
        return 1.0


def knob(field: str, *values: object, **more: object) -> Knob:
    return Knob(
        field=field,
        options=lambda now: [now.model_copy(update={field: value}) for value in values],
        **more,  # type: ignore[arg-type]
    )


def test_each_knob_is_tried_on_top_of_the_best_so_far() -> None:
    speeds = {"fp32": 1.0, "bf16": 2.0}
    timer = TableTimer(lambda s: 1 / (speeds[s.precision] * (1.5 if s.compile != "none" else 1.0)))
    knobs = [knob("precision", "bf16"), knob("compile", "inductor")]
    found, _ = search(timer, START, knobs, lambda _: 100)
    assert (found.settings.precision, found.settings.compile) == ("bf16", "inductor")
    assert [(trial.name, trial.is_adopted) for trial in found.trials] == [
        ("precision", True), ("compile", True),
    ]  # fmt: skip
    assert found.trials[1].speedup == pytest.approx(1.5)
    assert found.reasons["precision"] == "2 × as fast as fp32 here"


def test_a_gain_within_the_noise_changes_nothing() -> None:
    timer = TableTimer(lambda s: 1.0 if s.precision == "fp32" else 0.96)
    found, _ = search(timer, START, [knob("precision", "bf16")], lambda _: 100)
    assert found.settings == START
    assert not found.trials[0].is_adopted
    assert "too little gain" in found.reasons["precision"]


def test_a_run_too_short_tries_nothing_but_what_is_always_tried() -> None:
    timer = TableTimer(lambda s: 1.0 if s.threads == 2 else 0.1)
    knobs = [knob("threads", 1, always=True), knob("precision", "bf16")]
    found, _ = search(timer, START, knobs, lambda _: 0.5)
    assert found.settings.threads == 1
    assert [option.precision for option in timer.compared] == ["fp32"]
    assert found.reasons["precision"] == "the run is too short to try another"


def test_what_a_faster_setting_saves_is_not_there_to_be_spent() -> None:
    timer = TableTimer(lambda s: 10.0 if s.threads == 2 else 0.1)
    knobs = [knob("threads", 1, always=True), knob("precision", "bf16")]
    search(timer, START, knobs, lambda s: 10.0 if s.threads == 2 else 0.1)
    assert [option.precision for option in timer.compared] == ["fp32"]


def test_what_a_compiler_costs_counts_before_it_is_tried() -> None:
    timer = TableTimer(lambda _: 1.0)
    search(timer, START, [knob("compile", "inductor", extra_s=40)], lambda _: 40.5)
    assert timer.compared == []
    search(timer, START, [knob("compile", "inductor", extra_s=40)], lambda _: 41.5)
    assert len(timer.compared) == 1


def test_an_option_that_does_not_run_is_passed_over() -> None:
    timer = TableTimer(lambda s: None if s.micro_batch == 4 else 1 / s.micro_batch**-1)
    found, _ = search(timer, START, [knob("micro_batch", 4, 2)], lambda _: 100)
    assert found.settings.micro_batch == 2
    assert [trial.value for trial in found.trials] == ["2"]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.floats(1, 2))
def test_what_is_kept_is_never_slower_than_the_start(seconds: list[float], worth: float) -> None:
    table = {8: 1.0} | {8 + n: span for n, span in enumerate(seconds, start=1)}
    timer = TableTimer(lambda s: table[s.micro_batch])
    found, _ = search(
        timer, START, [knob("micro_batch", *list(table)[1:], worth=worth)], lambda _: 1e9
    )
    worth_it = [span for span in seconds if 1 / span >= worth]
    assert table[found.settings.micro_batch] == min([1.0, *worth_it])
