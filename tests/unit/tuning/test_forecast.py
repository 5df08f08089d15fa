"""What a study will take: exact where the method says it, ordered where it guesses, honest where nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.plan import Interval, Plan, Prediction
from yunlu.spec.job import Job, LayoutSpec
from yunlu.spec.search import SearchSpec
from yunlu.tuning import forecast
from yunlu.tuning.forecast import (
    EXAMPLE_TRIALS,
    Stage,
    StudyForecast,
    TrialTime,
    count_space,
    expect_stages,
    find_stop,
    find_trial_time,
    makespan_s,
    predict_search,
    predict_study,
)
from yunlu.tuning.setup import make_study_request
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.device_shares import USUAL_POWER

LR = {"train.optimizer.lr": "1e-4 .. 1e-1 log"}


def search(**fields: Any) -> SearchSpec:
    return SearchSpec.model_validate({"space": LR, "method": "random", "stop": "none"} | fields)


def job() -> Job:
    return Job.model_validate(
        {"task": "tabular-classification", "model": "mlp", "data": "sklearn:digits"}
    )


def trial(seconds: float = 100.0, *, start_s: float = 10.0, spread: float = 1.2) -> TrialTime:
    interval = Interval(value=seconds, low=seconds / spread, high=seconds * spread)
    return TrialTime(seconds=interval, start_s=start_s, source="a test")


def predict(request: SearchSpec, **more: Any) -> StudyForecast:
    options: dict[str, Any] = {"rungs": 9, "devices": 4, "trial": trial(), "elastic": False}
    return predict_search(job(), request, **(options | more))


def test_whole_trainings_one_after_the_other() -> None:
    found = predict(search(trials=8), devices=1)
    assert found.seconds is not None
    assert found.seconds.value == pytest.approx(800.0)
    assert found.seconds.low < 800.0 < found.seconds.high
    assert (found.trials.value, found.bound, found.share) == (8.0, "trials", 1.0)


def test_a_trial_of_two_devices_holds_both() -> None:
    wide = job().model_copy(update={"devices": 2})
    options: dict[str, Any] = {"rungs": 9, "trial": trial(), "dollars_per_hour": 3.6}
    request, two_s = search(trials=8), 10.0 + 90.0 / 2**USUAL_POWER
    assert predict_search(wide, request, devices=4, **options).parallel == 2
    found = predict_search(wide, request, devices=2, **options)
    assert (found.parallel, found.devices) == (1, 2)
    assert found.seconds is not None
    assert found.seconds.value == pytest.approx(8 * two_s)
    assert found.device_s is not None
    assert found.device_s.value == pytest.approx(8 * 2 * two_s)
    assert found.dollars is not None
    assert found.dollars.value == pytest.approx(0.001 * 8 * two_s)
    layout = job().model_copy(update={"layout": LayoutSpec.model_validate({"tp": 2})})
    assert predict_search(layout, request, devices=2, **options).parallel == 1


def test_halving_counts_its_rungs() -> None:
    request = search(stop="asha", trials=9)
    course = expect_stages(request, trials=9, rungs=9)
    assert course.stages == (
        Stage(trials=9, rungs=1),
        Stage(trials=3, rungs=2),
        Stage(trials=1, rungs=6),
    )
    assert course.rungs == 21
    assert predict(request).share == pytest.approx(21 / 81)


def test_hyperband_has_brackets_that_begin_later() -> None:
    request = search(stop="hyperband", trials=20)
    course = expect_stages(request, trials=20, rungs=9)
    assert {stage.rungs for stage in course.stages} >= {1, 3, 9}
    assert course.rungs > expect_stages(search(stop="asha"), trials=20, rungs=9).rungs


def test_the_budget_buys_as_many_trials_as_it_pays_for() -> None:
    # 3.60 dollars an hour for 4 devices: one device-second costs 0.00025.
    found = predict(search(budget=1.0), dollars_per_hour=3.6)
    assert (found.bound, found.trials.value) == ("budget", 40.0)
    assert found.trials.low < 40 < found.trials.high
    assert found.dollars is not None
    assert found.dollars.value == pytest.approx(1.0, rel=0.05)
    assert found.dollars.high == 1.0


def test_the_tightest_limit_bounds() -> None:
    found = predict(search(budget=1.0, trials=10, deadline="1h"), dollars_per_hour=3.6)
    assert (found.bound, found.trials.value) == ("trials", 10.0)
    found = predict(search(trials=1000, deadline="10min"), devices=1)
    assert (found.bound, found.trials.value) == ("deadline", 6.0)
    assert found.seconds is not None
    assert found.seconds.high <= 600.0


def test_without_a_price_the_budget_says_nothing() -> None:
    found = predict(search(budget=5.0, trials=3))
    assert found.dollars is None
    assert any("no price" in note for note in found.notes)


def test_without_any_limit_an_example_is_told() -> None:
    found = predict(search())
    assert (found.bound, found.trials.value) == ("nothing", EXAMPLE_TRIALS)
    assert any("has no limit" in note for note in found.notes)


def test_a_machine_that_nobody_measured_tells_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path))
    assert find_trial_time(job(), devices=2) is None
    found = predict(search(trials=5), trial=None)
    assert found.seconds is None
    assert "first trials will tell" in " ".join(found.lines())


def know_nothing(*_: Any, **__: Any) -> None:
    """A machine that nobody probed."""


def test_where_nobody_measured_a_worker_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asks: list[Job] = []
    plan = Plan(
        device="cuda", threads=1, micro_batch=8, batch=8, accumulation=1, steps=90,
        steps_per_epoch=10, warmup_steps=0, lr=0.1, weight_decay=0.0, evaluate_every=10,
        checkpoint_every=100, best_metric="loss", stopping_metric="loss", workers=0, choices=(),
        prediction=Prediction(memory_bytes=0, step_s=1, samples_per_s=8, total_s=100, dollars=None),
    )  # fmt: skip
    request = make_study_request(
        name="some", dimensions=(), job=job().model_copy(update={"search": search(trials=50)}),
        metrics=("loss",), directions=("minimize",), rungs=9, trials=8, deadline_s=250.0,
    )  # fmt: skip

    def make_plan(job: Job) -> Plan:
        asks.append(job)
        return plan

    monkeypatch.setattr(forecast, "plan_alone", make_plan)
    monkeypatch.setattr(forecast, "find_trial_time", know_nothing)
    found = predict_study(request, devices=1)
    assert found.trial_s is not None
    assert found.trial_s.value == 100.0
    # What was said last bounds it: 250 seconds, not the trials of the job's own search.
    assert (found.trials.value, found.bound) == (2.0, "deadline")
    assert len(asks) == 1
    again = predict_study(request.model_copy(update={"plan": plan}), devices=1)
    assert (again, len(asks)) == (found, 1)


def test_a_job_that_no_worker_can_plan_leaves_the_time_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_job: Job) -> Plan:
        raise StudyError("no such model")

    request = make_study_request(
        name="some", dimensions=(), job=job().model_copy(update={"search": search()}),
        metrics=("loss",), directions=("minimize",), rungs=9, trials=8,
    )  # fmt: skip
    monkeypatch.setattr(forecast, "plan_alone", refuse)
    monkeypatch.setattr(forecast, "find_trial_time", know_nothing)
    found = predict_study(request, devices=2)
    assert (found.seconds, found.trials.value) == (None, 8.0)


def test_a_space_with_an_end_is_counted() -> None:
    space = {"train.batch": [16, 32, 64], "model.args.layers": "1 .. 4"}
    request = search(method="grid", space=space)
    assert count_space(request) == 12
    found = predict(request)
    assert (found.bound, found.trials.value) == ("space", 12.0)
    assert any("12 settings" in note for note in found.notes)
    assert predict(search(space=space, trials=50)).trials.value == 12.0
    assert predict(search(space=space, trials=5)).bound == "trials"
    assert count_space(search()) is None
    rates = {"train.optimizer.lr": "1e-4 .. 1e-1 log count 4"}
    assert count_space(search(method="grid", space=rates)) == 4
    assert count_space(search(space=rates)) is None
    momentum = {"choice": [0.5, 0.9], "when": {"train.optimizer.name": "momentum"}}
    names = {"train.optimizer.name": ["adamw", "momentum"], "train.optimizer.momentum": momentum}
    assert count_space(search(space=names)) == 3


def test_a_population_is_as_large_as_its_rule_says() -> None:
    stop = {"name": "pbt", "population": 8, "every": 3, "share": 0.25}
    found = predict(search(trials=100, stop=stop))
    # Two are replaced at the third and at the sixth of nine rungs; eight train all the time.
    assert (found.trials.value, found.bound) == (12, "population")
    assert found.share * 12 == pytest.approx(8)
    assert predict(search(trials=9, stop=stop)).bound == "trials"
    assert predict(search(trials=4, stop=stop)).share == pytest.approx(1)


def test_varied_models_make_the_interval_wider() -> None:
    def width(space: dict[str, Any]) -> float:
        found = predict(search(trials=10, space=space)).seconds
        assert found is not None
        return found.high / found.low

    assert width({"model.args.hidden": [[16], [64]]}) > width(LR)
    penalties = {"train.l2": [0.0, 0.1], "train.label_smoothing": "0.0 .. 0.2"}
    assert width(penalties) == width(LR)


@pytest.mark.parametrize("stop", ["none", "asha", "hyperband", "median", "patience"])
def test_shares_that_change_are_never_slower(stop: str) -> None:
    request = search(stop=stop, trials=27)
    static, elastic = predict(request), predict(request, elastic=True)
    assert static.seconds is not None
    assert elastic.seconds is not None
    assert elastic.seconds.value <= static.seconds.value * 1.001
    assert static.device_s == elastic.device_s


@given(
    trials=st.integers(1, 100),
    rungs=st.integers(1, 60),
    devices=st.integers(1, 16),
    stop=st.sampled_from(["none", "asha", "hyperband", "median", "pbt", "frontier"]),
    elastic=st.booleans(),
)
def test_no_study_beats_all_devices_always_busy(
    trials: int, rungs: int, devices: int, stop: str, elastic: bool
) -> None:
    request = search(stop=stop) if stop != "frontier" else search(method="frontier", stop="auto")
    course = expect_stages(request, trials=trials, rungs=rungs)
    span_s = makespan_s(course, rung_s=1.0, devices=devices, parallel=devices, elastic=elastic)
    assert span_s >= course.rungs / devices * 0.999
    assert course.rungs <= max(trials, 10) * rungs * 1.001
    more = expect_stages(request, trials=trials + 10, rungs=rungs)
    assert more.rungs >= course.rungs


def test_auto_is_what_the_methods_make_of_it() -> None:
    assert find_stop(SearchSpec.model_validate({"space": LR})) == "frontier"
    assert find_stop(SearchSpec.model_validate({"space": LR, "method": "tpe"})) == "asha"
    assert find_stop(SearchSpec.model_validate({"space": LR, "method": "grid"})) == "none"


def test_our_own_method_trains_a_part_of_each_trial() -> None:
    course = expect_stages(SearchSpec.model_validate({"space": LR}), trials=100, rungs=50)
    assert course.rungs == pytest.approx(0.25 * 100 * 50)
    assert sum(stage.trials for stage in course.stages) == 160  # with those that went on


def test_it_survives_a_trip_through_json() -> None:
    found = predict(search(budget=1.0), dollars_per_hour=3.6)
    assert StudyForecast.model_validate_json(found.model_dump_json()) == found
