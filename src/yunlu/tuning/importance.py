"""Importance of dimensions, from all trials, including those stopped early.

Optuna's evaluators see finished trials only, of which a study that stops early has few. Here every
trial is extrapolated to the last rung by the progress of the others.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.tuning.facts import StudyView
    from yunlu.tuning.values import Dimension, ParamValue, Trial

FEWEST = 8
"""With fewer trials importances are not significant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Share of the variance between trials that each dimension explains."""

    shares: Mapping[str, float]
    """By field, the largest first; together 1."""
    evaluator: str
    """``fanova`` or ``ped-anova``."""
    trials: int
    """Number of trials used."""


def expect_finals(trials: Sequence[Trial]) -> dict[int, float]:
    """Final value of each trial, extrapolated to the last rung; by number, smaller is better.

    A trial that stopped is carried on by what the median trial still gained from there. One that
    diverged counts as the worst of the others.
    """
    curves = {trial.number: _best_so_far(trial) for trial in trials}
    known = {number: curve for number, curve in curves.items() if curve}
    last = max((max(curve) for curve in known.values()), default=0)
    gain = [0.0] * (last + 1)
    for rung in range(2, last + 1):
        gains = [c[rung] - c[rung - 1] for c in known.values() if rung in c and rung - 1 in c]
        gain[rung] = median(gains) if gains else 0.0
    finals = {
        number: curve[max(curve)] + math.fsum(gain[max(curve) + 1 :])
        for number, curve in known.items()
    }
    worst = max(finals.values(), default=0.0)
    diverged = [trial.number for trial in trials if trial.points and trial.number not in finals]
    return {**finals, **dict.fromkeys(diverged, worst)} if finals else {}


def rank_trials_by_value(finals: Mapping[int, float]) -> dict[int, float]:
    """0 for the best, 1 for the worst, and the others evenly between them."""
    order = sorted(finals.items(), key=lambda entry: (entry[1], entry[0]))
    return {number: index / max(len(order) - 1, 1) for index, (number, _) in enumerate(order)}


def compute_importance(view: StudyView) -> Importance | None:
    """Importance of each dimension; None with too few trials."""
    shown = [
        one_trial.trial for one_trial in view.trials if one_trial.state is not TrialState.FAILED
    ]
    ranks = rank_trials_by_value(expect_finals(shown))
    trials = [trial for trial in shown if trial.number in ranks]
    varied = [dimension for dimension in view.dimensions if _varies(dimension.name, trials)]
    if len(trials) < FEWEST or not varied:
        return None
    whole = all(item.name in trial.params for item in varied for trial in trials)
    evaluator = "fanova" if whole and find_spec("sklearn") is not None else "ped-anova"
    shares = _evaluate(evaluator, varied, trials, ranks)
    idle = {dimension.name: 0.0 for dimension in view.dimensions if dimension not in varied}
    ordered = sorted({**shares, **idle}.items(), key=lambda entry: -entry[1])
    return Importance(shares=dict(ordered), evaluator=evaluator, trials=len(trials))


def place_on(dimension: Dimension, value: ParamValue) -> float:
    """Position of a value on its dimension: 0 at the low end, 1 at the high one; choices by order."""
    if dimension.choices:
        known = [str(choice) for choice in dimension.choices]
        result = known.index(str(value)) if str(value) in known else len(known) - 1
        return result / max(len(known) - 1, 1)
    low, high, at = dimension.low, dimension.high, float(value or 0)
    if dimension.log:
        low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
    return (at - low) / (high - low) if high > low else 0.5


def _best_so_far(trial: Trial) -> dict[int, float]:
    best, curve = math.inf, dict[int, float]()
    for point in trial.points:
        if math.isfinite(point.value):
            best = min(best, point.value)
        if math.isfinite(best):
            curve[point.rung] = best
    return curve


def _varies(name: str, trials: Sequence[Trial]) -> bool:
    return len({str(trial.params.get(name)) for trial in trials}) > 1


def _evaluate(
    evaluator: str, varied: Sequence[Dimension], trials: Sequence[Trial], ranks: Mapping[int, float]
) -> dict[str, float]:
    import optuna  # noqa: PLC0415 (slow to import)
    from optuna import importance  # noqa: PLC0415

    spread: dict[str, Any] = {item.name: _distribution(item, trials) for item in varied}
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study()
        for trial in trials:
            here = {item.name: item for item in varied if item.name in trial.params}
            study.add_trial(
                optuna.trial.create_trial(
                    params={name: _coordinate(item, trial) for name, item in here.items()},
                    distributions={name: spread[name] for name in here},
                    value=ranks[trial.number],
                )
            )
        # Fewer than five among the good ones say nothing (as the authors of PED-ANOVA advise).
        quantile = min(0.5, max(0.2, 5 / len(trials)))
        judge: Any = (
            importance.FanovaImportanceEvaluator(seed=0)
            if evaluator == "fanova"
            else importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            param_importances = importance.get_param_importances(study, evaluator=judge)
        return {name: float(share) for name, share in param_importances.items()}
    finally:
        optuna.logging.set_verbosity(before)


def _distribution(dimension: Dimension, trials: Sequence[Trial]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution  # noqa: PLC0415

    if dimension.choices:
        tried = [trial.params[dimension.name] for trial in trials if dimension.name in trial.params]
        return CategoricalDistribution(
            tuple(dict.fromkeys(str(item) for item in (*dimension.choices, *tried)))
        )
    # Positions, not values: a forest splits a learning rate in the middle of its logarithm.
    slots = [place_on(dimension, trial.params[dimension.name]) for trial in trials
              if dimension.name in trial.params]  # fmt: skip
    return FloatDistribution(min(0.0, *slots), max(1.0, *slots))


def _coordinate(dimension: Dimension, trial: Trial) -> float | str:
    value = trial.params[dimension.name]
    return str(value) if dimension.choices else place_on(dimension, value)
