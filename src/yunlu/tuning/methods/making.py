"""From the words of a search to the method that searches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError, missing_part
from yunlu.spec.search import encode_value
from yunlu.tuning.methods.listed import Listed
from yunlu.tuning.methods.population import Population
from yunlu.tuning.methods.samplers import CmaEs, Draws, Random, Sobol, mix_seed
from yunlu.tuning.methods.stopping import Composed, Halving, Median, Patience, Whole
from yunlu.tuning.values import Begin, End

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.search import SearchSpec, StopSpec
    from yunlu.tuning.methods.samplers import Sampler
    from yunlu.tuning.methods.stopping import Stopping
    from yunlu.tuning.values import Dimension, Judged, Method, Move, Params, Stand, Trial

_STOPS_EARLY = ("random", "sobol", "tpe")
"""Methods that ``stop: auto`` lets ASHA work with: the others need values of whole trainings."""


def make_method(
    search: SearchSpec,
    dimensions: tuple[Dimension, ...],
    *,
    seed: int,
    objectives: int = 1,
    allowed: Callable[[Params], bool] | None = None,
    past: Sequence[Trial] = (),
) -> Method:
    """The method that a search asks for.

    Args:
        search: What is asked.
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
        draws = Draws(dimensions, allowed)
        method = Once(method, draws, seed=seed) if draws.is_finite else method
        return _with_first(search, method, draws, seed)
    draws = Draws(dimensions, allowed)
    sampler = _make_sampler(name, search, draws, seed=seed, objectives=objectives, past=past)
    if stop.name == "pbt":
        method = Population(
            sampler,
            dimensions,
            seed=seed,
            size=stop.population,
            every=stop.every,
            share=stop.share,
            allowed=allowed,
        )
    else:
        method = Composed(sampler, _make_stopping(stop))
    return _with_first(search, method, draws, seed)


def name_method(search: SearchSpec, objectives: int = 1) -> tuple[str, StopSpec]:
    """What ``auto`` stands for: the method's name, and the rule that stops trials early."""
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
    draws: Draws,
    *,
    seed: int,
    objectives: int,
    past: Sequence[Trial],
) -> Sampler:
    match name:
        case "grid":
            points = {field: spec.count for field, spec in search.space.items() if spec.count}
            return Listed(draws.dimensions, seed=seed, points=points, allowed=draws.allowed)
        case "random":
            return Random(draws, seed=seed)
        case "sobol":
            return Sobol(draws, seed=seed)
        case "cmaes":
            if not any(not d.choices and not d.when and d.low < d.high for d in draws.dimensions):
                raise JobError(
                    "search.method: cmaes varies numbers, but no field has a range that always exists.",
                    hint="take tpe, or grid",
                )
            return CmaEs(draws, seed=seed, past=past)
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
            return Median(first=stop.first, trials=stop.trials)
        case "asha":
            return Halving(eta=stop.eta, first=stop.first)
        case "hyperband":
            return Halving(eta=stop.eta, first=stop.first, brackets=None)
        case "patience":
            return Patience(patience=stop.patience, min_delta=stop.min_delta)
        case _:
            return Whole()


class Once:
    """Of a space with an end, no setting comes twice: another one instead, until none is left."""

    def __init__(self, method: Method, draws: Draws, *, seed: int) -> None:
        """``method`` thinks of settings as if there were always another one."""
        self._method = method
        self._draws = draws
        self._seed = seed

    def choose(self, stand: Stand) -> Move:
        """What the method would do, with a setting that is new."""
        left = self._find_left(stand)
        if left is None:
            move = self._method.choose(replace(stand, trials_left=0))
            return End("every setting was tried") if isinstance(move, End) else move
        move = self._method.choose(stand)
        if not isinstance(move, Begin):
            return move
        is_new = self._draws.accepts(move.params, self._draws.taken(stand.trials))
        return move if is_new else replace(move, params=left)

    def judge(self, number: int, stand: Stand) -> Judged:
        """By the method; where nothing new is left, nobody has to make room for it."""
        has_new = self._find_left(stand) is not None
        return self._method.judge(number, stand if has_new else replace(stand, trials_left=0))

    def _find_left(self, stand: Stand) -> Params | None:
        seed = mix_seed(self._seed, len(stand.trials))
        return self._draws.draw(seed, self._draws.taken(stand.trials))


class First:
    """Settings that the user wants tried first, then whatever the method finds."""

    def __init__(self, settings: list[Params], method: Method, draws: Draws, *, seed: int) -> None:
        """What a setting leaves out is drawn."""
        self._settings = settings
        self._method = method
        self._draws = draws
        self._seed = seed

    def choose(self, stand: Stand) -> Move:
        """The method says when, the user what."""
        move = self._method.choose(stand)
        number = len(stand.trials)
        if number >= len(self._settings) or not isinstance(move, Begin) or move.copy_from:
            return move
        params = self._draws.draw(mix_seed(self._seed, number), set(), self._settings[number])
        return move if params is None else replace(move, params=params)

    def judge(self, number: int, stand: Stand) -> Judged:
        """By the method."""
        return self._method.judge(number, stand)


def _with_first(search: SearchSpec, method: Method, draws: Draws, seed: int) -> Method:
    if not search.first:
        return method
    settings: list[Params] = [
        {name: encode_value(value) for name, value in setting.items()} for setting in search.first
    ]
    return First(settings, method, draws, seed=seed)
