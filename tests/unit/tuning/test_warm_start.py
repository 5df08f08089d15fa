"""What earlier studies, ours and others', have to tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.integration.toy_study import toy_job
from yunlu.tuning.records import read_past
from yunlu.tuning.study import Study
from yunlu.tuning.study_dir import StudyError, StudyRequest
from yunlu.tuning.values import Point, TrialState

LR = "train.optimizer.lr"


def asked_of(name: str, **search: Any) -> StudyRequest:
    return Study(toy_job(**search), name=name).records.request


def test_held_trials_tell_as_much_as_given_up_ones() -> None:
    records = Study(toy_job(), name="earlier").records
    for number, state in enumerate([*TrialState]):
        records.begin({LR: 0.01 * (number + 1)}, until=2)
        records.add_point(number, Point(1, (float(number),), 1.0), at=1.0)
        if state.is_over:
            records.end(number, state)
        else:
            records.change_trial(number, state=state)
    records.begin({LR: 0.5}, until=2)  # has told nothing
    past = read_past(asked_of("later"), ["earlier"])
    assert [trial.points[-1].value for trial in past] == [float(n) for n in range(6)]
    assert all(trial.state.is_over for trial in past)


def test_a_study_of_optuna_is_read_with_its_curves(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=url)

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float(LR, 1e-4, 1e-1, log=True)
        for epoch in range(3):  # counted from 0
            trial.report(rate + 1 / (1 + epoch), epoch)
        if trial.number == 1:
            raise optuna.TrialPruned
        return rate

    study.optimize(objective, n_trials=4)
    optuna.create_study(storage=url, direction="maximize", study_name="other way")
    past = read_past(asked_of("later"), [url])
    assert [trial.number for trial in past] == [0, 1, 2, 3]
    assert [trial.state is TrialState.PRUNED for trial in past] == [False, True, False, False]
    assert all([point.rung for point in trial.points] == [1, 2, 3] for trial in past)
    warm = Study(toy_job(method="frontier", stop="auto", warm_start=[url]), name="warm")
    first = warm.ask()
    best = min(past, key=lambda trial: trial.points[-1].value)
    assert first is not None
    assert first[LR] == pytest.approx(best.params[LR])


@pytest.mark.parametrize("place", ["sqlite:///{}/none.db", "nosuch://there", "nobody"])
def test_what_cannot_be_read_is_refused_and_nothing_is_made(tmp_path: Path, place: str) -> None:
    with pytest.raises(StudyError, match=r"search\.warm_start"):
        read_past(asked_of("later"), [place.format(tmp_path)])
    assert not (tmp_path / "none.db").exists()


def test_studies_that_sought_something_else_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    optuna.create_study(storage=url, direction="maximize")
    with pytest.raises(StudyError, match="no study that would minimize"):
        read_past(asked_of("later"), [url])
    Study(toy_job(metric="accuracy"), name="sharp")
    with pytest.raises(StudyError, match="sought accuracy, not loss"):
        read_past(asked_of("later"), ["sharp"])
