"""What a study is asked for, from its job and its surroundings."""

from __future__ import annotations

import sys

import pytest

from tests.integration.toy_study import toy_job
from yunlu.tuning.session import list_views
from yunlu.tuning.setup import prepare_study
from yunlu.tuning.study_dir import StudyError


@pytest.mark.parametrize(
    ("price", "metrics"), [("3.6", ("loss", "cost")), ("", ("loss", "seconds"))]
)
def test_without_a_price_the_cost_is_the_time_of_devices(
    price: str, metrics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", price)
    job = toy_job(metric="auto", objectives=["loss", "cost"], method="tpe")
    request = prepare_study(job, name="front")
    assert (request.metrics, request.directions) == (metrics, ("minimize", "minimize"))


def test_a_population_needs_trials_for_its_copies() -> None:
    stop = {"name": "pbt", "population": 4}
    with pytest.raises(StudyError, match="4 leaves none for copies in a population of 4"):
        prepare_study(toy_job(stop=stop, trials=4), probes=False)
    assert prepare_study(toy_job(stop=stop, trials=5), probes=False).trials == 5


def test_an_empty_list_of_studies_does_not_need_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yunlu.tuning.records", None)
    assert list_views().studies == ()
