"""A study's trials come back as they were, to us and to Optuna."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from yunlu.cli.main import main
from yunlu.tuning import records as records_module
from yunlu.tuning.records import Records, create_records, open_study, read_view
from yunlu.tuning.setup import make_study_request
from yunlu.tuning.study_dir import (
    StudyDir,
    StudyError,
    StudyStatus,
    check_name,
    find_study,
    list_studies,
    studies_home,
)
from yunlu.tuning.values import Dimension, Params, Point, Trial, TrialState

DIMENSIONS = (
    Dimension(name="lr", low=1e-5, high=1e-1, log=True),
    Dimension(name="layers", low=1, high=8, is_int=True),
    Dimension(name="width", low=64, high=1024, is_int=True, step=64),
    Dimension(name="dropout", low=0.0, high=0.5, step=0.1),
    Dimension(name="kind", choices=("adam", None, 1, True, 2.5, "[128, 64]")),
)
ANY_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(1e-6, 1.0),
        "layers": st.integers(0, 20),
        "width": st.integers(1, 2000),
        "dropout": st.floats(0, 1),
        "kind": st.sampled_from(DIMENSIONS[4].choices),
        "stray": st.one_of(st.text(max_size=5), st.booleans(), st.none(), st.integers(-5, 5)),
    },
)
ANY_VALUE = st.floats(allow_nan=True, allow_infinity=True)
OVER = (TrialState.PRUNED, TrialState.DONE, TrialState.FAILED)


def make_records(
    name: str = "some", *, metrics: tuple[str, ...] = ("loss",), **more: Any
) -> Records:
    directions = tuple("maximize" if metric == "accuracy" else "minimize" for metric in metrics)
    fields: dict[str, Any] = {"metrics": metrics, "directions": directions, "rungs": 9, **more}
    request = make_study_request(name=name, dimensions=DIMENSIONS, **fields)
    return create_records(StudyDir(studies_home() / name), request)


def same(one: Trial, other: Trial) -> bool:
    """Equal, not a number included, and types too."""
    return repr(one) == repr(other)


# Each example is a database of its own: few examples of many trials, and none made smaller.
@settings(
    max_examples=3,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.parametrize("metrics", [("loss",), ("accuracy",), ("loss", "cost")])
def test_trials_come_back_exactly_whatever_they_hold(
    own_home: Path, metrics: tuple[str, ...], data: st.DataObject
) -> None:
    records = make_records(f"s{time.time_ns()}", metrics=metrics)
    for _ in range(8):
        params: Params = data.draw(ANY_PARAMS)
        copied = data.draw(st.none() | st.tuples(st.integers(0, 5), st.integers(1, 5)))
        number = records.begin(params, until=data.draw(st.integers(0, 9)), copied_from=copied)
        for rung in range(1, data.draw(st.integers(0, 3)) + 1):
            values = tuple(data.draw(ANY_VALUE) for _ in metrics)
            point = Point(rung, values, data.draw(st.floats(0, 1e6)))
            records.add_point(number, point, at=float(rung), device_seconds=3.0, dollars=0.5)
        state = data.draw(st.sampled_from(TrialState))
        if state in OVER:
            records.end(number, state, reason="so", error="bad" if state == "failed" else None)
        else:
            records.change_trial(number, state=state, run=f"run-{number}", until=7)
    again = Records(records.dir)
    pairs = zip(again.trials(), records.trials(), strict=True)
    assert all(same(one, other) for one, other in pairs)
    assert [repr(f) for f in again.facts()] == [repr(f) for f in records.facts()]
    assert own_home.exists()


def test_optuna_sees_signs_states_and_curves() -> None:
    records = make_records(metrics=("accuracy",))
    for value, state in ((0.5, TrialState.DONE), (0.9, TrialState.DONE), (0.2, TrialState.PRUNED)):
        number = records.begin({"lr": 0.01, "kind": "adam"}, until=2)
        records.add_point(number, Point(1, (-value / 2,), 1.0), at=1.0)
        records.add_point(number, Point(2, (-value,), 2.0), at=2.0)
        records.end(number, state)
    records.end(records.begin({"lr": 0.02}), TrialState.FAILED, error="boom")
    records.begin({"lr": 0.03})
    study = optuna.load_study(study_name="some", storage=records.dir.storage)
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["accuracy"]
    assert study.best_trial.number == 1
    assert study.best_value == 0.9
    assert study.trials[0].intermediate_values == {1: 0.25, 2: 0.5}
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert study.trials[2].value == 0.2
    assert study.trials[3].user_attrs["error"] == "boom"
    view = read_view("some")
    assert view.best is not None
    assert view.best.value == 0.9
    assert view.count(TrialState.RUNNING) == 1


def test_a_trial_that_never_came_to_a_number_has_failed() -> None:
    records = make_records()
    number = records.begin({"lr": 0.1})
    records.add_point(number, Point(1, (math.nan,), 1.0), at=1.0)
    records.end(number, TrialState.DONE)
    assert records.trial(number).state is TrialState.FAILED
    assert "none of its values is finite" in str(records.facts()[number].error)


def test_what_no_longer_holds_of_a_trial_is_forgotten_in_the_file_too() -> None:
    records = make_records()
    records.begin({"lr": 0.01}, until=1)
    records.change_trial(0, state=TrialState.HELD, reason="others gain more", until=4)
    records.change_trial(0, state=TrialState.RUNNING, reason="")
    assert Records(records.dir).facts()[0].reason == ""
    assert Records(records.dir).facts() == records.facts()


def test_a_value_is_the_best_of_its_curve() -> None:
    records = make_records()
    number = records.begin({"lr": 0.1})
    for rung, value in enumerate((3.0, 1.0, 2.0), 1):
        records.add_point(number, Point(rung, (value,), 1.0), at=1.0)
    records.end(number, TrialState.DONE)
    assert records.facts()[number].value == 1.0
    assert optuna.load_study(study_name="some", storage=records.dir.storage).best_value == 1.0


def test_what_is_over_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_records()
    for _ in range(3):
        records.end(records.begin({"lr": 0.1}), TrialState.FAILED, error="x")
    held = records.begin({"lr": 0.2})
    records.change_trial(held, state=TrialState.HELD)
    reader = open_study("some")
    read: list[int] = []
    real = Records._read  # pyright: ignore[reportPrivateUsage]

    def note(self: Records, found: Any) -> Any:
        read.append(found.number)
        return real(self, found)

    monkeypatch.setattr(Records, "_read", note)
    records.add_point(held, Point(1, (0.5,), 1.0), at=1.0)
    assert open_study("some") is reader
    assert read == [held]
    assert reader.trial(held) == records.trial(held)


def test_studies_are_found_by_name_and_told_apart() -> None:
    with pytest.raises(StudyError, match="there are no studies"):
        find_study("last")
    make_records("older")
    make_records("newer")
    assert list_studies() == ["newer", "older"]
    assert find_study("last").name == "newer"
    with pytest.raises(StudyError, match="there is no study 'newr'") as unknown:
        read_view("newr")
    assert "newer" in str(unknown.value.hint)
    for name in ("", "a b", "x" * 33, "../up", "-x"):
        with pytest.raises(StudyError, match="cannot name a study"):
            check_name(name)


def test_a_study_runner_that_vanished_leaves_a_stopped_study() -> None:
    records = make_records()
    status = records.dir.read_status()
    assert status.state == "stopped"
    with records.dir.locked_by_runner():
        records.dir.write_status(status.model_copy(update={"state": "running"}))
        assert read_view("some").state == "running"
        with pytest.raises(StudyError, match="another process"), records.dir.locked_by_runner():
            pass
    assert read_view("some").state == "stopped"


@pytest.mark.parametrize("file", ["study.json", "study.sqlite3", "state.json"])
def test_a_damaged_study_says_so_and_leaves_the_others_alone(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_records("whole")
    broken = make_records("broken").dir.path / file
    broken.write_text("garbage")
    records_module._opened.clear()  # pyright: ignore[reportPrivateUsage] (as another program)
    with pytest.raises(StudyError, match=f"broken is damaged: .*{file}"):
        read_view("broken")
    assert read_view("whole").name == "whole"
    assert main(["study"]) == 0
    shown = capsys.readouterr().out
    assert "whole" in shown
    assert "broken is damaged" in shown


def test_a_home_that_cannot_be_written_is_told(own_home: Path) -> None:
    own_home.write_text("no directory")
    with pytest.raises(StudyError, match=r"cannot be written to .*some") as refused:
        make_records()
    assert "YUNLU_HOME" in str(refused.value.hint)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_study_that_has_begun_does_not_begin_anew_without_its_trials(is_empty: bool) -> None:
    records = make_records()
    records.begin({"lr": 0.1})
    records.dir.write_status(StudyStatus(state="finished", began_at=1.0, ended_at=2.0))
    records.dir.database.unlink()
    if is_empty:
        records.dir.database.touch()
    records_module._opened.clear()  # pyright: ignore[reportPrivateUsage] (as another program)
    with pytest.raises(StudyError, match=r"some is damaged: .*study\.sqlite3"):
        read_view("some")
    assert records.dir.database.exists() == is_empty
