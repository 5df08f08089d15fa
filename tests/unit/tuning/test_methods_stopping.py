"""Rules of early stopping: who goes on, who is held, who is given up."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.lab.tuning_replay import replay
from yunlu.tuning.methods.samplers import RandomSampler, SettingDraws
from yunlu.tuning.methods.stopping import (
    MedianStopping,
    NoStopping,
    PatienceStopping,
    SamplerWithStopping,
    SuccessiveHalving,
)
from yunlu.tuning.values import (
    Continue,
    Dimension,
    EndStudy,
    Judgement,
    Point,
    StartTrial,
    StudySnapshot,
    Trial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.methods.stopping import Stopping
    from yunlu.tuning.values import Action, Params

X = (Dimension(name="x", low=0.0, high=1.0),)


def trial(
    number: int, values: Sequence[float], state: TrialState = TrialState.HELD, until: int = 0
) -> Trial:
    points = tuple(Point(rung, (value,), float(rung)) for rung, value in enumerate(values, start=1))
    return Trial(
        number=number,
        params={"x": 0.5},
        state=state,
        points=points,
        until=until or max(len(points), 1),
    )


def snapshot(*trials: Trial, rungs: int = 27, **facts: Any) -> StudySnapshot:
    return StudySnapshot(trials=trials, rungs=rungs, **facts)


class Curves:
    """Curves that cross: a late bloomer looks bad at first."""

    dimensions = X

    def __init__(self, rungs: int) -> None:
        self.rungs = rungs

    def curve(self, params: Params) -> tuple[Sequence[float], Sequence[float]]:
        x = float(params["x"] or 0)
        values = [x + math.sin(40 * x) / rung for rung in range(1, self.rungs + 1)]
        return values, [(1 + x) * rung for rung in range(1, self.rungs + 1)]


class Counted(SamplerWithStopping):
    """Checks after every question that no rung has let too many go on."""

    def __init__(self, halving: SuccessiveHalving, *, eta: int, seed: int) -> None:
        super().__init__(RandomSampler(SettingDraws(X), seed=seed), halving)
        self.halving = halving
        self.eta = eta
        self.questions = 0

    def choose(self, snapshot: StudySnapshot) -> Action:
        move = super().choose(snapshot)
        self.check(snapshot, move.number if isinstance(move, Continue) else None)
        return move

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        judgement = super().judge(number, snapshot)
        goes_on = (
            judgement.verdict is Verdict.GO_ON and judgement.until > snapshot.trials[number].rung
        )
        self.check(snapshot, number if goes_on else None)
        return judgement

    def check(self, snapshot: StudySnapshot, rising: int | None) -> None:
        self.questions += 1
        brackets = {self.halving.bracket_of(t.number, snapshot.rungs) for t in snapshot.trials}
        for bracket in brackets:
            rivals = [
                t
                for t in snapshot.trials
                if self.halving.bracket_of(t.number, snapshot.rungs) == bracket
            ]
            for rung in self.halving.milestones(rivals[0].number, snapshot.rungs)[:-1]:
                came = sum(t.rung >= rung for t in rivals)
                gone = sum(
                    t.rung > rung or t.until > rung or (t.number == rising and t.rung == rung)
                    for t in rivals
                )
                assert gone <= came // self.eta


@settings(max_examples=20, deadline=None)
@given(
    eta=st.integers(2, 4),
    first=st.integers(1, 3),
    brackets=st.sampled_from([1, 2, None]),
    rungs=st.integers(1, 40),
    workers=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_no_rung_ever_lets_more_than_one_in_eta_go_on(
    *, eta: int, first: int, brackets: int | None, rungs: int, workers: int, seed: int
) -> None:
    method = Counted(SuccessiveHalving(eta=eta, first=first, brackets=brackets), eta=eta, seed=seed)
    trace = replay(method, Curves(rungs), workers=workers, budget_s=100)
    assert method.questions
    ladders = {
        trial.number: method.halving.milestones(trial.number, rungs) for trial in trace.trials
    }
    for each in trace.trials:
        assert each.until in ladders[each.number]
        if each.state is TrialState.HELD:
            assert each.rung == each.until


def test_the_best_of_a_rung_goes_on_from_where_it_was_held() -> None:
    rule = SuccessiveHalving(eta=3)
    assert rule.milestones(0, 27) == [1, 3, 9, 27]
    assert rule.first_until(5, 27) == 1
    held = [trial(0, [3.0]), trial(1, [1.0]), trial(2, [2.0])]
    assert rule.promote(snapshot(*held[:2])) is None
    assert rule.promote(snapshot(*held)) == Continue(1, 3)
    gone = [held[0], trial(1, [1.0], TrialState.RUNNING, until=3), held[2]]
    assert rule.promote(snapshot(*gone)) is None
    # The one that arrives as the best goes on at once, without being held.
    arriving = [*held[:2], trial(2, [0.5], TrialState.RUNNING)]
    judgement = rule.judge(arriving[2], snapshot(*arriving))
    assert (judgement.verdict, judgement.until) == (Verdict.GO_ON, 3)
    assert rule.judge(held[0], snapshot(*held)).verdict is Verdict.HOLD
    # Between two rungs it just goes on.
    between = trial(0, [3.0, 2.0], TrialState.RUNNING, until=3)
    assert rule.judge(between, snapshot(between)) == Judgement(Verdict.GO_ON, until=3)


def test_higher_rungs_are_served_first_and_failures_never_rise() -> None:
    rule = SuccessiveHalving(eta=2)
    high = [trial(n, [1.0, float(n)]) for n in range(2)]
    low = [trial(n, [0.5]) for n in range(2, 6)]
    assert rule.promote(snapshot(*high, *low, rungs=8)) == Continue(0, 4)
    failed = [
        trial(0, [0.0], TrialState.FAILED),
        trial(1, [1.0]),
        trial(2, [math.nan]),
        trial(3, [2.0]),
    ]
    assert rule.promote(snapshot(*failed, rungs=8)) == Continue(1, 2)


def test_hyperbands_brackets_begin_later_and_take_fewer() -> None:
    rule = SuccessiveHalving(eta=3, brackets=None)
    round_of = [rule.bracket_of(number, 27) for number in range(49)]
    assert Counter(round_of) == {0: 27, 1: 12, 2: 6, 3: 4}
    assert round_of == [rule.bracket_of(number, 27) for number in range(49, 98)]
    assert [rule.milestones(n, 27) for n in (0, 27, 39, 45)] == [
        [1, 3, 9, 27],
        [3, 9, 27],
        [9, 27],
        [27],
    ]


def test_when_nothing_may_begin_the_best_held_one_is_finished() -> None:
    method = SamplerWithStopping(RandomSampler(SettingDraws(X), seed=0), SuccessiveHalving(eta=3))
    held = [trial(0, [3.0, 2.0, 2.0]), trial(1, [1.0]), trial(2, [2.0])]
    assert method.choose(snapshot(*held, trials_left=0)) == Continue(0, 27)
    done = [trial(0, [1.0] * 27, TrialState.DONE), *held[1:]]
    assert method.choose(snapshot(*done, trials_left=0)) == EndStudy("all 3 trials were made")
    running = [held[0], trial(1, [1.0], TrialState.RUNNING, until=3), held[2]]
    assert method.choose(snapshot(*running, trials_left=0)) == WaitForResults()
    assert method.choose(snapshot(*running, trials_left=1, seconds_left=0.0)) == EndStudy(
        "the deadline has passed"
    )


def test_without_a_rule_every_trial_is_trained_whole() -> None:
    method = SamplerWithStopping(RandomSampler(SettingDraws(X), seed=0), NoStopping())
    move = method.choose(snapshot(rungs=9))
    assert isinstance(move, StartTrial)
    assert move.until == 9
    running = trial(0, [math.nan], TrialState.RUNNING, until=9)
    assert method.judge(0, snapshot(running, rungs=9)) == Judgement(Verdict.GO_ON, until=9)
    # Somebody held it (a stop, a full machine): it is not forgotten.
    assert method.choose(snapshot(trial(0, [1.0]), rungs=9)) == Continue(0, 9)


def test_the_median_gives_up_who_is_worse_than_the_middle() -> None:
    rule = MedianStopping(first=2, trials=3)
    others = [trial(n, [float(n), float(n)], TrialState.DONE) for n in range(1, 4)]

    def verdict(*values: float) -> Verdict:
        judgement = trial(0, values, TrialState.RUNNING, until=9)
        return rule.judge(judgement, snapshot(judgement, *others, rungs=9)).verdict

    assert verdict(9.0) is Verdict.GO_ON  # before the first rung that counts
    assert verdict(9.0, 2.0) is Verdict.GO_ON
    assert verdict(2.0, 9.0) is Verdict.GO_ON  # its best counts
    assert verdict(9.0, 2.1) is Verdict.PRUNE
    assert verdict(math.nan, math.nan) is Verdict.PRUNE
    del others[0]
    assert verdict(9.0, 9.0) is Verdict.GO_ON  # too few to compare with


def test_patience_gives_up_who_no_longer_improves() -> None:
    rule = PatienceStopping(patience=2, min_delta=0.1)

    def verdict(*values: float) -> Verdict:
        judgement = trial(0, values, TrialState.RUNNING, until=9)
        return rule.judge(judgement, snapshot(judgement, rungs=9)).verdict

    assert verdict(3.0, 2.0, 1.95) is Verdict.GO_ON
    assert verdict(3.0, 2.0, 1.95, 1.91) is Verdict.PRUNE
    assert verdict(3.0, 2.0, 1.95, 1.85) is Verdict.GO_ON
    assert verdict(math.nan, math.nan) is Verdict.PRUNE


@pytest.mark.parametrize(
    "rule",
    [MedianStopping(), PatienceStopping(), SuccessiveHalving(), SuccessiveHalving(brackets=None)],
)
def test_rules_run_in_the_replay_and_save_training(rule: Stopping) -> None:
    curves = Curves(27)
    whole = replay(
        SamplerWithStopping(RandomSampler(SettingDraws(X), seed=4), NoStopping()),
        curves,
        workers=4,
        budget_s=400,
    )
    early = replay(
        SamplerWithStopping(RandomSampler(SettingDraws(X), seed=4), rule),
        curves,
        workers=4,
        budget_s=400,
    )
    assert len(early.trials) > 1.2 * len(whole.trials)
