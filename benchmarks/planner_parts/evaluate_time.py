"""Scores of the predicted throughput, by the frozen protocols."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.planner_parts import protocols
from benchmarks.planner_parts.evidence import COLD_SOURCES
from benchmarks.planner_parts.fit_experts import SOURCE as ROUTED_SOURCE
from benchmarks.planner_parts.fit_experts import fit_experts, routed_errors
from benchmarks.planner_parts.fit_time import Fit, fit, fit_model, predict_throughput
from benchmarks.planner_parts.protocols import SCALE_SOURCES, Fold
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.intervals import Spread, make_spread, spread_factors, widening
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.planner_parts.evidence import Evidence

WORKERS = os.cpu_count() or 1
MEDIAN_SOURCES = ("nanotron_playbook", "nanotron")
COVER = (0.75, 0.85)


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    protocol: str
    source: str
    rows: int
    mean_percent: float
    median_percent: float
    target: str = ""
    reached: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def fold_errors(evidence: Evidence, folds: Iterable[Fold]) -> list[tuple[Fold, np.ndarray]]:
    """For each fold: logs of measured over predicted of its test rows. Folds share the processors."""
    wanted = [fold for fold in folds if fold.test.any()]
    if len(wanted) < 2 or WORKERS < 2:
        return [(fold, _errors(evidence, fold)) for fold in wanted]
    with ProcessPoolExecutor(min(WORKERS, len(wanted)), get_context("fork")) as pool:
        return list(zip(wanted, pool.map(partial(_errors, evidence), wanted), strict=True))


def _errors(evidence: Evidence, fold: Fold) -> np.ndarray:
    predicted = predict_throughput(evidence, fit_model(evidence, fold.fit, fold.test), fold.test)
    return np.log(evidence.measured[fold.test] / predicted)


def score_folds(evidence: Evidence, folds: Iterable[Fold], protocol: str, source: str) -> Figure:
    """The error of all folds' test rows together."""
    errors = [np.abs(np.expm1(-error)) for _, error in fold_errors(evidence, folds)]
    every = np.concatenate(errors) if errors else np.array([np.nan])
    return Figure(
        protocol, source, len(every), 100 * float(every.mean()), 100 * float(np.median(every))
    )


def judge(figure: Figure, most_percent: float) -> Figure:
    """With a target for the mean error."""
    reached = figure.mean_percent <= most_percent
    return Figure(**{**asdict(figure), "target": f"<= {most_percent:g} %", "reached": reached})


def evaluate(evidence: Evidence, say: Callable[[Figure], None]) -> list[Figure]:
    """All throughput protocols."""
    found: list[Figure] = []

    def add(figure: Figure) -> None:
        found.append(figure)
        say(figure)

    for source, most in (("vtrain_multi", 8.0), ("llm_foundry", 6.0), ("megatron_bridge", None)):
        figure = score_folds(evidence, protocols.leave_model_out(evidence, source), "LOMO", source)
        add(judge(figure, most) if most else figure)
    half = protocols.half_and_half(evidence, "vtrain_single")
    add(judge(score_folds(evidence, half, "half/half", "vtrain_single"), 2.5))
    cold, apart = [], cold_errors(evidence)
    for source, errors in apart.items():
        misses = 100 * np.abs(np.exp(-errors) - 1)
        mean, median = float(misses.mean()), float(np.median(misses))
        cold.append(median if source in MEDIAN_SOURCES else mean)
        add(Figure("cold start", source, len(errors), mean, median))
    middle = float(np.nanmedian(cold))
    add(judge(Figure("cold start", "median over sources", len(cold), middle, middle), 12.0))
    unknown = unknown_errors(evidence)
    for figure in _of_unknown(unknown):
        add(figure)
    for source in SCALE_SOURCES:
        folds = protocols.scale_out(evidence, source)
        add(score_folds(evidence, folds, "scale-out", source))
    routed = 100 * np.abs(np.expm1(-routed_model_errors(evidence, fit(evidence, evidence.timed))))
    middle = float(np.median(routed))
    add(Figure("LOMO, experts", ROUTED_SOURCE, len(routed), float(routed.mean()), middle))
    ends = cold_quantiles(apart), unknown_quantiles(unknown)
    for figure in coverage(evidence, *out_of_fold_errors(evidence), *ends):
        add(figure)
    return found


