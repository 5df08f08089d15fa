"""Our own method: what it does with a place, and what it says of a trial."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from yunlu.lab.tuning_replay import replay
from yunlu.spec.search import SearchSpec
from yunlu.tuning.encoding import Encoder
from yunlu.tuning.methods.factory import make_method
from yunlu.tuning.methods.frontier import Frontier
from yunlu.tuning.space import key_of
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

    from yunlu.tuning.values import Action, Params

RATE = Dimension(name="rate", low=1e-5, high=1.0, log=True)
WIDTH = Dimension(name="width", low=8, high=512, log=True, is_int=True)
DROP = Dimension(name="drop", low=0.0, high=1.0)
SPACE = (RATE, WIDTH, DROP)
RUNGS = 16


@dataclass(frozen=True)
class Bowl:
    """Losses that fall to a level which is lowest in one place; wide networks take longer."""

    dimensions: tuple[Dimension, ...] = SPACE
    rungs: int = RUNGS
    unit: float = 1.0

    def curve(self, params: Params) -> tuple[Sequence[float], Sequence[float]]:
        """Diverges where the rate is high."""
        row = Encoder(self.dimensions).encode([params])[0]
        rate, drop = float(row[0]), float(row[-1])
        level = (rate - 0.6) ** 2 + 0.3 * (drop - 0.3) ** 2
        rungs = np.arange(1, self.rungs + 1)
        values = self.unit * (level + (0.2 + 0.5 * abs(rate - 0.6)) / rungs)
        if rate > 0.85:
            values[2:] = math.nan
        return values.tolist(), (rungs * (1.0 + 3.0 * row[1])).tolist()


def test_it_finds_better_settings_than_chance_does() -> None:
    curves = Bowl()
    found = [
        replay(Frontier(SPACE, seed=seed), curves, workers=4, budget_s=120.0).improvements()[-1][1]
        for seed in (0, 1)
    ]
    rng = np.random.default_rng(0)
    trained_s, drawn = 0.0, [math.inf]
    while trained_s < 2.0 * 4 * 120.0:  # twice the time that ours had
        values, seconds = curves.curve(Encoder(SPACE).sample(rng, 1)[0])
        drawn.append(min(_finite(values)))
        trained_s += seconds[-1]
    assert max(found) < min(drawn)


def test_the_same_stand_gets_the_same_answer_from_a_method_that_was_just_made() -> None:
    checked = _Checked(seed=3)
    replay(checked, Bowl(), workers=3, budget_s=100.0)
    assert checked.choices > 5
    assert checked.verdicts > 5


def test_the_unit_of_the_metric_makes_no_difference() -> None:
    small, large = (
        replay(Frontier(SPACE, seed=5), Bowl(unit=unit), workers=2, budget_s=100.0)
        for unit in (1.0, 1024.0)
    )
    assert [t.params for t in small.trials] == [t.params for t in large.trials]
    assert [t.rung for t in small.trials] == [t.rung for t in large.trials]


def test_of_a_space_with_an_end_every_setting_is_tried_once_and_the_best_to_its_end() -> None:
    space = (replace(RATE, choices=(1e-4, 1e-3, 1e-2)), replace(DROP, choices=(0.0, 0.3, 0.9)))
    search = SearchSpec.model_validate({"space": {each.name: [1, 2] for each in space}})
    method = make_method(search, space, seed=0)
    trace = replay(method, Bowl(dimensions=space), workers=2, budget_s=10_000.0)
    assert len(trace.trials) == len({key_of(each.params) for each in trace.trials}) == 9
    best = min(trace.trials, key=lambda trial: trial.points[-1].value)
    assert best.rung == RUNGS
    assert trace.reason == "every setting was tried"


def test_a_value_that_is_not_a_number_ends_the_trial() -> None:
    snapshot = _snapshot([_trial(0, [1.0, math.nan], TrialState.RUNNING, until=9)])
    assert Frontier(SPACE, seed=0).judge(0, snapshot).verdict is Verdict.PRUNE


def test_below_its_goal_a_trial_goes_on_unasked() -> None:
    snapshot = _snapshot([_trial(0, [1.0], TrialState.RUNNING, until=4)])
    assert Frontier(SPACE, seed=0).judge(0, snapshot) == Judgement(Verdict.GO_ON, until=4)


def test_who_takes_the_lead_goes_on_and_who_is_last_is_given_up() -> None:
    others = [_trial(n, [1.0 + n / 100], TrialState.HELD) for n in range(12)]
    good = _snapshot([*others, _trial(12, [0.5], TrialState.RUNNING, until=1)])
    bad = _snapshot([*others, _trial(12, [2.0], TrialState.RUNNING, until=1)])
    method = Frontier(SPACE, seed=0)
    assert method.judge(12, good).verdict is Verdict.GO_ON
    assert method.judge(12, good).until > 1
    assert method.judge(12, bad).verdict is Verdict.PRUNE


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.PRUNED])
def test_trials_that_told_nothing_are_survived(state: TrialState) -> None:
    silent = [_trial(n, [], state) for n in range(12)]
    assert isinstance(Frontier(SPACE, seed=0).choose(_snapshot(silent)), StartTrial)
    endless = [_trial(n, [math.inf, math.nan], state) for n in range(12)]
    assert isinstance(Frontier(SPACE, seed=0).choose(_snapshot(endless)), StartTrial)
    mixed = [*silent, *(_trial(12 + n, [1.0, 0.5 + n], TrialState.HELD) for n in range(4))]
    assert isinstance(Frontier(SPACE, seed=0).choose(_snapshot(mixed)), StartTrial | Continue)


def test_where_no_more_may_begin_held_trials_go_on() -> None:
    held = [_trial(n, [1.0, 0.5 + n], TrialState.HELD) for n in range(6)]
    move = Frontier(SPACE, seed=0).choose(_snapshot(held, trials_left=0))
    assert isinstance(move, Continue)
    assert move.until > 2


def test_where_nothing_is_left_it_waits_for_who_runs_and_then_ends() -> None:
    done = [_trial(n, [1.0] * RUNGS, TrialState.DONE) for n in range(3)]
    last = _trial(3, [1.0], TrialState.RUNNING, until=RUNGS)
    method = Frontier(SPACE, seed=0)
    assert isinstance(method.choose(_snapshot([*done, last], trials_left=0)), WaitForResults)
    assert isinstance(method.choose(_snapshot(done, trials_left=0)), EndStudy)


def test_nothing_begins_that_could_not_even_be_evaluated_once() -> None:
    done = [_trial(n, [1.0 + n] * RUNGS, TrialState.DONE) for n in range(12)]
    method = Frontier(SPACE, seed=0)
    assert isinstance(method.choose(_snapshot(done, seconds_left=0.01)), EndStudy)
    assert isinstance(method.choose(_snapshot(done, seconds_left=100.0)), StartTrial)


def test_only_what_is_allowed_begins() -> None:
    def allowed(params: Params) -> bool:
        return _number(params, "drop") < 0.2

    method = Frontier(SPACE, seed=0, allowed=allowed)
    trace = replay(method, Bowl(), workers=2, budget_s=100.0)
    assert len(trace.trials) > 10
    assert all(allowed(trial.params) for trial in trace.trials)


def test_constraints_that_nothing_fulfils_end_the_study() -> None:
    move = Frontier(SPACE, seed=0, allowed=lambda _: False).choose(_snapshot([]))
    assert isinstance(move, EndStudy)
    assert "constraints" in move.reason


def test_earlier_studies_say_where_to_begin() -> None:
    past = [_trial(n, [2.0, 1.0 + abs(n - 7)], TrialState.DONE) for n in range(20)]
    past = [replace(trial, params={**trial.params, "gone": 1.0}) for trial in past]
    move = Frontier(SPACE, seed=0, past=past).choose(_snapshot([]))
    assert isinstance(move, StartTrial)
    assert set(move.params) == {"rate", "width", "drop"}
    for name, value in move.params.items():
        assert value == pytest.approx(past[7].params[name])
    trace = replay(Frontier(SPACE, seed=0, past=past), Bowl(), workers=2, budget_s=60.0)
    assert len(trace.trials) > 5


def test_beliefs_weigh_on_what_begins() -> None:
    sure = (replace(RATE, likely=(-2.0, 0.2)), WIDTH, DROP)
    far = {True: 0, False: 0}
    trace = replay(Frontier(sure, seed=0), Bowl(dimensions=sure), workers=2, budget_s=100.0)
    for trial in trace.trials:
        far[abs(math.log10(_number(trial.params, "rate")) + 2.0) > 0.6] += 1
    assert far[False] > far[True]


def test_choices_and_conditions_are_searched() -> None:
    space = (
        RATE,
        Dimension(name="kind", choices=("sgd", "adam", "lion")),
        Dimension(name="nesterov", choices=(True, False), when={"kind": ("sgd",)}),
        DROP,
    )
    trace = replay(Frontier(space, seed=0), Bowl(dimensions=space), workers=2, budget_s=60.0)
    assert {trial.params["kind"] for trial in trace.trials} == {"sgd", "adam", "lion"}
    for trial in trace.trials:
        assert ("nesterov" in trial.params) == (trial.params["kind"] == "sgd")


def test_one_rung_makes_it_plain_search() -> None:
    trace = replay(Frontier(SPACE, seed=0), Bowl(rungs=1), workers=2, budget_s=30.0)
    assert all(t.rung == 1 or t.state is TrialState.RUNNING for t in trace.trials)
    assert len(trace.trials) > 10


class _Checked:
    """Asks a method that was just made as well, now and then."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._method = Frontier(SPACE, seed=seed)
        self._asked = 0
        self.choices = 0
        self.verdicts = 0

    def choose(self, snapshot: StudySnapshot) -> Action:
        move = self._method.choose(snapshot)
        self._asked += 1
        if self._asked % 5 == 0:
            assert Frontier(SPACE, seed=self._seed).choose(snapshot) == move
            self.choices += 1
        return move

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        judgement = self._method.judge(number, snapshot)
        self._asked += 1
        if self._asked % 5 == 0:
            assert Frontier(SPACE, seed=self._seed).judge(number, snapshot) == judgement
            self.verdicts += 1
        return judgement


def _trial(number: int, values: list[float], state: TrialState, until: int = 0) -> Trial:
    params = Encoder(SPACE).sample(np.random.default_rng(number), 1)[0]
    points = tuple(Point(at, (value,), float(at)) for at, value in enumerate(values, 1))
    return Trial(number=number, params=params, state=state, points=points, until=until)


def _snapshot(
    trials: list[Trial], *, trials_left: int | None = None, seconds_left: float | None = None
) -> StudySnapshot:
    return StudySnapshot(
        trials=trials, rungs=RUNGS, trials_left=trials_left, seconds_left=seconds_left, workers=2
    )


def _number(params: Params, name: str) -> float:
    value = params[name]
    assert isinstance(value, int | float)
    return value


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
