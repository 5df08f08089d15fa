"""Labels of an axis: round values and their text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.render.format import show_dollars

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.render.figures.values import Axis, Unit

_CLOCK_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400)
_EDGE = 1e-9
"""A label at the very end of an axis may miss it by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label at a share of the axis, from the left or from the bottom."""

    at: float
    label: str


def find_ticks(axis: Axis) -> tuple[Tick, ...]:
    """Labels at every category, or at round values."""
    if axis.categories:
        return tuple(
            Tick(at=axis.share(index), label=name) for index, name in enumerate(axis.categories)
        )
    if axis.low >= axis.high:
        return (Tick(at=0.5, label=show_on_axis(axis.low, axis.unit)),)
    if axis.log:
        return tuple(
            Tick(at=axis.share(at), label=show_on_axis(at, axis.unit)) for at in _log_values(axis)
        )
    # Labels of one axis look alike: 0.0008 beside 0.001, 8e-4 beside 5e-4.
    largest = max(abs(axis.low), abs(axis.high))
    return tuple(
        Tick(at=axis.share(at), label=show_on_axis(at, axis.unit, largest=largest))
        for at in _linear_values(axis)
    )


def show_on_axis(value: float, unit: Unit, *, largest: float | None = None) -> str:
    """A value as a label; ``largest`` of the axis decides on the notation of small numbers."""
    show = _SHOW.get(unit)
    if show is not None:
        return show(value)
    if 1e4 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if value != 0 and not 1e-3 <= (largest or abs(value)) < 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _linear_values(axis: Axis) -> list[float]:
    # Memory is counted in powers of 1024: round numbers there are round in its own unit.
    scale = 1024 ** int(math.log(max(axis.high, 1), 1024)) if axis.unit == "bytes" else 1
    rough = (axis.high - axis.low) / scale / axis.ticks
    step = _round_up(rough) * scale
    if axis.unit == "duration" and rough > 0.5:
        days = 86_400 * math.ceil(rough / 86_400)
        step = next((clock_s for clock_s in _CLOCK_S if rough <= clock_s), days)
    if axis.unit == "count":
        step = max(1, round(step))
    first, last = math.ceil(axis.low / step - _EDGE), math.floor(axis.high / step + _EDGE)
    return [index * step for index in range(first, last + 1)]


def _log_values(axis: Axis) -> list[float]:
    low, high = math.log10(axis.low), math.log10(axis.high)
    # Three labels in each decade, where there are few decades.
    is_short = 3 * (high - low) <= 1.25 * axis.ticks
    stride = max(1, math.ceil((high - low) / 6))
    decades = range(max(math.floor(low), -307), min(math.ceil(high), 307) + 1, stride)
    values = [
        digit * 10.0**decade for decade in decades for digit in ((1, 2, 5) if is_short else (1,))
    ]
    values = [at for at in values if axis.low * (1 - _EDGE) <= at <= axis.high * (1 + _EDGE)]
    if len(values) < 3 and is_short and max(abs(low), abs(high)) < 300:
        # Less than a decade: round numbers in between say more.
        step = _round_up((axis.high - axis.low) / axis.ticks)
        first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
        values = [index * step for index in range(first, last + 1)]
    return values


def _show_clock(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds < 60:
        return show_duration(seconds).replace(".0 ", " ")
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes}:{rest:02d} min" if rest else f"{minutes} min"


def _round_up(rough: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if rough <= digit * power * 1.0001)


_SHOW: dict[Unit, Callable[[float], str]] = {
    "bytes": lambda value: show_bytes(value).replace(".0 ", " "),
    "rate": show_count,
    "duration": _show_clock,
    "dollars": lambda value: show_dollars(value) if value else "0",
    "percent": lambda value: f"{value * 100:.4g} %",
    "count": lambda value: f"{value:,.0f}",
}
