"""From runs to figures: regret over time, and how much sooner random search's end is reached."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.tune_parts.runs import Run

FRACTIONS = (0.1, 0.2, 0.4, 0.7, 1.0)
BASE = "random"
_SCALE_AT = 0.1
"""Of the budget: where random search stands then has regret 1."""
_RESAMPLED = 500
NOT_REACHED = 1 / 1.5
"""The speed-up on a task where random search's final value is never reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How values of one task are judged."""

    one: float
    """Random search early on, the median over seeds: regret 1."""
    zero: float
    """The best that any run saw: regret 0."""
    goal: float
    """Random search at the end, the median over seeds."""

    def rate(self, value: float) -> float:
        """The regret of a value."""
        span = self.one - self.zero
        return (value - self.zero) / span if span > 0 else float(value > self.zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One contender over all tasks."""

    contender: str
    regrets: dict[float, float]
    """By the fraction of the budget: the mean over tasks of medians over seeds."""
    final_by_task: dict[str, float]
    final_range: tuple[float, float]
    """Of the regret at the end, 10 to 90 %, had the seeds been others: a bootstrap."""
    speedup: float
    """Geometric mean over tasks of budget ÷ time to random search's final value."""
    runs: int
    trials: float
    resumed: float
    cpu_s: float
    """Means of a run."""


def make_scales(runs: Sequence[Run]) -> dict[str, Scale]:
    """One for each task that random search was run on."""
    by_task: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.case.task].append(run)
    scales: dict[str, Scale] = {}
    for task, found in by_task.items():
        base = [run for run in found if run.case.contender == BASE]
        if base:
            scales[task] = Scale(
                one=median(find_best(run, _SCALE_AT) for run in base),
                zero=min(find_best(run, 1.0) for run in found),
                goal=median(find_best(run, 1.0) for run in base),
            )
    return scales


def score(
    runs: Sequence[Run], scales: dict[str, Scale], fractions: Sequence[float] = FRACTIONS
) -> list[Score]:
    """Every contender's, in the order in which they appear."""
    by_contender: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.case.task in scales:
            by_contender[run.case.contender].append(run)
    return [_score_one(name, found, scales, fractions) for name, found in by_contender.items()]


def find_best(run: Run, fraction: float) -> float:
    """The best value seen in this part of the budget; infinite before the first."""
    return _find_best_by(run, fraction * run.budget_s)


def _find_best_by(run: Run, until_s: float) -> float:
    return min((value for at_s, value in run.improvements if at_s <= until_s), default=math.inf)


def find_speedup(runs: Sequence[Run], goal: float) -> float:
    """How much sooner than at the end the median over a task's runs reaches the goal."""
    budget_s = runs[0].budget_s
    for at_s in sorted({at_s for run in runs for at_s, _ in run.improvements}):
        if median(_find_best_by(run, at_s) for run in runs) <= goal:
            return budget_s / at_s
    return NOT_REACHED


def _score_one(
    name: str, runs: list[Run], scales: dict[str, Scale], fractions: Sequence[float]
) -> Score:
    by_task: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.case.task].append(run)

    def rate(fraction: float) -> dict[str, float]:
        return {
            task: median(scales[task].rate(find_best(run, fraction)) for run in found)
            for task, found in by_task.items()
        }

    speedups = [find_speedup(found, scales[task].goal) for task, found in by_task.items()]
    return Score(
        contender=name,
        regrets={each: _mean(list(rate(each).values())) for each in fractions},
        final_by_task=rate(1.0),
        final_range=_resample(
            [[scales[task].rate(find_best(run, 1.0)) for run in by_task[task]] for task in by_task]
        ),
        speedup=math.exp(_mean([math.log(each) for each in speedups])),
        runs=len(runs),
        trials=_mean([run.trials for run in runs]),
        resumed=_mean([run.resumed for run in runs]),
        cpu_s=_mean([run.cpu_s for run in runs]),
    )


def _resample(regrets: list[list[float]]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(found, (_RESAMPLED, len(found))), axis=1) for found in regrets]
    low, high = np.quantile(np.mean(drawn, axis=0), [0.1, 0.9])
    return float(low), float(high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
