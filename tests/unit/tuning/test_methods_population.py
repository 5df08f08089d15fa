"""Training in a population: copies of the best, varied, take the place of the worst."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.spec.search import SearchSpec
from yunlu.tuning.methods.factory import make_method
from yunlu.tuning.methods.population import PopulationBasedTraining, is_variable
from yunlu.tuning.methods.samplers import RandomSampler, SettingDraws
from yunlu.tuning.space import drop_absent, make_dimensions
from yunlu.tuning.values import (
    Continue,
    Dimension,
    EndStudy,
    Point,
    StartTrial,
    StudySnapshot,
    Trial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from yunlu.tuning.values import Action, Method

SPACE: dict[str, Any] = {
    "train.optimizer.lr": "1e-4 .. 1e-1 log",
    "train.batch": [8, 16, 32, 64],
    "train.optimizer.momentum": {"low": 0.1, "high": 0.9, "when": {"train.optimizer.name": "sgd"}},
    "train.optimizer.name": ["sgd", "adam"],
    "model.args.hidden": "8 .. 64",
}
RUNGS = 7


def value_of(trial: Trial) -> float:
    return abs(float(trial.params["train.optimizer.lr"] or 0) - 0.01)


class Stage:
    """Obeys a method with some workers, and can copy."""

    def __init__(self, method: Method, workers: int) -> None:
        self.method, self.workers = method, workers
        self.trials: list[Trial] = []
        self.moves: list[tuple[StudySnapshot, Action]] = []

    def snapshot(self) -> StudySnapshot:
        return StudySnapshot(trials=tuple(self.trials), rungs=RUNGS, workers=self.workers)

    def running(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state is TrialState.RUNNING]

    def play(self) -> str:
        while True:
            while len(self.running()) < self.workers:
                snapshot = self.snapshot()
                move = self.method.choose(snapshot)
                self.moves.append((snapshot, move))
                if isinstance(move, EndStudy):
                    return move.reason
                if isinstance(move, WaitForResults):
                    assert self.running()
                    break
                self.make(move)
            self.evaluate(self.running()[0])

    def make(self, move: Action) -> None:
        if isinstance(move, Continue):
            trial = self.trials[move.number]
            assert trial.state is TrialState.HELD
            assert move.until > trial.rung
            self.trials[move.number] = replace(trial, state=TrialState.RUNNING, until=move.until)
            return
        assert isinstance(move, StartTrial)
        points: tuple[Point, ...] = ()
        if move.copy_from:
            model = self.trials[move.copy_from[0]]
            assert model.state is TrialState.HELD  # its checkpoint is there
            assert model.rung == move.copy_from[1]
        self.trials.append(
            Trial(
                number=len(self.trials),
                params=move.params,
                state=TrialState.RUNNING,
                points=points,
                until=move.until,
                copied_from=move.copy_from,
            )
        )

    def evaluate(self, trial: Trial) -> None:
        start = trial.copied_from[1] if trial.copied_from else 0
        rung = max(trial.rung, start) + 1
        point = Point(rung, (value_of(trial),), float(rung))
        trial = replace(trial, points=(*trial.points, point))
        self.trials[trial.number] = trial
        if rung == RUNGS:
            self.trials[trial.number] = replace(trial, state=TrialState.DONE)
        elif self.method.judge(trial.number, self.snapshot()).verdict is Verdict.HOLD:
            self.trials[trial.number] = replace(trial, state=TrialState.HELD)


def make(seed: int, **stop: Any) -> tuple[Method, tuple[Dimension, ...]]:
    search = SearchSpec.model_validate({"space": SPACE, "stop": {"name": "pbt", **stop}})
    dimensions = make_dimensions(search)
    return make_method(search, dimensions, seed=seed), dimensions


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    workers=st.integers(1, 9),
    population=st.integers(2, 9),
    every=st.integers(1, 4),
)
def test_a_population_stays_as_large_and_ends_trained(
    seed: int, workers: int, population: int, every: int
) -> None:
    method, dimensions = make(seed, population=population, every=every)
    stage = Stage(method, workers)
    assert stage.play() == f"the population of {population} is trained"
    done = [trial for trial in stage.trials if trial.state is TrialState.DONE]
    assert len(done) == population
    copies = max(population // 4, 1) * len(range(every, RUNGS, every))
    assert len(stage.trials) == population + copies
    by_name = {dimension.name: dimension for dimension in dimensions}
    for trial in stage.trials:
        assert drop_absent(trial.params, dimensions) == trial.params
        assert 1e-4 <= float(trial.params["train.optimizer.lr"] or 0) <= 1e-1
        assert trial.params["train.batch"] in by_name["train.batch"].choices
        if trial.copied_from:
            model = stage.trials[trial.copied_from[0]]
            for name in ("model.args.hidden", "train.optimizer.name"):
                assert trial.params[name] == model.params[name]
    for snapshot, move in stage.moves[::5]:  # as if the study had been killed there
        again, _ = make(seed, population=population, every=every)
        assert again.choose(snapshot) == move


def test_the_best_are_copied_and_the_worst_stay_behind() -> None:
    method, _ = make(0, population=4, every=2)
    stage = Stage(method, 4)
    stage.play()
    founders = stage.trials[:4]
    ranked = sorted(founders, key=lambda trial: trial.points[1].value)
    copy = stage.trials[4]
    assert copy.copied_from == (ranked[0].number, 2)
    assert copy.params != ranked[0].params
    worst = ranked[-1]
    assert (worst.state, worst.rung) == (TrialState.HELD, 2)


def test_a_population_that_loses_members_goes_on_without_them() -> None:
    method, _ = make(0, population=4, every=2)
    stage = Stage(method, 4)
    for _ in range(4):
        stage.make(method.choose(stage.snapshot()))
    stage.trials[2] = replace(stage.trials[2], state=TrialState.FAILED)
    assert stage.play() == "the population of 3 is trained"


def test_without_trials_left_nobody_is_copied() -> None:
    draws = SettingDraws((Dimension(name="train.l2", low=0.0, high=1.0),))
    method = PopulationBasedTraining(RandomSampler(draws, seed=0), draws.dimensions, seed=0, size=4)
    trials = [
        Trial(
            number=number,
            params={"train.l2": 0.5},
            state=TrialState.HELD,
            points=(Point(1, (float(number),), 1.0),),
            until=1,
        )
        for number in range(4)
    ]
    free = method.choose(StudySnapshot(trials=trials, rungs=3))
    assert isinstance(free, StartTrial)
    assert free.copy_from == (0, 1)
    assert method.choose(StudySnapshot(trials=trials, rungs=3, trials_left=0)) == Continue(0, 2)


def test_only_what_a_checkpoint_survives_is_varied() -> None:
    assert is_variable("train.optimizer.lr")
    for name in ("model.args.hidden", "data.max_length", "train.optimizer.name", "train.epochs"):
        assert not is_variable(name)
