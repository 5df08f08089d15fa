"""What is left of a budget while trials start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.toy_study import toy_job
from tests.sample_events import sample
from yunlu.core.files import append_lines
from yunlu.jobs import lifecycle
from yunlu.jobs.run import new_record
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log
from yunlu.tuning.setup import create_study, make_method_of
from yunlu.tuning.study_runner.runner import StudyLimits, WatchedTrial
from yunlu.tuning.study_runner.slots import SlotAllocation
from yunlu.tuning.study_runner.trial_runs import TrialEvents
from yunlu.tuning.values import TrialState


class TwoDevices:
    """Where nothing is started."""

    devices = 2


def start_run(home: Path, start_s: float) -> None:
    """An earlier run, which made its first step so long after it had begun."""
    run = open_run(home / "earlier")
    run.path.mkdir(parents=True)
    run.emit(sample(AttemptStarted, began_at=1000.0, process_started_at=1000.0))
    append_lines(run.path / Log.METRICS, [{"step": 1, "at": 1000.0 + start_s}])


def test_who_starts_has_as_good_as_spent_what_a_start_takes(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "3600")  # half a dollar for a second of one device
    start_run(own_home, 10.0)
    job, slots = toy_job(trials=9, budget=16.0), TwoDevices()
    records = create_study(job, name="some")
    allocation = SlotAllocation(records, make_method_of(records.request), _as_any(slots))
    watched_trials: dict[int, WatchedTrial] = {}
    limits = StudyLimits(records, allocation, watched_trials, clock_at=0.0)
    done, started = (records.begin({"train.optimizer.lr": rate}) for rate in (0.1, 0.2))
    records.end(done, TrialState.DONE, device_seconds=8.0)
    assert limits.seconds_left() == pytest.approx(12.0)
    run = lifecycle.submit(job)
    record = new_record(run)
    assert record is not None
    events = TrialEvents()
    watched_trials[started] = WatchedTrial(number=started, run=run, record=record, events=events)
    assert limits.seconds_left() == pytest.approx(7.0)  # 10 of one device are 5 of both
    assert limits.pays_for_start()
    allocation.enqueue(7, run)
    assert not limits.pays_for_start()  # for one, but not for another besides
    for state in ("planning", "running"):
        events.apply_event(StateChanged(state=state))
    assert limits.seconds_left() == pytest.approx(12.0)
    assert limits.pays_for_start()


def test_where_no_run_tells_of_starts_none_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "3600")
    records = create_study(toy_job(trials=9, budget=0.1), name="some")
    allocation = SlotAllocation(records, make_method_of(records.request), _as_any(TwoDevices()))
    assert StudyLimits(records, allocation, {}, clock_at=0.0).pays_for_start()


def _as_any(slots: object) -> Any:
    return slots
