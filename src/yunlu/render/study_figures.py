"""Figures of a study: progress, learning curves, parallel coordinates, slices, Pareto front."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.render.figure_values import (
    Bar,
    BarFigure,
    BarSegment,
    DensityGrid,
    ParallelFigure,
    ParallelLine,
    ScatterFigure,
    Sparkline,
    TrialCurve,
    TrialCurvesFigure,
    TrialPoint,
    count_axis,
    dimension_axis,
    growing_axis,
    metric_axis,
    place_on,
)
from yunlu.render.format import show_amount
from yunlu.render.i18n import same, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.render.figure_values import Axis, TrialShade
    from yunlu.render.i18n import BilingualText
    from yunlu.tuning.facts import StudyView, TrialFacts
    from yunlu.tuning.importance import Importance
    from yunlu.tuning.values import Dimension

NUM_LEVELS = 7
_COLUMNS, _ROWS = 100, 50
"""Divisors of the drawing's size: cells with uneven edges would leave gaps."""
_BANDWIDTH = 0.13
"""How far a trial speaks for its surroundings, as a share of the whole."""
_OTHER_CHOICE = 0.02
_KNOWN = 0.08


def estimate_density(
    trials: Sequence[tuple[float, float, float]], *, x_choices: int = 0, y_choices: int = 0
) -> DensityGrid:
    """Levels of equal width; -1 where no trial was near.

    Args:
        trials: Of each its share from the left, from the bottom, and its rank (0 is best).
        x_choices: Choices from left to right; 0: numbers.
        y_choices: The same from bottom to top.
    """
    columns, rows = x_choices or _COLUMNS, y_choices or _ROWS
    known = np.asarray(trials, dtype=np.float64)
    # Nadaraya-Watson: the mean of the trials around, weighted by their distance.
    across = _weights((np.arange(columns) + 0.5) / columns, known[:, 0], x_choices)
    along = _weights((np.arange(rows) + 0.5) / rows, known[:, 1], y_choices)
    weights = along[:, None, :] * across[None, :, :]
    total = weights.sum(axis=2)
    mean = (weights @ known[:, 2]) / np.maximum(total, 1e-12)
    levels = np.minimum((mean * NUM_LEVELS).astype(int), NUM_LEVELS - 1)
    levels[total < _KNOWN] = -1
    return DensityGrid(levels=tuple(map(tuple, levels.tolist())))


def _weights(
    middles: NDArray[np.float64], trials: NDArray[np.float64], choices: int
) -> NDArray[np.float64]:
    distance = middles[:, None] - trials[None, :]
    if choices:
        return np.where(np.abs(distance) < 0.5 / choices, 1.0, _OTHER_CHOICE)
    return np.exp(-0.5 * (distance / _BANDWIDTH) ** 2)


_MOST_LINES = 400
_SHADES: tuple[TrialShade, ...] = ("0", "1", "2", "3", "4", "5")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRanks:
    """How good each trial is among all: 0 for the best, 1 for the worst."""

    view: StudyView
    ranks: Mapping[int, float] = field(default_factory=dict[int, float])

    def shade(self, facts: TrialFacts) -> TrialShade:
        """How a trial is coloured."""
        if self.is_best(facts):
            return "best"
        if facts.number not in self.ranks:
            return "none"
        return _SHADES[min(int(self.ranks[facts.number] * len(_SHADES)), len(_SHADES) - 1)]

    def is_best(self, facts: TrialFacts) -> bool:
        """Whether the study has nothing better."""
        return self.view.best is not None and self.view.best.number == facts.number

    def best_first(self) -> list[TrialFacts]:
        """Trials that have something to show; of very many the best."""
        known = [facts for facts in self.view.trials if facts.number in self.ranks]
        known.sort(key=lambda facts: (not self.is_best(facts), self.ranks[facts.number]))
        return known[:_MOST_LINES]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """One evaluation in the course of the study."""

    at_s: float | None
    spent_s: float
    value: float
    facts: TrialFacts