def _of_unknown(apart: dict[str, np.ndarray]) -> Iterator[Figure]:
    """Errors of each stack as if nothing were known of it; those of most of them lie in the middle."""
    told: list[float] = []
    for stack, errors in apart.items():
        misses = 100 * np.abs(np.expm1(-errors))
        mean, median = float(misses.mean()), float(np.median(misses))
        told.append(median if stack in MEDIAN_SOURCES else mean)
        yield Figure("stack unknown", stack, len(errors), mean, median)
    middle = float(np.median(told))
    yield Figure("stack unknown", "median over stacks", len(told), middle, middle)


def out_of_fold_errors(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """For each timed row: log of measured over predicted, its model unseen; and its fold."""
    errors, folds = np.full(len(evidence), np.nan), np.full(len(evidence), -1)
    found = fold_errors(evidence, protocols.model_folds(evidence))
    for place, (fold, error) in enumerate(found):
        errors[fold.test], folds[fold.test] = error, place
    return errors, folds


def routed_model_errors(evidence: Evidence, dense: Fit) -> np.ndarray:
    """Of models with experts, each unseen: logs of measured over predicted."""
    folds = protocols.leave_routed_model_out(evidence, ROUTED_SOURCE)
    return np.concatenate(
        [
            routed_errors(evidence, fit_experts(evidence, dense, fold.fit), fold.test)
            for fold in folds
        ]
    )


def cold_errors(evidence: Evidence) -> dict[str, np.ndarray]:
    """For each source: logs of measured over predicted, the source unseen."""
    folds = [fold for source in COLD_SOURCES for fold in protocols.cold_start(evidence, source)]
    return {fold.name.partition(":")[0]: error for fold, error in fold_errors(evidence, folds)}


def unknown_errors(evidence: Evidence) -> dict[str, np.ndarray]:
    """For each stack: logs of measured over predicted, the stack unseen and nothing known of it."""
    every: dict[str, np.ndarray] = {}
    for fold in protocols.leave_stack_out(evidence):
        points = evidence.points.take(np.flatnonzero(fold.test)).with_columns(
            stack=STACKS.index("unknown")
        )
        with np.errstate(all="ignore"):
            total_s = step_time(points, fit(evidence, fold.fit).constants).total_s
        pace = points.batch * points.seq / (total_s * points.devices) * evidence.cores[fold.test]
        every[fold.name] = np.log(evidence.measured[fold.test] / pace)
    return every


def unknown_quantiles(errors: dict[str, np.ndarray]) -> tuple[float, float]:
    """The same of stacks of which nothing is known: wider, for there are few to tell from."""
    low, high = cold_quantiles(errors)
    middle, half = (low + high) / 2, (high - low) / 2 * widening(len(errors))
    return middle - half, middle + half


def cold_quantiles(errors: dict[str, np.ndarray]) -> tuple[float, float]:
    """10 % and 90 % of the log errors of sources never seen, every source with one voice."""
    every = np.concatenate(
        [
            np.quantile(own, np.linspace(0.025, 0.975, 20))
            for source, own in errors.items()
            if source not in MEDIAN_SOURCES
        ]
    )
    return float(np.quantile(every, 0.1)), float(np.quantile(every, 0.9))


def coverage(
    evidence: Evidence,
    errors: np.ndarray,
    folds: np.ndarray,
    cold: tuple[float, float],
    unknown: tuple[float, float],
) -> list[Figure]:
    """Share of rows inside the interval that all other folds' errors give."""
    inside = np.zeros(len(evidence), dtype=bool)
    for place in sorted(set(folds[folds >= 0])):
        others, mine = (folds >= 0) & (folds != place), np.flatnonzero(folds == place)
        points = evidence.points
        seen = points.take(np.flatnonzero(others))
        spread: Spread = make_spread(errors[others], seen, cold, unknown)
        low, high = spread_factors(points.take(mine), spread)
        inside[mine] = (errors[mine] >= np.log(low)) & (errors[mine] <= np.log(high))
    figures = []
    for source in COLD_SOURCES:
        own = (folds >= 0) & (evidence.source == source)
        if own.any():
            share = 100 * float(inside[own].mean())
            reached = 100 * COVER[0] <= share <= 100 * COVER[1]
            figures.append(
                Figure("cover of 80 %", source, int(own.sum()), share, share, "75-85 %", reached)
            )
    return figures
