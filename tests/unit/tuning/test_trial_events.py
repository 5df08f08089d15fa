"""What a run has cost and come to, from its events alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sample_events import sample
from yunlu.runs.events import (
    AttemptStarted,
    Evaluated,
    PlanMade,
    RunEvent,
    StateChanged,
    WorkerGroupFormed,
)
from yunlu.runs.states import RunState
from yunlu.tuning.study_runner.trial_runs import TrialEvents


def apply(events: TrialEvents, at: float, kind: type[RunEvent], **data: Any) -> None:
    events.apply_event(sample(kind, at=at, **data))


def test_device_seconds_follow_lives_and_resizes() -> None:
    events = TrialEvents(devices=3)  # as many as it has now: other attempts had others
    assert events.device_seconds(100.0) == 0
    apply(events, 10.0, AttemptStarted, began_at=8.0, devices=2)
    assert events.device_seconds(10.0) == 4
    apply(events, 12.0, WorkerGroupFormed, ranks=[{}, {}, {}, {}])  # 4 s on two, then four
    apply(events, 15.0, StateChanged, state="stopped", reason="held at rung 1")
    assert events.device_seconds(1e9) == 8 + 12
    assert (events.state, events.reason) == (RunState.STOPPED, "held at rung 1")
    apply(events, 50.0, StateChanged, state="pending")
    apply(events, 60.0, AttemptStarted, began_at=60.0)
    assert events.reason == ""
    assert events.device_seconds(65.0) == 25
    assert len(events.view.attempts) == 2


def test_one_that_was_stopped_before_it_lived_says_so() -> None:
    events = TrialEvents()
    apply(events, 0.0, StateChanged, state="pending")
    apply(events, 1.0, StateChanged, state="stopped", reason="the worker was ended by SIGTERM")
    assert (events.reason, events.device_seconds(9.0)) == ("it had just been started", 0.0)


def test_nobody_pays_for_the_night_after_a_kill() -> None:
    events = TrialEvents()
    apply(events, 10.0, AttemptStarted, began_at=10.0)
    apply(events, 30_000.0, StateChanged, state="lost", reason="vanished", seen_at=25.0)
    assert events.device_seconds(40_000.0) == 15


def test_evaluations_are_counted_by_rung_and_made_again_once() -> None:
    events = TrialEvents()
    apply(events, 0.0, AttemptStarted, began_at=0.0)
    apply(events, 1.0, PlanMade, steps=45, evaluate_every=10)
    assert events.rungs == 5
    about = {"split": "validation", "metrics": {"accuracy": 0.5}, "loss": 0.7}
    for at, rung in ((2.0, 1), (4.0, 2), (6.0, 2)):
        apply(events, at, Evaluated, rung=rung, step=10 * rung, **about)
    apply(events, 7.0, Evaluated, **(about | {"split": "test", "step": 45}))
    assert [*events.evaluated] == [1, 2]
    assert events.step_of(2) == 20
    assert events.step_of(3) is None
    assert events.evaluated[1].metrics == {"loss": 0.7, "accuracy": 0.5}
    assert events.evaluated[1].device_seconds == pytest.approx(2.0)
