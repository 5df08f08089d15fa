"""Optuna's samplers and pruners as methods: its own ask, report, should_prune and tell."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from yunlu.tuning.values import Judgement, StartTrial, TrialState, Verdict

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from yunlu.tuning.values import Action, Dimension, StudySnapshot

optuna.logging.set_verbosity(optuna.logging.ERROR)


class OptunaPeer:
    """A study in memory, as a user's loop with parallel workers would drive it."""

    def __init__(
        self,
        dimensions: tuple[Dimension, ...],
        sampler: optuna.samplers.BaseSampler,
        pruner: optuna.pruners.BasePruner | None = None,
        *,
        name: str,
    ) -> None:
        # The Hyperband pruner deals out its brackets by the study's name.
        self._study = optuna.create_study(
            sampler=sampler, pruner=pruner or optuna.pruners.NopPruner(), study_name=name
        )
        self._space = {each.name: as_distribution(each) for each in dimensions}
        self._asked: dict[int, optuna.Trial] = {}

    def choose(self, snapshot: StudySnapshot) -> Action:
        """A new trial, always: Optuna holds none."""
        for number in [*self._asked]:
            trial = snapshot.trials[number]
            if trial.state is TrialState.DONE:
                request = self._asked.pop(number)
                request.report(trial.points[-1].value, trial.rung)
                self._study.tell(request, trial.points[-1].value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            request = self._study.ask(self._space)
        self._asked[request.number] = request
        return StartTrial(request.params, snapshot.rungs)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """What the pruner says."""
        request, trial = self._asked[number], snapshot.trials[number]
        request.report(trial.points[-1].value, trial.rung)
        if not request.should_prune():
            return Judgement(Verdict.GO_ON)
        del self._asked[number]
        self._study.tell(request, state=optuna.trial.TrialState.PRUNED)
        return Judgement(Verdict.PRUNE)


def as_distribution(dimension: Dimension) -> BaseDistribution:
    """The same dimension in Optuna's words."""
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_int:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def make_tpe(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> OptunaPeer:  # noqa: ARG001
    """TPE as it comes."""
    return OptunaPeer(dimensions, optuna.samplers.TPESampler(seed=seed), name=f"tpe-{seed}")


def make_hyperband(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> OptunaPeer:
    """TPE as it comes, and Hyperband told how long a training is."""
    pruner = optuna.pruners.HyperbandPruner(max_resource=rungs)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return OptunaPeer(dimensions, sampler, pruner, name=f"hyperband-{seed}")


def make_halving(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> OptunaPeer:  # noqa: ARG001
    """TPE and successive halving as they come."""
    pruner = optuna.pruners.SuccessiveHalvingPruner()
    sampler = optuna.samplers.TPESampler(seed=seed)
    return OptunaPeer(dimensions, sampler, pruner, name=f"halving-{seed}")


def make_gp(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> OptunaPeer:  # noqa: ARG001
    """Gaussian process as it comes (needs torch)."""
    sampler: Any = optuna.samplers.GPSampler(seed=seed)
    return OptunaPeer(dimensions, sampler, name=f"gp-{seed}")
