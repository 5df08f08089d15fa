"""One fold turns the events of a run into its state."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sample_events import sample
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    ErrorRaised,
    Evaluated,
    PlanMade,
    RolledBack,
    StateChanged,
    StepSkipped,
    UnknownEvent,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.fold import RunView, apply, fold
from yunlu.runs.states import LEGAL_MOVES, RunState, replay_move

STEPS = st.integers(0, 9)
EVENTS = st.one_of(
    st.builds(
        StateChanged,
        state=st.sampled_from(list(RunState)),
        resumed_from_step=st.none() | STEPS,
        at=st.floats(0, 100),
    ),
    st.builds(lambda at: sample(AttemptStarted, at=at), st.floats(0, 100)),
    st.builds(lambda step: sample(Evaluated, step=step), STEPS),
    st.builds(lambda step: sample(CheckpointSaved, step=step), STEPS),
    st.builds(lambda step, to: RolledBack(step=step, to_step=to), STEPS, STEPS),
    st.builds(
        lambda step, redone: sample(WorkerGroupFormed, from_step=step, redone_steps=redone),
        STEPS,
        st.integers(0, 2),
    ),
    st.just(sample(WorkerLost)),
    st.just(ErrorRaised(code="training", message="m")),
    st.just(sample(PlanMade)),
    st.just(UnknownEvent(kind="teleport", at=1.0, content={}, problem="")),
)


@given(st.lists(EVENTS, max_size=20), st.integers(0, 20))
def test_folding_in_two_parts_is_folding_at_once(events, cut):
    view = fold(events[:cut])
    for event in events[cut:]:
        view = apply(view, event)
    assert view == fold(events)


@given(st.lists(EVENTS, max_size=20), st.randoms(use_true_random=False))
def test_a_log_that_lost_lines_still_folds(events, chance: random.Random):
    kept = [event for event in events if chance.random() < 0.7]
    view = fold(kept)
    assert view.events == len(kept)
    assert len(view.attempts) == sum(isinstance(event, AttemptStarted) for event in kept)


@given(st.lists(st.sampled_from(list(RunState)), max_size=12))
def test_the_state_is_that_of_the_replayed_moves(states):
    expected = RunState.PENDING
    for state in states:
        expected = replay_move(expected, state)
    assert fold(StateChanged(state=state) for state in states).state is expected


@given(st.lists(st.sampled_from(list(RunState)), max_size=12), st.sampled_from(list(RunState)))
def test_a_finished_run_stays_finished(before, after):
    states = [*before, RunState.FINISHED, after]
    assert fold(StateChanged(state=state) for state in states).state is RunState.FINISHED


def test_the_workers_word_is_believed_though_a_line_before_it_is_missing():
    # Without "planning", which the crash took.
    view = fold([StateChanged(state="pending"), StateChanged(state="running")])
    assert RunState.RUNNING not in LEGAL_MOVES[RunState.PENDING]
    assert view.state is RunState.RUNNING


def test_what_others_infer_does_not_wake_a_run_that_has_ended():
    view = fold(StateChanged(state=state) for state in ("failed", "lost", "stopping"))
    assert view.state is RunState.FAILED


def attempt(number, at, resumed_from=None):
    yield sample(AttemptStarted, number=number, at=at, began_at=at - 1)
    yield StateChanged(state="running", at=at + 1, resumed_from_step=resumed_from)


def test_a_resume_undoes_what_lies_after_its_checkpoint():
    events = [*attempt(1, 10.0)]
    for step in (10, 20, 30):
        events += [sample(Evaluated, step=step), sample(CheckpointSaved, step=step)]
    events += [StateChanged(state="lost", at=500.0), StateChanged(state="pending", at=600.0)]
    events += attempt(2, 700.0, resumed_from=20)
    view = fold(events)
    assert [event.step for event in view.evaluations] == [10, 20]
    assert [event.step for event in view.checkpoints] == [10, 20]
    assert view.status.step == 20
    first, second = view.attempts
    assert (first.resumed_from, second.resumed_from) == (None, 20)
    assert (second.started_at, second.began_at) == (699.0, 700.0)


def test_an_attempt_ends_with_its_own_last_event():
    at = [*attempt(1, 10.0), sample(CheckpointSaved, at=15.0)]
    view = fold([*at, StateChanged(state="lost", at=9000.0)])
    assert view.attempts[0].last_event_at == 15.0


def test_a_later_attempt_that_starts_over_undoes_everything():
    events = [*attempt(1, 10.0), sample(Evaluated, step=10), *attempt(2, 50.0)]
    view = fold(events)
    assert view.evaluations == ()
    assert view.attempts[1].resumed_from == 0


def test_a_worker_group_that_redoes_steps_undoes_only_what_came_before_the_fault():
    events = [
        *attempt(1, 10.0),
        sample(WorkerGroupFormed, generation=1),
        sample(Evaluated, step=30, loss=1.0),
        sample(WorkerLost),
        sample(Evaluated, step=30, loss=2.0),  # the first step of the new generation
        sample(WorkerGroupFormed, generation=2, from_step=20, redone_steps=10),
    ]
    view = fold(events)
    assert [event.loss for event in view.evaluations] == [2.0]
    assert [group.key for group in view.worker_groups] == [(1, 1), (1, 2)]
    (lost,) = view.lost_workers
    assert (lost.attempt, lost.struck) == (1, (1, 1))


def test_a_new_attempt_clears_the_error():
    failed = [ErrorRaised(code="data", message="no such file"), StateChanged(state="failed")]
    view = fold([*attempt(1, 1.0), *failed])
    assert view.error is not None
    assert view.status.error == "no such file"
    view = apply(view, StateChanged(state="pending"))
    assert (view.error, view.status.error, len(view.errors)) == (None, None, 1)


def test_an_event_that_is_not_understood_changes_nothing_but_the_count():
    view = fold([StateChanged(state="pending", at=1.0)])
    after = apply(view, UnknownEvent(kind="teleport", at=1.0, content={}, problem=""))
    assert after == view.model_copy(update={"events": 2})


def test_the_first_event_dates_the_run():
    view = fold([StateChanged(state="pending", at=5.0), sample(StepSkipped, at=7.0)])
    assert (view.status.created_at, view.status.updated_at) == (5.0, 7.0)


@pytest.mark.parametrize("best", ["accuracy", "unheard of"])
def test_the_headline_is_the_metric_that_the_plan_watches_else_the_first(best):
    plan = sample(PlanMade, best_metric=best)
    view = fold([plan, sample(Evaluated, metrics={"f1": 0.3, "accuracy": 0.9})])
    expected = ("accuracy", 0.9) if best == "accuracy" else ("f1", 0.3)
    assert (view.status.metric, view.status.metric_value) == expected


def test_no_events_is_a_pending_run():
    assert fold([]) == RunView()
