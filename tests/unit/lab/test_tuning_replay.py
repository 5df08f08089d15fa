"""Studies on recorded curves: who trains when, what is asked, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.lab.tuning_replay import ReplayTrace, replay
from yunlu.tuning.values import (
    Action,
    Continue,
    Dimension,
    EndStudy,
    Judgement,
    Params,
    StartTrial,
    StudySnapshot,
    TrialState,
    Verdict,
    WaitForResults,
)

Judge = Callable[[int, StudySnapshot], Judgement]


@dataclass(frozen=True)
class Recorded:
    """A trial's value falls by 1 at each rung from ``start``; each rung takes ``pace`` seconds."""

    rungs: int = 4
    dimensions: tuple[Dimension, ...] = (
        Dimension(name="start", low=0, high=100),
        Dimension(name="pace", low=0, high=100),
    )

    def curve(self, params: Params) -> tuple[list[float], list[float]]:
        start, pace = float(params["start"] or 0), float(params["pace"] or 0)
        steps = range(1, self.rungs + 1)
        return [start - step for step in steps], [pace * step for step in steps]


def go_on(_number: int, _snapshot: StudySnapshot) -> Judgement:
    return Judgement(Verdict.GO_ON)


@dataclass
class Scripted:
    """Answers with the moves of a list, then ends."""

    moves: Iterator[Action]
    judge_by: Judge = go_on
    stands: list[StudySnapshot] = field(default_factory=list[StudySnapshot])

    def choose(self, snapshot: StudySnapshot) -> Action:
        self.stands.append(snapshot)
        return next(self.moves, EndStudy("script is over"))

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        return self.judge_by(number, snapshot)


def begin(*, start: float = 10, pace: float = 1, until: int = 4) -> StartTrial:
    return StartTrial({"start": start, "pace": pace}, until)


def play(
    *moves: Action,
    judge: Judge = go_on,
    workers: int = 1,
    budget_s: float = 100,
    resume_s: float = 0,
) -> ReplayTrace:
    method = Scripted(iter(moves), judge)
    return replay(method, Recorded(), workers=workers, budget_s=budget_s, resume_s=resume_s)


def times(trace: ReplayTrace, number: int) -> list[tuple[int, float]]:
    return [(each.rung, each.at_s) for each in trace.evaluations if each.number == number]


def test_a_trial_is_evaluated_at_the_recorded_pace() -> None:
    trace = play(begin(start=10, pace=2.5))
    assert times(trace, 0) == [(1, 2.5), (2, 5.0), (3, 7.5), (4, 10.0)]
    assert [point.value for point in trace.trials[0].points] == [9, 8, 7, 6]
    assert trace.trials[0].points[2].seconds == 7.5
    assert trace.trials[0].state is TrialState.DONE
    assert trace.ended_at_s == 10.0
    assert trace.reason == "script is over"


def test_workers_train_side_by_side_and_a_free_one_is_asked_at_once() -> None:
    trace = play(begin(pace=1), begin(pace=2), begin(pace=1), workers=2)
    assert times(trace, 0)[-1] == (4, 4.0)
    assert times(trace, 1)[-1] == (4, 8.0)
    assert times(trace, 2) == [(1, 5.0), (2, 6.0), (3, 7.0), (4, 8.0)]


def test_what_comes_at_the_end_of_the_time_counts_and_what_comes_later_is_lost() -> None:
    trace = play(begin(pace=1.0), begin(pace=1.5), workers=2, budget_s=3.0)
    assert times(trace, 0) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert times(trace, 1) == [(1, 1.5), (2, 3.0)]
    assert trace.trials[0].state is TrialState.RUNNING
    assert trace.ended_at_s == 3.0


def test_a_held_trial_goes_on_where_it_stood() -> None:
    trace = play(begin(pace=2, until=2), begin(pace=1, until=1), Continue(0, 4))
    assert times(trace, 0) == [(1, 2.0), (2, 4.0), (3, 7.0), (4, 9.0)]
    assert times(trace, 1) == [(1, 5.0)]
    assert trace.trials[1].state is TrialState.HELD
    assert trace.resumed == 1


def test_going_on_costs_what_was_said_once() -> None:
    trace = play(begin(until=2), Continue(0, 4), resume_s=0.5)
    assert times(trace, 0) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_a_verdict_may_hold_before_the_trial_has_come_so_far() -> None:
    trace = play(begin(until=4), judge=lambda _number, _snapshot: Judgement(Verdict.HOLD))
    assert trace.trials[0].state is TrialState.HELD
    assert trace.trials[0].rung == 1


def test_a_verdict_may_let_a_trial_run_further() -> None:
    trace = play(begin(until=1), judge=lambda _number, _snapshot: Judgement(Verdict.GO_ON, until=3))
    assert trace.trials[0].state is TrialState.HELD
    assert trace.trials[0].rung == 3
    assert trace.resumed == 0


