"""Builds the search method from its spec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError, missing_part
from yunlu.spec.search import encode_value
from yunlu.tuning.methods.grid import GridSampler
from yunlu.tuning.methods.population import PopulationBasedTraining
from yunlu.tuning.methods.samplers import (
    CmaEsSampler,
    RandomSampler,
    SettingDraws,
    SobolSampler,
    mix_seed,
)
from yunlu.tuning.methods.stopping import (
    MedianStopping,
    NoStopping,
    PatienceStopping,
    SamplerWithStopping,
    SuccessiveHalving,
)
from yunlu.tuning.values import EndStudy, StartTrial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.search import SearchSpec, StopSpec
    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.methods.stopping import Stopping
    from yunlu.tuning.values import (
        Action,
        Dimension,
        Judgement,
        Method,
        Params,
        StudySnapshot,
        Trial,
    )

_STOPS_EARLY = ("random", "sobol", "tpe")
"""Methods that ``stop: auto`` combines with ASHA: the others need values of whole trainings."""


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
    if name == "frontier":
        from yunlu.tuning.methods.frontier import Frontier  # noqa: PLC0415 - of this method alone

        method: Method = Frontier(dimensions, seed=seed, allowed=allowed, past=past)
        draws = SettingDraws(dimensions, allowed)
        method = NoRepeats(method, draws, seed=seed) if draws.is_finite else method
        return _with_first(search, method, draws, seed)
    draws = SettingDraws(dimensions, allowed)
    sampler = _make_sampler(name, search, draws, seed=seed, objectives=objectives, past=past)
    if stop.name == "pbt":
        method = PopulationBasedTraining(
            sampler,
            dimensions,
            seed=seed,
            size=stop.population,
            every=stop.every,
            share=stop.share,
            allowed=allowed,
        )
    else:
        method = SamplerWithStopping(sampler, _make_stopping(stop))
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


def _make_sampler(
    name: str,
    search: SearchSpec,
    draws: SettingDraws,
    *,
    seed: int,
    objectives: int,
    past: Sequence[Trial],
) -> Sampler:
    match name:
        case "grid":
            points = {field: spec.count for field, spec in search.space.items() if spec.count}
            return GridSampler(draws.dimensions, seed=seed, points=points, allowed=draws.allowed)
        case "random":
            return RandomSampler(draws, seed=seed)
        case "sobol":
            return SobolSampler(draws, seed=seed)
        case "cmaes":
            if not any(not d.choices and not d.when and d.low < d.high for d in draws.dimensions):
                raise JobError(
                    "search.method: cmaes varies numbers, but no field has a range that always exists.",
                    hint="take tpe, or grid",
                )
            return CmaEsSampler(draws, seed=seed, past=past)
        case "tpe" | "gp" | "nsga2":
            try:
                from yunlu.tuning.methods.optuna_samplers import OptunaSampler  # noqa: PLC0415
            except ModuleNotFoundError:
                raise missing_part("optuna", "tune", f"The method {name}") from None
            population = min(max((search.trials or 64) // 4, 4), 50)
            return OptunaSampler(
                name,
                draws,
                seed=seed,
                objectives=objectives,
                past=past,
                population=population,
            )
        case _:
            raise AssertionError(name)


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
