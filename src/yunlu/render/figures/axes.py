"""Ranges of axes: which part of the values a figure shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.render.figures.values import Axis
from yunlu.render.format import is_share_metric, show_param
from yunlu.render.i18n.texts import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.render.figures.values import Unit
    from yunlu.render.i18n.texts import BilingualText
    from yunlu.tuning.values import Dimension, ParamValue

_LARGEST = 1e300
_FAR = 3.0
_DECADES = 0.6
_GOLDEN = 0.6180339887
_SPREAD = 0.5


def fit_axis(
    values: Sequence[float],
    *,
    unit: Unit = "number",
    log: bool = False,
    from_zero: bool = False,
    padding: float = 0.0,
    ticks: int = 6,
    name: BilingualText | None = None,
) -> Axis:
    """An axis over all finite values; amounts begin at zero."""
    finite = [value for value in values if math.isfinite(value)]
    from_zero = (from_zero or unit in {"bytes", "rate", "duration"}) and not log
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if log:
        low, high = math.log10(low), math.log10(high)
    elif from_zero:
        low = min(low, 0.0)
    # A diverged loss can be so large that the span itself is beyond what a float holds.
    low, high = (max(-_LARGEST, min(edge, _LARGEST)) for edge in (low, high))
    if high - low <= max(abs(low), abs(high), 1e-200) * 1e-12:
        # A flat line, or one point: give it room on both sides.
        room = abs(low) / 2 if abs(low) > 1e-200 else 0.5
        low, high = low - room, high + room
    room = padding * (high - low)
    low, high = low if from_zero and low == 0 else low - room, high + room
    if log:
        low, high = 10.0 ** max(low, -307), 10.0 ** min(high, 308)
    elif unit == "percent" and finite and max(finite) <= 1 < high:
        high = 1.0 + padding * (1 - low)  # no label of 140 % above a share
    return Axis(low=low, high=high, log=log, unit=unit, ticks=ticks, name=name)


def step_axis(steps: Sequence[float], name: BilingualText) -> Axis:
    """Global steps, from the first to the last."""
    return fit_axis(steps, unit="count", ticks=5, name=name)


def count_axis(most: int, *, ticks: int = 5, name: BilingualText | None = None) -> Axis:
    """From 1 to ``most``."""
    return Axis(low=1, high=max(most, 2), unit="count", ticks=ticks, name=name)


def growing_axis(most: float, unit: Unit, *, name: BilingualText | None = None) -> Axis:
    """From zero to ``most``."""
    return Axis(low=0, high=most if most > 0 else 1.0, unit=unit, name=name)


def metric_axis(
    values: Sequence[float],
    metric: str,
    *,
    smaller_is_better: bool,
    line: Sequence[float] = (),
    ticks: int = 5,
    name: BilingualText | None = None,
) -> Axis:
    """Where values of a metric differ visibly: what is far worse than most is drawn at the edge.

    Args:
        values: What is shown.
        metric: Its name.
        smaller_is_better: Which end matters.
        line: Values of which only those very far off may be drawn at the edge.
        ticks: About how many labels fit.
        name: Beside the axis.
    """
    sign = 1 if smaller_is_better else -1
    losses = sorted(sign * value for value in values if math.isfinite(value))
    if not losses:
        return Axis(low=0, high=1, ticks=ticks, name=name)
    best, usual = losses[0], losses[int(0.75 * (len(losses) - 1))]
    edge, far = (best + factor * (usual - best) for factor in (_FAR, 4 * _FAR))
    worst = max((value for value in losses if value <= edge), default=best)
    worst = max([worst, *(sign * value for value in line if best <= sign * value <= far)])
    low, high = (best, worst) if smaller_is_better else (-worst, -best)
    unit: Unit = "percent" if low >= 0 and high <= 1 and is_share_metric(metric) else "number"
    if unit == "number" and low > 0 and math.log10(high / low) > _DECADES:
        return Axis(low=low / 1.1, high=high * 1.1, log=True, unit=unit, ticks=ticks, name=name)
    room = 0.06 * (high - low) or abs(low) / 10 or 0.5
    top = min(high + room, 1.0) if unit == "percent" and high + room > 1 else high + room
    return Axis(low=low - room, high=top, unit=unit, ticks=ticks, name=name)


def dimension_axis(dimension: Dimension, *, ticks: int = 5) -> Axis:
    """The values of a dimension; choices are categories of equal width."""
    name = same(dimension.name, code=True)
    if dimension.choices:
        names = tuple(map(show_param, dimension.choices))
        return Axis(low=-0.5, high=len(names) - 0.5, categories=names, ticks=ticks, name=name)
    is_count = dimension.is_int and not dimension.log
    return Axis(
        low=dimension.low,
        high=dimension.high,
        log=dimension.log,
        unit="count" if is_count else "number",
        ticks=ticks,
        name=name,
    )


def place_on(dimension: Dimension, value: ParamValue, *, beside: int | None = None) -> float:
    """A trial's value on the axis of its dimension.

    Args:
        dimension: Whose axis.
        value: Of the trial.
        beside: Number of the trial: trials with the same choice stand beside each other.
    """
    if not dimension.choices:
        return float(value or 0)
    known = [str(choice) for choice in dimension.choices]
    index = known.index(str(value)) if str(value) in known else len(known) - 1
    # Multiples of the golden section never bunch up.
    return index + (0.0 if beside is None else (beside * _GOLDEN % 1 - 0.5) * _SPREAD)
