"""A study whose trials a program of the user's carries out: nothing is lost, nothing is taken for a value."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.integration.toy_study import toy_job
from yunlu.cli.main import main
from yunlu.core.errors import YunluError
from yunlu.tuning.facts import wall_s
from yunlu.tuning.records import read_view
from yunlu.tuning.study import AskedTrial, Study
from yunlu.tuning.study_dir import StudyError, list_studies
from yunlu.tuning.values import TrialState


def ask(study: Study, **options: Any) -> AskedTrial:
    request = study.ask(**options)
    assert request is not None
    return request


def test_what_a_killed_program_had_asked_for_is_asked_again_and_done_once() -> None:
    study = Study(toy_job(trials=5), name="killed")
    study.tell(ask(study), 1.0)
    lost = [ask(study), ask(study)]
    study.close()  # as the lock of a killed process is let go
    done: list[tuple[int, Any]] = []

    def trial(request: AskedTrial) -> float:
        done.append((request.number, request.params))
        return 2.0

    again = Study(name="killed").optimize(trial)
    assert done[:2] == [(each.number, each.params) for each in lost]
    assert [number for number, _ in done] == [1, 2, 3, 4]
    assert [facts.state for facts in again.trials] == [TrialState.DONE] * 5


def test_what_others_still_train_is_not_asked_again_where_that_is_said() -> None:
    study = Study(toy_job(trials=5), name="lent")
    lent = ask(study)
    study.close()
    again = Study(name="lent")
    assert ask(again, again=False).number == 1
    again.tell(lent.number, 0.5)
    assert ask(again).number == 2
    assert again.trials[0].value == 0.5


def test_numbers_of_any_make_are_values() -> None:
    study = Study(toy_job(), name="numbers")
    told: list[Any] = [1, 0.5, True, np.float32(0.5), np.array(0.5), np.array([0.5]), [0.5]]
    for value in told:
        study.tell(ask(study), value)
    assert [facts.value for facts in study.trials] == [
        float(np.asarray(value).ravel()[0]) for value in told
    ]


def test_what_is_no_value_is_refused_and_the_trial_still_waits() -> None:
    study = Study(toy_job(), name="refused")
    request = ask(study)
    refused: list[tuple[Any, Any, str]] = [
        ("0.5", "done", "'0.5', which is not a number"),
        (object, "done", "which is not a number"),
        ([1.0, 2.0], "done", "has 1 objective, and 2 were told"),
        (None, "done", "has no value"),
        (1.0, "ended", "cannot be told to be 'ended'"),
    ]
    for value, state, said in refused:
        with pytest.raises(StudyError, match=said):
            study.tell(request, value, state=state)
    study.tell(request, 3.0)
    assert study.trials[0].curve == [(1, (3.0,))]


def test_a_function_that_returns_nothing_ends_the_study_with_the_reason() -> None:
    with pytest.raises(StudyError, match="failed alike: the function returned nothing"):
        Study(toy_job(), name="nothing").optimize(lambda _: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(StudyError, match="failed alike: none of its values is finite"):
        Study(toy_job(), name="endless").optimize(lambda _: float("inf"))


def test_a_function_of_ones_own_ends_by_the_clock_and_knows_no_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def trial(request: AskedTrial) -> float:
        now[0] += 60.0
        return float(request.number)

    study = Study(toy_job(), name="timed").optimize(trial, deadline="4min")
    assert len(study.trials) == 4
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "1")
    with pytest.raises(StudyError, match="a budget applies to runs"):
        Study(toy_job(), name="priced").optimize(trial, budget=1.0)


def test_a_study_that_a_program_carries_out_begins_rests_and_ends() -> None:
    study = Study(toy_job(trials=2), name="told")
    trial = ask(study)
    assert study.view().state == "running"
    study.tell(trial, 1.0)
    study.close()
    rested = read_view("told")
    assert (rested.state, rested.rungs, rested.is_external) == ("stopped", 1, True)
    status = study.records.dir.read_status()
    assert status.ended_at is not None
    earlier = {"began_at": status.ended_at - 3600 - 60, "ended_at": status.ended_at - 3600}
    study.records.dir.write_status(status.model_copy(update=earlier))  # it rested for an hour
    rested = read_view("told")
    study.optimize(lambda _: 2.0)
    ended = read_view("told")
    assert ended.idle_s >= 3600
    assert (ended.state, ended.reason) == ("finished", "all trials were started")
    assert ended.began_at == rested.began_at
    assert ended.ended_at is not None
    assert ended.began_at is not None
    assert wall_s(ended, 0.0) == ended.ended_at - ended.began_at - ended.idle_s
    study.close()
    assert read_view("told").state == "finished"


def test_a_study_whose_function_always_fails_has_failed() -> None:
    def fail(_: AskedTrial) -> float:
        raise ValueError("no good")

    study = Study(toy_job(trials=9), name="doomed")
    with pytest.raises(StudyError, match="failed alike: ValueError: no good"):
        study.optimize(fail)
    assert study.view().state == "failed"
    assert main(["tune", "--resume", "doomed"]) == 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"trials": 0}, "search.trials: expected a whole number above 0, got 0"),
        ({"deadline": "soon"}, "search.deadline: expected a time"),
        ({"parallel": 0}, "search.parallel: expected a whole number above 0"),
        ({"budget": 5.0}, "a budget applies to runs"),
    ],
)
def test_limits_that_make_no_sense_are_refused_and_forgotten(
    limits: dict[str, Any], words: str
) -> None:
    study = Study(toy_job(trials=2), name="limited")
    with pytest.raises(YunluError, match=words):
        study.optimize(lambda _: 1.0, **limits)
    study.optimize(lambda _: 1.0)
    assert len(study.trials) == 2


def test_what_is_no_job_and_what_is_no_function_are_named() -> None:
    job: Any = 3
    with pytest.raises(YunluError, match="3 is no job"):
        Study(job)
    with pytest.raises(YunluError, match="and 3 is none"):
        Study(toy_job(trials=2), name="uncalled").optimize(job)


def test_the_same_job_goes_on_with_its_newest_study_that_is_not_finished() -> None:
    first, other, second = toy_job(trials=3), toy_job(trials=3, seed=1), toy_job(trials=4)
    assert Study(first).name == "toy"
    assert Study(other).name == "toy-2"  # another search
    assert Study(other).name == "toy-2"
    assert Study(second).name == "toy"  # more trials of the first
    done = Study(name="toy")
    done.records.dir.write_status(done.records.dir.read_status().model_copy(update={"state": "finished"}))  # fmt: skip
    assert Study(second).name == "toy-3"
    assert Study(second).name == "toy-3"


@pytest.mark.parametrize(
    "search",
    [
        {"method": "grid"},
        {"method": "cmaes", "space": {"train.batch": [8, 16]}},
        {"method": "frontier", "stop": "auto", "warm_start": ["nobody"]},
    ],
    ids=str,
)
def test_what_a_method_refuses_leaves_no_study_behind(search: dict[str, Any]) -> None:
    with pytest.raises(YunluError):
        Study(toy_job(**search), name="refused")
    assert list_studies() == []