def test_a_pruned_trial_frees_its_place_and_never_goes_on() -> None:
    def prune_first(number: int, _snapshot: StudySnapshot) -> Judgement:
        return Judgement(Verdict.PRUNE if number == 0 else Verdict.GO_ON)

    trace = play(begin(), begin(), judge=prune_first)
    assert times(trace, 0) == [(1, 1.0)]
    assert times(trace, 1)[0] == (1, 2.0)
    assert trace.trials[0].state is TrialState.PRUNED
    with pytest.raises(ValueError, match="trial 0 is pruned"):
        play(begin(), Continue(0, 4), judge=prune_first)


def test_the_last_rung_is_judged_by_nobody() -> None:
    judgement: list[int] = []

    def note(number: int, snapshot: StudySnapshot) -> Judgement:
        judgement.append(snapshot.trials[number].rung)
        return Judgement(Verdict.GO_ON)

    play(begin(), judge=note)
    assert judgement == [1, 2, 3]


def test_who_waits_is_asked_again_after_the_next_evaluation() -> None:
    method = Scripted(iter([begin(pace=2), WaitForResults(), WaitForResults(), begin(pace=1)]))
    trace = replay(method, Recorded(), workers=2, budget_s=100)
    assert times(trace, 1)[0] == (1, 5.0)
    assert [len(snapshot.trials) for snapshot in method.stands] == [0, 1, 1, 1, 2]
    assert [snapshot.trials[0].rung for snapshot in method.stands[1:4]] == [0, 1, 2]


def test_waiting_while_nothing_runs_is_a_mistake_that_is_told() -> None:
    with pytest.raises(RuntimeError, match="no trial runs"):
        play(WaitForResults())


def test_a_running_trial_may_be_let_further_while_a_place_is_free() -> None:
    trace = play(begin(until=1), Continue(0, 4), begin(pace=3), workers=2)
    assert times(trace, 0)[-1] == (4, 4.0)
    assert times(trace, 1)[0] == (1, 3.0)
    assert trace.resumed == 0


def test_nothing_new_begins_after_the_end_but_running_trials_finish() -> None:
    trace = play(begin(), EndStudy("enough"), begin(), workers=2)
    assert trace.reason == "enough"
    assert len(trace.trials) == 1
    assert trace.trials[0].state is TrialState.DONE


@pytest.mark.parametrize("move", [begin(until=0), StartTrial({"start": 1, "pace": 1}, 1, (0, 1))])
def test_impossible_beginnings_are_refused(move: StartTrial) -> None:
    with pytest.raises(ValueError, match=r"rung 0|copied checkpoint"):
        play(move)


def test_without_workers_nothing_is_replayed() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        play(begin(), workers=0)


def test_the_stand_tells_the_time_left_and_the_workers() -> None:
    method = Scripted(iter([begin(pace=2), begin(pace=5)]))
    replay(method, Recorded(), workers=1, budget_s=20)
    assert [snapshot.seconds_left for snapshot in method.stands] == [20.0, 12.0]
    assert {snapshot.workers for snapshot in method.stands} == {1}
    assert {snapshot.rungs for snapshot in method.stands} == {4}


def test_improvements_are_the_best_so_far() -> None:
    trace = play(begin(start=10, pace=1), begin(start=9, pace=3), workers=2)
    assert trace.improvements() == [(1, 9), (2, 8), (3, 7), (4, 6), (12, 5)]


@dataclass
class Erratic:
    """Any legal answer, by chance."""

    rng: np.random.Generator

    def choose(self, snapshot: StudySnapshot) -> Action:
        held = [trial for trial in snapshot.trials if trial.state is TrialState.HELD]
        is_busy = any(trial.state is TrialState.RUNNING for trial in snapshot.trials)
        if is_busy and self.rng.random() < 0.2:
            return WaitForResults()
        if held and self.rng.random() < 0.5:
            trial = held[int(self.rng.integers(len(held)))]
            return Continue(trial.number, int(self.rng.integers(trial.rung + 1, 9)))
        start, pace = self.rng.random(2)
        return begin(start=float(start), pace=0.1 + float(pace), until=int(self.rng.integers(1, 9)))

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        assert snapshot.trials[number].state is TrialState.RUNNING
        verdict = self.rng.choice(np.asarray(list(Verdict), dtype=object))
        return Judgement(verdict, until=int(self.rng.integers(0, 9)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), workers=st.integers(1, 5))
def test_whatever_a_method_does_time_and_rungs_add_up(seed: int, workers: int) -> None:
    def run() -> ReplayTrace:
        erratic = Erratic(np.random.default_rng(seed))
        return replay(erratic, Recorded(rungs=8), workers=workers, budget_s=20)

    trace = run()
    assert trace == run()
    assert [each.at_s for each in trace.evaluations] == sorted(
        each.at_s for each in trace.evaluations
    )
    assert all(each.at_s <= 20 for each in trace.evaluations)
    spans: list[tuple[float, float]] = []
    for trial in trace.trials:
        assert [point.rung for point in trial.points] == list(range(1, trial.rung + 1))
        pace = float(trial.params["pace"] or 0)
        spans += [(at_s - pace, at_s) for _, at_s in times(trace, trial.number)]
    for began, _ in spans:
        training = sum(1 for first, last in spans if first <= began + 1e-9 < last - 1e-9)
        assert training <= workers
