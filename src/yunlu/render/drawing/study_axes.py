"""The axes of a study's pictures: values to shares of a length, and labels at round places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from yunlu.core.units import show_duration
from yunlu.render.drawing.charts import Tick
from yunlu.render.format import show_dollars, show_param
from yunlu.tuning.importance import place_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Dimension, ParamValue

Unit = Literal["number", "count", "duration", "dollars", "percent"]

_CLOCK_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400)
_FAR = 3.0
_DECADES = 0.6
_GOLDEN = 0.6180339887
_SPREAD = 0.5
_SHARE_METRICS = ("accuracy", "f1", "precision", "recall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Numbers to shares of a length."""

    low: float
    high: float
    log: bool = False
    unit: Unit = "number"

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one; what lies beyond is drawn at the edge."""
        if math.isnan(value):
            return 1.0
        low, high = self.low, self.high
        at = min(max(value, low), high)
        if self.log:
            low, high, at = (math.log10(each) for each in (low, high, at))
        return (at - low) / (high - low)

    def ticks(self, count: int = 5) -> tuple[Tick, ...]:
        """Labels at round numbers."""
        values = _log_values(self.low, self.high) if self.log else self._values(count)
        return tuple(
            Tick(at=self.share(each), label=show_on_axis(each, self.unit)) for each in values
        )

    def _values(self, count: int) -> list[float]:
        rough = (self.high - self.low) / count
        step = _round_step(rough)
        if self.unit == "duration" and rough > 0.5:
            step = next((each for each in _CLOCK_S if rough <= each), _round_step(rough))
        if self.unit == "count":
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def count_axis(most: int) -> Axis:
    """From 0 or 1 to ``most``."""
    return Axis(low=1, high=max(most, 2), unit="count")


def growing_axis(most: float, unit: Unit) -> Axis:
    """From nothing to ``most``."""
    return Axis(low=0, high=most if most > 0 else 1.0, unit=unit)


def value_axis(
    values: Sequence[float], metric: str, *, smaller_is_better: bool, line: Sequence[float] = ()
) -> Axis:
    """Where a metric's values are told apart best: what is far worse than most is left to the edge.

    Args:
        values: What is to be shown.
        metric: Whose values they are.
        smaller_is_better: Which end is of interest.
        line: Values of which only what is very far off may be left to the edge.
    """
    sign = 1 if smaller_is_better else -1
    found = sorted(sign * value for value in values if math.isfinite(value))
    if not found:
        return Axis(low=0, high=1)
    best, usual = found[0], found[int(0.75 * (len(found) - 1))]
    edge, far = (best + factor * (usual - best) for factor in (_FAR, 4 * _FAR))
    worst = max((value for value in found if value <= edge), default=best)
    worst = max([worst, *(sign * value for value in line if best <= sign * value <= far)])
    low, high = (best, worst) if smaller_is_better else (-worst, -best)
    unit: Unit = "percent" if _is_share(metric, low, high) else "number"
    if unit == "number" and low > 0 and math.log10(high / low) > _DECADES:
        return Axis(low=low / 1.1, high=high * 1.1, log=True, unit=unit)
    room = 0.06 * (high - low) or abs(low) / 10 or 0.5
    top = min(high + room, 1.0) if unit == "percent" and high + room > 1 else high + room
    return Axis(low=low - room, high=top, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionAxis:
    """A dimension's values to shares of a length: choices stand in the middle of equal parts."""

    dimension: Dimension

    def share(self, value: ParamValue) -> float:
        """0 at the low end, 1 at the high one."""
        if (parts := len(self.dimension.choices)) > 0:
            return (place_on(self.dimension, value) * max(parts - 1, 0) + 0.5) / parts
        return min(max(place_on(self.dimension, value), 0.0), 1.0)

    def share_beside(self, value: ParamValue, number: int) -> float:
        """The same, but trials with one choice in common stand beside each other."""
        parts = len(self.dimension.choices)
        # Multiples of the golden section never bunch up.
        aside = (number * _GOLDEN % 1 - 0.5) * _SPREAD / parts if parts else 0.0
        return self.share(value) + aside

    def ticks(self, count: int = 5) -> tuple[Tick, ...]:
        """Every choice, or round numbers."""
        dimension = self.dimension
        if dimension.choices:
            return tuple(
                Tick(at=self.share(each), label=show_param(each)) for each in dimension.choices
            )
        if dimension.low >= dimension.high:
            return (Tick(at=0.5, label=show_param(dimension.low)),)
        axis = Axis(
            low=dimension.low,
            high=dimension.high,
            log=dimension.log,
            unit="count" if dimension.is_int and not dimension.log else "number",
        )
        return axis.ticks(count)


def show_on_axis(value: float, unit: Unit) -> str:
    """A label."""
    if unit == "duration":
        return _clock(value)
    if unit == "dollars":
        return "0" if value == 0 else show_dollars(value)
    if unit == "percent":
        return f"{value * 100:.4g} %"
    if unit == "count":
        return f"{value:,.0f}"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds < 60:
        return show_duration(seconds).replace(".0 ", " ")
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes}:{rest:02d} min" if rest else f"{minutes} min"


def _is_share(metric: str, low: float, high: float) -> bool:
    return low >= 0 and high <= 1 and any(word in metric.lower() for word in _SHARE_METRICS)


def _log_values(low: float, high: float) -> list[float]:
    spread = math.log10(high) - math.log10(low)
    digits = (1, 2, 5) if spread < 1.6 else (1,)
    stride = max(1, math.ceil(spread / 6))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, stride)
    inside = [digit * 10.0**decade for decade in decades for digit in digits]
    inside = [each for each in inside if low * 0.999 <= each <= high * 1.001]
    if len(inside) >= 2:
        return inside
    step = _round_step((high - low) / 4)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if rough <= digit * power * 1.0001)
