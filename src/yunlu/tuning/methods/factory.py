"""Builds the search method from its spec."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, missing_part
from yunlu.core.imports import SAMPLERS, call_with, import_object, load_registered, names_object
from yunlu.spec.search import SEVERAL, encode_value
from yunlu.tuning.methods.population import PopulationBasedTraining
from yunlu.tuning.methods.samplers import GridSampler, Sampler, SettingDraws, mix_seed
from yunlu.tuning.methods.stopping import (
    MedianStopping,
    NoStopping,
    PatienceStopping,
    SamplerWithStopping,
    SuccessiveHalving,
)
from yunlu.tuning.values import EndStudy, Method, StartTrial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.search import SearchSpec, StopSpec
    from yunlu.tuning.methods.optuna_samplers import OptunaSampler
    from yunlu.tuning.methods.stopping import Stopping
    from yunlu.tuning.values import (
        Action,
        Dimension,
        Judgement,
        Params,
        StudySnapshot,
        Trial,
    )

_STOPS_EARLY = ("random", "sobol", "tpe")
"""Methods that ``stop: auto`` combines with ASHA: the others need values of whole trainings."""
_SAMPLER_OPTIONS = "draws, seed, objectives, past and search"


def make_method(
    search: SearchSpec,
    dimensions: tuple[Dimension, ...],
    *,
    seed: int,
    objectives: int = 1,
    allowed: Callable[[Params], bool] | None = None,
    past: Sequence[Trial] = (),
) -> Method:
    """Build the method of a search.

    Args:
        search: Its spec.
        dimensions: What varies.
        seed: Decides every random choice.
        objectives: How many values each evaluation has.
        allowed: Whether a setting may be tried.
        past: Trials of earlier studies, over, with values of the same objectives.
    """
    name, stop = name_method(search, objectives)
    draws = SettingDraws(dimensions, allowed)
    result = _open_sampler(
        name, draws=draws, seed=seed, objectives=objectives, past=past, search=search
    )
    if isinstance(result, Method):
        if stop.name not in {"auto", "none"}:
            raise JobError(
                f"search.stop: {name} judges itself how far each trial is trained.",
                hint="leave out search.stop",
            )
        return _with_first(search, result, draws, seed)
    if stop.name == "pbt":
        method: Method = PopulationBasedTraining(
            result,
            dimensions,
            seed=seed,
            size=stop.population,
            every=stop.every,
            share=stop.share,
            allowed=allowed,
        )
    else:
        method = SamplerWithStopping(result, _make_stopping(stop))
    return _with_first(search, method, draws, seed)


def name_method(search: SearchSpec, objectives: int = 1) -> tuple[str, StopSpec]:
    """Resolve ``auto``: name of the method, and early-stopping rule."""
    name, stop = search.method, search.stop
    if name == "auto":
        if objectives > 1:
            name = "tpe"
        elif stop.name == "auto":
            name = "frontier"
        else:
            # Comparing early needs many trials; modelling them needs whole ones.
            name = "random" if stop.name in {"asha", "hyperband", "pbt"} else "tpe"
    if stop.name == "auto" and name != "frontier":
        stops_early = name in _STOPS_EARLY and objectives == 1
        stop = stop.model_copy(update={"name": "asha" if stops_early else "none"})
    return name, stop


def _open_sampler(name: str, *, objectives: int, **options: Any) -> Sampler | Method:
    """Make a sampler by name, with the options that its factory declares."""
    if names_object(name):
        factory = import_object(name)
    else:
        factory = load_registered(SAMPLERS, name, kind="sampler")
    declared = signature(factory).parameters
    if objectives > 1 and name not in SEVERAL and "objectives" not in declared:
        raise JobError(
            f"search.method: {name} has one objective, and this search has {objectives}.",
            hint="take tpe or nsga2, or name one metric",
        )
    if options["past"] and "past" not in declared:
        raise JobError(
            f"search.warm_start: {name} does not learn from earlier trials.",
            hint="take frontier or tpe, or leave it out",
        )
    result = call_with(factory, objectives=objectives, **options)
    if isinstance(result, Method | Sampler):
        return result
    raise JobError(
        f"search.method: {name} is not a sampler: it has no method suggest(snapshot).",
        hint=f"its factory may take {_SAMPLER_OPTIONS}; see yunlu.testing.samplers",
    )


def make_grid(draws: SettingDraws, *, seed: int, search: SearchSpec) -> Sampler:
    """Every setting of the grid that the search describes."""
    points = {field: spec.count for field, spec in search.space.items() if spec.count}
    return GridSampler(draws.dimensions, seed=seed, points=points, allowed=draws.allowed)


def make_tpe(
    draws: SettingDraws, *, seed: int, objectives: int = 1, past: Sequence[Trial] = ()
) -> Sampler:
    """Optuna's tree-structured Parzen estimator."""
    return _optuna("tpe")("tpe", draws, seed=seed, objectives=objectives, past=past)


