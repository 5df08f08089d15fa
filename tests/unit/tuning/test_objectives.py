"""What a study seeks, in what its trials report."""

from __future__ import annotations

import pytest

from tests.unit.tuning.test_records import make_records
from yunlu.tuning.setup import make_study_request
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.runner import check_failures, find_values
from yunlu.tuning.study_runner.trial_runs import RungScore, TrialEvents
from yunlu.tuning.values import TrialState


def test_who_names_an_objective_wrongly_is_told_of_cost_and_seconds_too() -> None:
    request = make_study_request(
        name="some", dimensions=(), metrics=("loss", "dollars"),
        directions=("minimize", "minimize"), rungs=9,
    )  # fmt: skip
    found = RungScore(rung=1, step=1, metrics={"loss": 0.5}, at=1.0, device_seconds=2.0)
    with pytest.raises(StudyError, match="dollars is never reported") as refused:
        find_values(request, TrialEvents(), found, dollars=0.1)
    assert refused.value.hint == "known: cost, loss, parameters, seconds"
    request = request.model_copy(update={"metrics": ("loss", "cost")})
    assert find_values(request, TrialEvents(), found, dollars=0.1) == (0.5, 0.1)


def test_the_error_that_is_shown_is_that_of_the_run_that_is_named() -> None:
    records = make_records()
    for width in (1, 2, 3):
        number = records.begin({"width": width})
        records.change_trial(number, run=f"some-{number:03d}-abcdef")
        records.end(number, TrialState.FAILED, error=f"width {width} is too small")
    with pytest.raises(StudyError, match="3 trials failed alike: width 1 is") as refused:
        check_failures(records.facts(), "width 3 is too small")
    assert refused.value.hint == "yunlu logs some-000-abcdef shows the whole of it"