def progress_figures(ranks: TrialRanks) -> Iterator[ScatterFigure]:
    """The best value so far, over time and over cost."""
    view = ranks.view
    evaluations = _in_order(view)
    if not evaluations:
        return
    if all(evaluation.at_s is not None for evaluation in evaluations):
        times = [evaluation.at_s or 0.0 for evaluation in evaluations]
        axis = growing_axis(max(times), "duration", name=text("study.best_axis.time"))
        yield _progress_figure(ranks, evaluations, times, axis, over="time")
    spent = [evaluation.spent_s for evaluation in evaluations]
    if view.spent_dollars and view.spent_s:
        dollars = [seconds * view.spent_dollars / view.spent_s for seconds in spent]
        axis = growing_axis(max(dollars), "dollars", name=text("study.best_axis.dollars"))
        yield _progress_figure(ranks, evaluations, dollars, axis, over="dollars")
    else:
        axis = growing_axis(max(spent), "duration", name=text("study.best_axis.device"))
        yield _progress_figure(ranks, evaluations, spent, axis, over="device")


def curves_figure(ranks: TrialRanks) -> TrialCurvesFigure | None:
    """The value of every trial after each evaluation."""
    view, shown = ranks.view, ranks.best_first()
    if not shown:
        return None
    rungs = max(view.rungs, *(facts.trial.rung for facts in shown))
    return TrialCurvesFigure(
        id="curves",
        title=text("study.curves.title"),
        x=count_axis(rungs, ticks=8, name=text("study.curves.rung")),
        y=_value_axis(view, shown),
        curves=tuple(
            TrialCurve(
                trial=facts.number,
                state=facts.state.value,
                shade=ranks.shade(facts),
                x=tuple(rung for rung, _ in facts.curve),
                y=tuple(values[0] for _, values in facts.curve),
            )
            for facts in reversed(shown)
        ),
        note=_left_out(view, shown),
    )


def parallel_figure(ranks: TrialRanks, order: Sequence[Dimension]) -> ParallelFigure | None:
    """A line for each trial through its value on every dimension, to its result."""
    view, shown = ranks.view, ranks.best_first()
    if not shown or not order:
        return None
    result = _value_axis(view, shown).model_copy(update={"name": same(view.metric)})
    lines = tuple(
        ParallelLine(
            trial=facts.number,
            state=facts.state.value,
            shade=ranks.shade(facts),
            values=(*(_place(ranks, item, facts) for item in order), _value(facts)),
        )
        for facts in reversed(shown)
    )
    lacks_any = any(value is None for line in lines for value in line.values)
    return ParallelFigure(
        id="parallel",
        title=text("study.parallel.title"),
        axes=(*map(dimension_axis, order), result),
        lines=lines,
        note=text("study.parallel.lacking") if lacks_any else _left_out(view, shown),
    )


def pair_figure(
    ranks: TrialRanks, first: Dimension, second: Dimension, *, title: BilingualText
) -> ScatterFigure | None:
    """The plane of two dimensions: where trials did well, and where none has been."""
    shown = [
        facts for facts in ranks.best_first() if {first.name, second.name} <= facts.params.keys()
    ]
    if len(shown) < 3:
        return None
    x, y = dimension_axis(first), dimension_axis(second)
    points = _points(
        ranks, ((facts, _at(ranks, first, facts), _at(ranks, second, facts)) for facts in shown)
    )
    known = [(x.share(point.x), y.share(point.y), ranks.ranks[point.trial]) for point in points]
    return ScatterFigure(
        id="pair",
        title=title,
        x=x,
        y=y,
        points=points,
        background=estimate_density(
            known, x_choices=len(first.choices), y_choices=len(second.choices)
        ),
        star=_star(points),
        note=text("study.pair.note"),
    )