def make_gp(
    draws: SettingDraws, *, seed: int, objectives: int = 1, past: Sequence[Trial] = ()
) -> Sampler:
    """Optuna's Gaussian processes."""
    return _optuna("gp")("gp", draws, seed=seed, objectives=objectives, past=past)


def make_nsga2(
    draws: SettingDraws,
    *,
    seed: int,
    search: SearchSpec,
    objectives: int = 1,
    past: Sequence[Trial] = (),
) -> Sampler:
    """Optuna's NSGA-II, with a quarter of the trials in a generation."""
    population = min(max((search.trials or 64) // 4, 4), 50)
    return _optuna("nsga2")(
        "nsga2", draws, seed=seed, objectives=objectives, past=past, population=population
    )


def make_frontier(draws: SettingDraws, *, seed: int, past: Sequence[Trial] = ()) -> Method:
    """Our own method, which also judges how far each trial is trained."""
    from yunlu.tuning.methods.frontier import Frontier  # noqa: PLC0415 - of this method alone

    method = Frontier(draws.dimensions, seed=seed, allowed=draws.allowed, past=past)
    return NoRepeats(method, draws, seed=seed) if draws.is_finite else method


def _optuna(name: str) -> type[OptunaSampler]:
    try:
        from yunlu.tuning.methods.optuna_samplers import OptunaSampler  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_part("optuna", "tune", f"The method {name}") from None
    return OptunaSampler


def _make_stopping(stop: StopSpec) -> Stopping:
    match stop.name:
        case "median":
            return MedianStopping(first=stop.first, trials=stop.trials)
        case "asha":
            return SuccessiveHalving(eta=stop.eta, first=stop.first)
        case "hyperband":
            return SuccessiveHalving(eta=stop.eta, first=stop.first, brackets=None)
        case "patience":
            return PatienceStopping(patience=stop.patience, min_delta=stop.min_delta)
        case _:
            return NoStopping()


class NoRepeats:
    """Never suggest a setting of a finite space twice; end when none is left."""

    def __init__(self, method: Method, draws: SettingDraws, *, seed: int) -> None:
        """``method`` may repeat settings."""
        self._method = method
        self._draws = draws
        self._seed = seed

    def choose(self, snapshot: StudySnapshot) -> Action:
        """The method's action, with a new setting."""
        left = self._find_left(snapshot)
        if left is None:
            move = self._method.choose(replace(snapshot, trials_left=0))
            return EndStudy("every setting was tried") if isinstance(move, EndStudy) else move
        move = self._method.choose(snapshot)
        if not isinstance(move, StartTrial):
            return move
        is_new = self._draws.accepts(move.params, self._draws.taken(snapshot.trials))
        return move if is_new else replace(move, params=left)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """By the method; where nothing new is left, no trial has to make room."""
        has_new = self._find_left(snapshot) is not None
        return self._method.judge(number, snapshot if has_new else replace(snapshot, trials_left=0))

    def _find_left(self, snapshot: StudySnapshot) -> Params | None:
        seed = mix_seed(self._seed, len(snapshot.trials))
        return self._draws.draw(seed, self._draws.taken(snapshot.trials))


class EnqueuedFirst:
    """Settings that the user enqueued first, then those of the method."""

    def __init__(
        self, settings: list[Params], method: Method, draws: SettingDraws, *, seed: int
    ) -> None:
        """What a setting leaves out is drawn."""
        self._settings = settings
        self._method = method
        self._draws = draws
        self._seed = seed

    def choose(self, snapshot: StudySnapshot) -> Action:
        """The method says when, the user what."""
        move = self._method.choose(snapshot)
        number = len(snapshot.trials)
        if number >= len(self._settings) or not isinstance(move, StartTrial) or move.copy_from:
            return move
        params = self._draws.draw(mix_seed(self._seed, number), set(), self._settings[number])
        return move if params is None else replace(move, params=params)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """By the method."""
        return self._method.judge(number, snapshot)


def _with_first(search: SearchSpec, method: Method, draws: SettingDraws, seed: int) -> Method:
    if not search.first:
        return method
    settings: list[Params] = [
        {name: encode_value(value) for name, value in setting.items()} for setting in search.first
    ]
    return EnqueuedFirst(settings, method, draws, seed=seed)
