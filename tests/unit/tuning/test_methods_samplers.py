"""Ways of finding settings: inside the space, allowed, the same after a restart."""

from __future__ import annotations

import logging
import math
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.core.errors import JobError, MissingPartError
from yunlu.lab.tuning_replay import replay
from yunlu.spec.search import SearchSpec, read_constraint
from yunlu.tuning.methods.factory import (
    make_method,
    name_method,
)
from yunlu.tuning.methods.optuna_samplers import OptunaSampler, distribution_of
from yunlu.tuning.methods.samplers import (
    CmaEsSampler,
    GridSampler,
    RandomSampler,
    SettingDraws,
    SobolSampler,
    list_settings,
)
from yunlu.tuning.space import drop_absent, key_of, list_values, make_dimensions
from yunlu.tuning.values import (
    Dimension,
    EndStudy,
    Point,
    StartTrial,
    StudySnapshot,
    Trial,
    TrialState,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.values import Action, Judgement, Method, Params

SPACE: dict[str, Any] = {
    "lr": {"low": 1e-4, "high": 1e-1, "log": True, "likely": 3e-3},
    "units": "8 .. 256 log",
    "drop": "0.0 .. 0.65 step 0.1",
    "name": ["sgd", "adam", "lamb"],
    "momentum": {"low": 0.1, "high": 0.9, "when": {"name": ["sgd", "lamb"]}},
    "nesterov": {"choice": [True, False], "when": {"name": "sgd"}},
    "hidden": [[64], [128, 64]],
}
CONSTRAINTS = ["lr * units < 5", "momentum > 0.2 or drop < 0.3"]


def search(**options: Any) -> SearchSpec:
    return SearchSpec.model_validate({"space": SPACE, **options})


def allows(params: Params) -> bool:
    return all(read_constraint(text).holds(params) for text in CONSTRAINTS)


def value_of(params: Params) -> float:
    lr, units = float(params["lr"] or 0), float(params["units"] or 0)
    other = 0.2 * (params["name"] != "adam") + float(params.get("momentum") or 0.0)
    return (math.log10(lr) + 2) ** 2 + (math.log2(units) - 6) ** 2 / 9 + other


def check_inside(params: Params, dimensions: Sequence[Dimension]) -> None:
    by_name = {dimension.name: dimension for dimension in dimensions}
    assert params.keys() <= by_name.keys()
    assert drop_absent(params, dimensions) == params
    for name, dimension in by_name.items():
        exists = all(params.get(parent) in values for parent, values in dimension.when.items())
        assert (name in params) == exists, name
    for name, value in params.items():
        dimension = by_name[name]
        if dimension.choices:
            assert repr(value) in {repr(choice) for choice in dimension.choices}
            continue
        assert isinstance(value, int if dimension.is_int else float)
        assert dimension.low <= value <= dimension.high
        if dimension.step:
            assert value in list_values(dimension)


def make_stand(numbers: int, seed: int, dimensions: Sequence[Dimension]) -> StudySnapshot:
    """A study somewhere in its middle."""
    rng = random.Random(seed)
    draws = SettingDraws(dimensions, allows)
    trials: list[Trial] = []
    for number in range(numbers):
        params = draws.draw(rng.randrange(2**31), set())
        assert params is not None
        state = rng.choice([*TrialState, TrialState.DONE, TrialState.DONE])
        rung = {TrialState.WAITING: 0, TrialState.DONE: 9}.get(state, rng.randrange(9))
        noise = rng.choice([0.0, 0.0, 0.0, math.nan, math.inf])
        points = tuple(
            Point(r, (value_of(params) + 1 / r + noise, float(r)), float(r))
            for r in range(1, rung + 1)
        )
        trials.append(
            Trial(number=number, params=params, state=state, points=points, until=max(rung, 1))
        )
    return StudySnapshot(trials=trials, rungs=9, workers=4)


NAMES = ["random", "sobol", "tpe", "cmaes", "nsga2"]


def make_sampler(name: str, dimensions: Sequence[Dimension], seed: int) -> Sampler:
    draws = SettingDraws(dimensions, allows)
    if name in {"tpe", "gp", "nsga2"}:
        return OptunaSampler(name, draws, seed=seed, population=8)  # type: ignore[arg-type]
    return {"random": RandomSampler, "sobol": SobolSampler, "cmaes": CmaEsSampler}[name](
        draws, seed=seed
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(numbers=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_every_setting_lies_inside_its_space_and_keeps_the_constraints(
    name: str, numbers: int, seed: int
) -> None:
    dimensions = make_dimensions(search())
    snapshot = make_stand(numbers, seed, dimensions)
    params = make_sampler(name, dimensions, seed).suggest(snapshot)
    assert params is not None
    check_inside(params, dimensions)
    assert allows(params)
    assert make_sampler(name, dimensions, seed).suggest(snapshot) == params


@pytest.mark.slow
def test_gaussian_processes_keep_to_the_space_and_learn() -> None:
    pytest.importorskip("torch", reason="Optuna's Gaussian processes compute with torch")
    dimensions = make_dimensions(search())
    snapshot = make_stand(30, 5, dimensions)
    params = make_sampler("gp", dimensions, 1).suggest(snapshot)
    assert params is not None
    check_inside(params, dimensions)
    assert allows(params)
    assert make_sampler("gp", dimensions, 1).suggest(snapshot) == params
    assert params != make_sampler("random", dimensions, 1).suggest(snapshot)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Dimension, ...]:
    """Any dimensions, some of them under conditions."""
    found: list[Dimension] = []
    for place in range(draw(st.integers(1, 4))):
        name = f"d{place}"
        when: dict[str, Any] = {}
        parents = [d for d in found if d.choices]
        if parents and draw(st.booleans()):
            parent = draw(st.sampled_from(parents))
            size = draw(st.integers(1, len(parent.choices)))
            when = {parent.name: parent.choices[:size]}
        kind = draw(st.sampled_from(["choice", "int", "float", "log", "logint", "step"]))
        low = draw(st.integers(1, 50))
        width = draw(st.integers(0, 100))
        numbers: dict[str, Any] = {"low": float(low), "high": float(low + width)}
        forms: dict[str, dict[str, Any]] = {
            "choice": {"choices": ("a", 1, 2.5, None, False, "[1]")[: 1 + width % 6]},
            "int": numbers | {"is_int": True},
            "float": numbers,
            "log": {"low": low / 1000, "high": float(low + width), "log": True},
            "logint": numbers | {"is_int": True, "log": True},
            "step": {"low": low / 10, "high": low / 10 + 1.0 + width / 7, "step": 0.3},
        }
        found.append(Dimension(name=name, when=when, **forms[kind]))
    return tuple(found)


@settings(max_examples=40, deadline=None)
@given(dimensions=spaces(), name=st.sampled_from(NAMES), seed=st.integers(0, 2**31))
def test_any_space_is_kept_to(dimensions: tuple[Dimension, ...], name: str, seed: int) -> None:
    draws = SettingDraws(dimensions)
    if name == "cmaes" and not any(
        not d.choices and not d.when and d.low < d.high for d in dimensions
    ):
        return
    trials: list[Trial] = []
    for number in range(12):
        params = draws.draw(seed + number, set())
        assert params is not None
        check_inside(params, dimensions)
        points = (Point(1, (float(number % 5),), 1.0),)
        trials.append(Trial(number=number, params=params, state=TrialState.DONE, points=points))
    sampler: Any = (
        OptunaSampler(name, draws, seed=seed, population=4)  # type: ignore[arg-type]
        if name in {"tpe", "nsga2"}
        else {"random": RandomSampler, "sobol": SobolSampler, "cmaes": CmaEsSampler}[name](
            draws, seed=seed
        )
    )
    params = sampler.suggest(StudySnapshot(trials=trials, rungs=1))
    if params is not None:
        check_inside(params, dimensions)
    else:
        settings_left = list_settings(dimensions)
        tried = {key_of(trial.params) for trial in trials}
        assert all(key_of(left) in tried for left in settings_left)


class Recorded:
    """Curves whose value follows from the setting."""

    rungs = 9

    def __init__(self, dimensions: tuple[Dimension, ...]) -> None:
        self.dimensions = dimensions

    def curve(self, params: Params) -> tuple[Sequence[float], Sequence[float]]:
        value = value_of(params)
        wave = 0.3 * math.sin(50 * value)
        return [value + (1 + wave) / r for r in range(1, 10)], [float(r) for r in range(1, 10)]


class Watched:
    """Notes each question and its answer."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.moves: list[tuple[StudySnapshot, Action]] = []
        self.judgement: list[tuple[int, StudySnapshot, Judgement]] = []

    def choose(self, snapshot: StudySnapshot) -> Action:
        move = self._method.choose(snapshot)
        self.moves.append((snapshot, move))
        return move

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        judgement = self._method.judge(number, snapshot)
        self.judgement.append((number, snapshot, judgement))
        return judgement


@pytest.mark.parametrize(
    ("method", "stop"),
    [
        ("grid", "none"),
        ("random", "asha"),
        ("sobol", "hyperband"),
        ("tpe", "asha"),
        ("tpe", "median"),
        ("cmaes", "patience"),
        ("nsga2", "none"),
    ],
)
def test_a_method_made_anew_answers_as_the_one_that_saw_it_all(method: str, stop: str) -> None:
    space = dict(SPACE)
    if method == "grid":
        space |= {"lr": "1e-4 .. 1e-1 log count 4", "units": [8, 64], "drop": [0.0, 0.5]}
        space |= {"momentum": {"choice": [0.1, 0.3], "when": {"name": "sgd"}}}
    request = search(space=space, method=method, stop=stop, first=[{"lr": 0.01}, {"name": "adam"}])
    dimensions = make_dimensions(request)

    def make() -> Method:
        return make_method(request, dimensions, seed=7, allowed=allows)

    watched = Watched(make())
    trace = replay(watched, Recorded(dimensions), workers=3, budget_s=70)
    assert len(trace.trials) > 20
    assert trace.trials[0].params["lr"] == 0.01
    assert trace.trials[1].params["name"] == "adam"
    for trial in trace.trials:
        check_inside(trial.params, dimensions)
        assert allows(trial.params)
    for snapshot, move in watched.moves[::9]:
        assert make().choose(snapshot) == move
    for number, snapshot, judgement in watched.judgement[::9]:
        assert make().judge(number, snapshot) == judgement


def test_a_grid_tries_every_setting_once_and_then_ends() -> None:
    request = search(
        space={
            "name": ["a", "b"],
            "x": "1 .. 3",
            "y": {"low": 0.5, "high": 1.0, "step": 0.25, "when": {"name": "a"}},
            "lr": "1e-3 .. 1e-1 log count 3",
        },
        method="grid",
    )
    dimensions = make_dimensions(request)
    method = make_method(request, dimensions, seed=3)
    trials: list[Trial] = []
    while isinstance(move := method.choose(StudySnapshot(trials=trials, rungs=5)), StartTrial):
        assert move.until == 5
        point = Point(5, (1.0,), 1.0)
        trials.append(
            Trial(number=len(trials), params=move.params, state=TrialState.DONE, points=(point,))
        )
    assert move == EndStudy("every setting was tried")
    assert len(trials) == 3 * 3 * 3 + 3 * 3
    assert len({key_of(trial.params) for trial in trials}) == len(trials)
    assert {round(math.log10(float(t.params["lr"] or 1))) for t in trials} == {-3, -2, -1}
    running = [*trials[:-1], replace(trials[-1], state=TrialState.RUNNING)]
    assert method.choose(StudySnapshot(trials=running, rungs=5)) == WaitForResults()


def test_a_small_space_is_searched_without_repeats_and_ends() -> None:
    dimensions = (
        Dimension(name="a", choices=("x", "y", "z")),
        Dimension(name="b", low=1, high=4, is_int=True),
    )
    for name in ("random", "sobol", "tpe", "cmaes"):
        sampler: Any = (
            OptunaSampler("tpe", SettingDraws(dimensions), seed=1)
            if name == "tpe"
            else {"random": RandomSampler, "sobol": SobolSampler, "cmaes": CmaEsSampler}[name](
                SettingDraws(dimensions), seed=1
            )
        )
        trials: list[Trial] = []
        while (params := sampler.suggest(StudySnapshot(trials=trials, rungs=1))) is not None:
            point = Point(1, (float(len(trials)),), 1.0)
            number = len(trials)
            trials.append(
                Trial(number=number, params=params, state=TrialState.DONE, points=(point,))
            )
        assert len(trials) == 12, name
        assert len({key_of(trial.params) for trial in trials}) == 12


def test_an_endless_or_huge_grid_is_refused() -> None:
    free = Dimension(name="train.optimizer.lr", low=1e-4, high=0.1, log=True)
    with pytest.raises(JobError) as caught:
        GridSampler((free,), seed=0)
    assert caught.value.message == (
        "search.method: grid tries every setting, but train.optimizer.lr may be any number."
    )
    wide = [Dimension(name=name, low=1, high=1000, is_int=True) for name in "ab"]
    with pytest.raises(JobError) as caught:
        GridSampler(wide, seed=0)
    assert caught.value.message == (
        "search.method: a grid of 1,000,000 settings is more than 100,000."
    )


def test_an_evolution_of_words_is_refused() -> None:
    request = search(space={"name": ["a", "b"]}, method="cmaes")
    with pytest.raises(JobError, match="no field has a range that always exists"):
        make_method(request, make_dimensions(request), seed=0)


@pytest.mark.parametrize(
    ("options", "objectives", "said"),
    [
        ({}, 1, "frontier"),
        ({}, 2, "tpe"),
        ({"stop": "asha"}, 1, "random, asha"),
        ({"stop": "median"}, 1, "tpe, median"),
        ({"stop": "none"}, 1, "tpe"),
        ({"stop": "pbt"}, 1, "random, pbt"),
        ({"method": "tpe"}, 1, "tpe, asha"),
        ({"method": "tpe"}, 2, "tpe"),
        ({"method": "gp"}, 1, "gp"),
        ({"method": "grid"}, 1, "grid"),
    ],
)
def test_what_auto_stands_for(options: dict[str, Any], objectives: int, said: Any) -> None:
    name, stop = name_method(search(**options), objectives)
    assert (name if stop.name in {"auto", "none"} else f"{name}, {stop.name}") == said


@pytest.mark.parametrize(("name", "share"), [("tpe", 0.7), ("nsga2", 0.9), ("cmaes", 0.9)])
def test_what_was_learned_is_used(name: str, share: float) -> None:
    """Suggestions after many trials are better than draws; both sums are of fixed seeds."""
    dimensions = make_dimensions(search())
    draws = SettingDraws(dimensions)
    trials: list[Trial] = []
    for number in range(60):
        params = draws.draw(number, set())
        assert params is not None
        points = (Point(1, (value_of(params),), 1.0),)
        trials.append(Trial(number=number, params=params, state=TrialState.DONE, points=points))
    drawn = sum(value_of(trial.params) for trial in trials) / 60
    sampler = make_sampler(name, dimensions, 3)
    found: list[float] = []
    for _ in range(15):
        params = sampler.suggest(StudySnapshot(trials=trials, rungs=1))
        assert params is not None
        found.append(value_of(params))
        # Running, so that the next suggestion is another.
        trials.append(Trial(number=len(trials), params=params, state=TrialState.RUNNING))
    assert sum(found) / 15 < share * drawn


def test_earlier_trials_are_learned_from_where_they_fit() -> None:
    dimensions = make_dimensions(search())
    draws = SettingDraws(dimensions)
    past: list[Trial] = []
    for number in range(40):
        params = draws.draw(number, set())
        assert params is not None
        points = (Point(1, (value_of(params),), 1.0),)
        past.append(Trial(number=number, params=params, state=TrialState.DONE, points=points))
    foreign = replace(past[0], params={**past[0].params, "lr": 7.0})
    empty = StudySnapshot(trials=(), rungs=1)
    plain = OptunaSampler("tpe", draws, seed=1).suggest(empty)
    warm = OptunaSampler("tpe", draws, seed=1, past=past).suggest(empty)
    also = OptunaSampler("tpe", draws, seed=1, past=[*past, foreign]).suggest(empty)
    assert plain != warm == also


def test_first_settings_bring_what_they_depend_on():
    request = search(method="random", stop="none", first=[{"nesterov": True, "momentum": 0.777}])
    move = make_method(request, make_dimensions(request), seed=0).choose(
        StudySnapshot(trials=(), rungs=3)
    )
    assert isinstance(move, StartTrial)
    assert (move.params["name"], move.params["momentum"]) == ("sgd", 0.777)
    assert move.params["nesterov"] is True


def test_beliefs_draw_settings_near_them_but_not_all() -> None:
    believed = Dimension(name="x", low=1e-5, high=1.0, log=True, likely=(-2.0, 0.25))
    drawn = [SettingDraws((believed,)).draw(seed, set()) for seed in range(300)]
    near = sum(
        params is not None and 10**-2.5 <= float(params["x"] or 0) <= 10**-1.5 for params in drawn
    )
    assert 0.7 * 300 < near < 0.95 * 300


def test_several_objectives_fall_together() -> None:
    space = {"x": "0.0 .. 1.0", "y": "0.0 .. 1.0"}
    for name in ("tpe", "nsga2"):
        request = search(space=space, objectives=["loss", "cost"], method=name, trials=80)
        dimensions = make_dimensions(request)
        method = make_method(request, dimensions, seed=2, objectives=2)
        trials: list[Trial] = []
        for number in range(80):
            move = method.choose(StudySnapshot(trials=trials, rungs=1, objectives=2))
            assert isinstance(move, StartTrial)
            x, y = float(move.params["x"] or 0), float(move.params["y"] or 0)
            points = (Point(1, (x * x + y, (1 - x) ** 2 + y), 1.0),)
            trials.append(
                Trial(number=number, params=move.params, state=TrialState.DONE, points=points)
            )
        early, late = trials[:20], trials[60:]

        def height(part: list[Trial]) -> float:
            return sum(float(trial.params["y"] or 0) for trial in part) / len(part)

        assert height(late) < 0.8 * height(early), name


def test_optuna_neither_speaks_nor_is_silenced(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("optuna")
    before = (logger.level, list(logger.handlers), list(logger.filters))
    dimensions = make_dimensions(search())
    for name in ("tpe", "nsga2"):
        make_sampler(name, dimensions, 0).suggest(make_stand(30, 1, dimensions))
    assert capfd.readouterr() == ("", "")
    assert (logger.level, list(logger.handlers), list(logger.filters)) == before
    assert not caplog.records


def test_missing_packages_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = search(method="tpe")
    dimensions = make_dimensions(request)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yunlu.tuning.methods.optuna_samplers", None)
        with pytest.raises(MissingPartError) as caught:
            make_method(request, dimensions, seed=0)
    assert str(caught.value) == (
        "The method tpe needs the package optuna, which is not installed.\n"
        '  → pip install "yunlu[tune]"'
    )
    monkeypatch.setattr("yunlu.tuning.methods.samplers.find_spec", {}.get)
    monkeypatch.setattr("yunlu.tuning.methods.optuna_samplers.find_spec", {}.get)
    for name, package in (("cmaes", "cmaes"), ("gp", "torch")):
        with pytest.raises(
            MissingPartError, match=f"The method {name} needs the package {package}"
        ):
            make_method(search(method=name), dimensions, seed=0)


def test_steps_that_do_not_fill_the_range_are_no_trouble_to_optuna() -> None:
    dimension = Dimension(name="x", low=0.1, high=0.75, step=0.2)
    distribution: Any = distribution_of(dimension)
    assert (distribution.low, distribution.high, distribution.step) == (0.1, 0.7, 0.2)