def slice_figure(ranks: TrialRanks, dimension: Dimension) -> ScatterFigure | None:
    """Results over one dimension."""
    shown = [facts for facts in ranks.best_first() if dimension.name in facts.params]
    if not shown:
        return None
    points = _points(
        ranks, ((facts, _at(ranks, dimension, facts), _value(facts)) for facts in shown)
    )
    return ScatterFigure(
        id=f"slice-{dimension.name}",
        title=same(dimension.name, code=True),
        x=dimension_axis(dimension, ticks=4).model_copy(update={"name": None}),
        y=_value_axis(ranks.view, shown).model_copy(update={"ticks": 4}),
        points=points,
        star=_star(points),
    )


def front_figure(ranks: TrialRanks) -> ScatterFigure | None:
    """The first two objectives against each other, with the Pareto front."""
    view = ranks.view
    shown = [facts for facts in ranks.best_first() if facts.values is not None]
    if len(view.metrics) < 2 or not shown:
        return None
    values: dict[int, tuple[float, ...]] = {
        facts.number: facts.values for facts in shown if facts.values is not None
    }
    x, y = (
        metric_axis(
            [objectives[index] for objectives in values.values()],
            view.metrics[index],
            smaller_is_better=view.directions[index] == "minimize",
            name=same(view.metrics[index]),
        )
        for index in (1, 0)
    )
    front = sorted(
        (values[facts.number][1], values[facts.number][0])
        for facts in view.front
        if facts.number in values
    )
    return ScatterFigure(
        id="front",
        title=text("study.front.title"),
        x=x,
        y=y,
        points=_points(
            ranks, ((facts, values[facts.number][1], values[facts.number][0]) for facts in shown)
        ),
        line=tuple(front) if len(front) > 1 else (),
        line_kind="front",
        note=text("study.front.note", count=len(view.front)),
        wide=True,
    )


def importance_figure(importance: Importance) -> BarFigure:
    """The share of each dimension."""
    return BarFigure(
        id="importance",
        title=text("study.importance.title"),
        unit="percent",
        bars=tuple(
            Bar(
                key=name,
                name=same(name, code=True),
                segments=(BarSegment(key=name, name=same(name, code=True), value=share),),
                label=f"{share * 100:.0f} %",
            )
            for name, share in importance.shares.items()
        ),
    )


def forecast_figure(quantity: str, predicted: Mapping[str, float], measured: float) -> BarFigure:
    """What was predicted of the study, with its interval, and what was measured."""
    low, high = (show_amount(quantity, predicted[edge]) for edge in ("low", "high"))
    values = {"predicted": predicted["value"], "measured": measured}
    bars = [
        Bar(
            key=key,
            name=text(f"bar.{key}"),
            segments=(BarSegment(key=key, name=text(f"bar.{key}"), value=value),),
            label=show_amount(quantity, value),
        )
        for key, value in values.items()
    ]
    interval = {
        "interval": (predicted["low"], predicted["high"]),
        "interval_label": f"{low} – {high}",
    }
    bars[0] = bars[0].model_copy(update=interval)
    return BarFigure(
        id=f"forecast-{quantity}", title=text(f"study.quantity.{quantity}"), bars=tuple(bars)
    )


def sparkline(view: StudyView, facts: TrialFacts) -> Sparkline:
    """The curve of one trial."""
    rungs = max(view.rungs, facts.trial.rung)
    return Sparkline(
        x=count_axis(rungs),
        y=_value_axis(view, [facts]),
        points=tuple((rung, values[0]) for rung, values in facts.curve),
    )


def _progress_figure(
    ranks: TrialRanks,
    evaluations: Sequence[_Evaluation],
    positions: Sequence[float],
    x: Axis,
    *,
    over: str,
) -> ScatterFigure:
    view = ranks.view
    best = _best_so_far(view, evaluations)
    y = metric_axis(
        [_value(facts) for facts in view.trials],
        view.metric,
        smaller_is_better=view.direction == "minimize",
        line=best,
    )
    steps: list[tuple[float, float]] = []
    for position, value in zip(positions, best, strict=True):
        if math.isfinite(value):
            steps += [(position, steps[-1][1])] if steps else []
            steps.append((position, value))
    steps += [(x.high, steps[-1][1])] if steps else []
    return ScatterFigure(
        id=f"best-{over}",
        title=text(f"study.best_over.{over}"),
        x=x,
        y=y,
        points=_points(
            ranks,
            (
                (evaluation.facts, position, evaluation.value)
                for position, evaluation in zip(positions, evaluations, strict=True)
                if y.has(evaluation.value)
            ),
        ),
        small=True,
        line=tuple(steps),
        line_kind="best",
    )


def _best_so_far(view: StudyView, evaluations: Sequence[_Evaluation]) -> list[float]:
    """The best value by each evaluation; not finite as long as there is none."""
    better = min if view.direction == "minimize" else max
    best, values = math.nan, list[float]()
    for evaluation in evaluations:
        if math.isfinite(evaluation.value):
            best = better(best, evaluation.value) if math.isfinite(best) else evaluation.value
        values.append(best)
    return values


def _in_order(view: StudyView) -> list[_Evaluation]:
    """Every evaluation in the order in which they were made, with what had been spent by then."""
    rows: list[tuple[float, int, int, float, float, TrialFacts]] = []
    is_timed = all(len(facts.times) == len(facts.points) for facts in view.trials)
    for facts in view.trials:
        before_s = 0.0
        for index, (point, (_, values)) in enumerate(zip(facts.points, facts.curve, strict=True)):
            at = facts.times[index] if is_timed else float(facts.number)
            used_s = max(0.0, point.seconds - before_s)
            before_s = max(before_s, point.seconds)
            rows.append((at, facts.number, point.rung, used_s, values[0], facts))
    began_at = view.began_at
    if began_at is None:
        began_at = min((row[0] for row in rows), default=0.0)
    spent_s, evaluations = 0.0, list[_Evaluation]()
    for at, _, _, used_s, value, facts in sorted(rows, key=lambda row: row[:3]):
        spent_s += used_s
        at_s = max(0.0, at - began_at) if is_timed else None
        evaluations.append(_Evaluation(at_s=at_s, spent_s=spent_s, value=value, facts=facts))
    return evaluations


def _points(
    ranks: TrialRanks, places: Iterable[tuple[TrialFacts, float, float]]
) -> tuple[TrialPoint, ...]:
    """Points of trials, the better after the worse, so that they are drawn on top."""
    ordered = sorted(places, key=lambda index: -ranks.ranks.get(index[0].number, 2.0))
    return tuple(
        TrialPoint(trial=facts.number, x=x, y=y, shade=ranks.shade(facts))
        for facts, x, y in ordered
    )


def _star(points: Sequence[TrialPoint]) -> tuple[float, float] | None:
    return next(((point.x, point.y) for point in points if point.shade == "best"), None)


def _left_out(view: StudyView, shown: Sequence[TrialFacts]) -> BilingualText | None:
    total = sum(bool(facts.points) for facts in view.trials)
    if len(shown) >= total or len(shown) < _MOST_LINES:
        return None
    return text("study.left_out", shown=len(shown), total=total)


def _value_axis(view: StudyView, shown: Iterable[TrialFacts]) -> Axis:
    values = [values[0] for facts in shown for _, values in facts.curve]
    return metric_axis(values, view.metric, smaller_is_better=view.direction == "minimize")


def _value(facts: TrialFacts) -> float:
    return facts.value if facts.value is not None else math.nan


def _place(ranks: TrialRanks, dimension: Dimension, facts: TrialFacts) -> float | None:
    return _at(ranks, dimension, facts) if dimension.name in facts.params else None


def _at(ranks: TrialRanks, dimension: Dimension, facts: TrialFacts) -> float:
    """Trials with the same choice stand beside each other; the best one stands in the middle."""
    beside = None if ranks.is_best(facts) else facts.number
    return place_on(dimension, facts.params[dimension.name], beside=beside)
