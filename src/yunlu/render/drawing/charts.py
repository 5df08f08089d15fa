"""What a curve looks like: points thinned and smoothed, then drawn as SVG that fills its box.

Drawings stretch to any width (``preserveAspectRatio="none"``, strokes that do not scale), so the
labels of an axis are not part of the SVG: they are returned as places for the page to set text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from markupsafe import Markup

from yunlu.core.units import show_bytes, show_count, show_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.jobs.curves import Point

Unit = Literal["number", "percent", "bytes", "rate", "duration"]
Style = Literal["faint", "line", "dots"]

_WIDTH, _HEIGHT = 1000, 400
_LARGEST = 1e300
_ROOM_FOR_LABEL = 0.04
_CLOCK_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    key: str
    points: Sequence[Point]
    colour: int
    """Which of the page's colours, counted from 1."""
    style: Style = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Steps at which something happened: a line from top to bottom."""

    kind: str
    """Names the look."""
    steps: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of the horizontal axis with a ground of its own."""

    start: int
    end: int
    colour: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label on an axis, at a share of its length from the left or from the bottom."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart without its texts, and the texts' places."""

    svg: Markup
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_range: tuple[float, float]
    band_labels: tuple[tuple[float, float, str], ...] = ()
    """Where each begins, how wide it is, its name."""

    @property
    def label_length(self) -> int:
        """Characters of the longest label on the vertical axis."""
        return max((len(tick.label) for tick in self.y_ticks), default=1)


def draw_lines(
    series: Sequence[Series], *, unit: Unit, log: bool = False, marks: Sequence[Mark] = ()
) -> Drawing:
    """Lines over the step, with a grid; a step whose value is not finite gets a mark of its own."""
    points = [point for line in series for point in line.points]
    x = _Scale.over([step for step, _ in points])
    values = [value for _, value in points if math.isfinite(value)]
    from_zero = unit in {"bytes", "rate", "duration"}
    y = _Scale.over(values, log=log, from_zero=from_zero, padding=0.06)
    if unit == "percent" and not log and values and max(values) <= 1 < y.high:
        y = replace(y, high=1.0 + 0.06 * (1 - y.low))  # no line of 140 % above a share
    y_ticks = _log_ticks(y) if log else _ticks(y, unit)
    grid = _path("grid", (f"M0 {_y(tick.at)}H{_WIDTH}" for tick in y_ticks))
    broken = {step for step, value in points if not math.isfinite(value)}
    # A step that was dealt with has a mark that says how.
    broken -= {step for mark in marks for step in mark.steps}
    upright = _upright("broken", sorted(broken), x)
    upright += Markup("").join(_upright(f"mark {mark.kind}", mark.steps, x) for mark in marks)
    lines = Markup("").join(_line(one, x, y) for one in series)
    return Drawing(
        svg=_svg(grid + upright + lines),
        x_ticks=_step_ticks(x),
        y_ticks=y_ticks,
        x_range=(x.low, x.high),
    )


def draw_stack(steps: Sequence[int], shares: Sequence[Sequence[float]]) -> Drawing:
    """Layers that fill the whole height, first at the bottom; each layer's shares add up to 1."""
    x = _Scale.over(steps)
    # A single bucket has no width: draw it from edge to edge.
    places = [x.share(step) for step in steps] if len(steps) > 1 else [0.0, 1.0]
    repeat = len(places) // len(steps)
    floor = [0.0] * len(places)
    layers = Markup("")
    for number, layer in enumerate(shares, 1):
        roof = [low + high for low, high in zip(floor, list(layer) * repeat, strict=True)]
        there = [f"{_x(at)} {_y(share)}" for at, share in zip(places, roof, strict=True)]
        back = [f"{_x(at)} {_y(share)}" for at, share in zip(places, floor, strict=True)]
        layers += _path(f"layer c{number}", ["M" + "L".join([*there, *reversed(back)]) + "Z"])
        floor = roof
    y = _Scale(low=0, high=1)
    return Drawing(
        svg=_svg(layers),
        x_ticks=_step_ticks(x),
        y_ticks=_ticks(y, "percent"),
        x_range=(x.low, x.high),
    )


def draw_course(
    course: Series, *, bands: Sequence[Band] = (), marks: Sequence[Mark] = ()
) -> Drawing:
    """Steps over the time in milliseconds, on a ground that tells stretches apart."""
    x = _Scale.over([ms for ms, _ in course.points])
    y = _Scale.over([step for _, step in course.points], from_zero=True, padding=0.06)
    ground, labels = Markup(""), list[tuple[float, float, str]]()
    for band in bands:
        left, right = (min(max(x.share(edge), 0.0), 1.0) for edge in (band.start, band.end))
        ground += _path(
            f"band w{band.colour}", [f"M{_x(left)} 0H{_x(right)}V{_HEIGHT}H{_x(left)}Z"]
        )
        if right - left >= _ROOM_FOR_LABEL:
            labels.append((left, right - left, band.label))
    y_ticks = _step_ticks(y)
    grid = _path("grid", (f"M0 {_y(tick.at)}H{_WIDTH}" for tick in y_ticks))
    upright = Markup("").join(_upright(f"mark {mark.kind}", mark.steps, x) for mark in marks)
    return Drawing(
        svg=_svg(ground + grid + upright + _line(course, x, y)),
        x_ticks=_time_ticks(x),
        y_ticks=y_ticks,
        x_range=(x.low, x.high),
        band_labels=tuple(labels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Values to shares of an axis."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        *,
        log: bool = False,
        from_zero: bool = False,
        padding: float = 0.0,
    ) -> _Scale:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
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
        floor = low if from_zero and low == 0 else low - room
        return cls(low=floor, high=high + room, log=log)

    def share(self, value: float) -> float:
        place = math.log10(value) if self.log else max(-_LARGEST, min(value, _LARGEST))
        return (place - self.low) / (self.high - self.low)


def _upright(classes: str, steps: Iterable[int], x: _Scale) -> Markup:
    inside = (x.share(step) for step in steps if x.low <= step <= x.high)
    return _path(classes, (f"M{_x(share)} 0V{_HEIGHT}" for share in inside))


def _line(series: Series, x: _Scale, y: _Scale) -> Markup:
    pieces: list[list[str]] = [[]]
    for step, value in series.points:
        if math.isfinite(value):
            pieces[-1].append(f"{_x(x.share(step))} {_y(y.share(value))}")
        elif pieces[-1]:
            pieces.append([])
    whole = [piece for piece in pieces if piece]
    # "h0" gives a lone point its round cap: a dot.
    drawn = _path(
        f"{series.style} c{series.colour}",
        ("M" + "L".join(piece) + ("h0" if len(piece) == 1 else "") for piece in whole),
        key=series.key,
    )
    if series.style == "dots":
        dots = (f"M{place}h0" for piece in whole for place in piece)
        drawn += _path(f"dot c{series.colour}", dots)
    return drawn


def _ticks(scale: _Scale, unit: Unit, count: int = 6) -> tuple[Tick, ...]:
    # Memory is counted in powers of 1024: round numbers there are round in its own unit.
    size = 1024 ** int(math.log(max(scale.high, 1), 1024)) if unit == "bytes" else 1
    step = _round_step((scale.high - scale.low) / size / count) * size
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return tuple(
        Tick(at=scale.share(i * step), label=_tick_label(i * step, unit))
        for i in range(first, last + 1)
    )


def _tick_label(value: float, unit: Unit) -> str:
    if unit == "bytes":
        return show_bytes(value).replace(".0 ", " ")
    if unit == "rate":
        return show_count(value)
    if unit == "duration":
        return show_duration(value).replace(".0 ", " ") if value else "0"
    if unit == "percent":
        return f"{value * 100:.4g} %"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def _step_ticks(scale: _Scale) -> tuple[Tick, ...]:
    step = max(1, round(_round_step((scale.high - scale.low) / 5)))
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return tuple(
        Tick(at=scale.share(i * step), label=f"{i * step:,}") for i in range(first, last + 1)
    )


def _time_ticks(scale: _Scale) -> tuple[Tick, ...]:
    """Round numbers of a clock, from milliseconds."""
    rough_s = (scale.high - scale.low) / 1000 / 5
    round_s = next(
        (each for each in _CLOCK_S if rough_s <= each), 86_400 * math.ceil(rough_s / 86_400)
    )
    step_s = _round_step(rough_s) if rough_s < 0.5 else round_s
    # The name of the axis stands where the first would.
    first, last = math.floor(scale.low / 1000 / step_s) + 1, math.floor(scale.high / 1000 / step_s)
    return tuple(
        Tick(at=scale.share(i * step_s * 1000), label=_clock_label(i * step_s))
        for i in range(first, last + 1)
    )


def _clock_label(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    full = f"{minutes}:{rest:02d}" if rest else f"{minutes} min"
    return full if minutes else f"{seconds:.4g} s"


def _log_ticks(scale: _Scale) -> tuple[Tick, ...]:
    few = scale.high - scale.low < 2.5
    stride = max(1, math.ceil((scale.high - scale.low) / 6))
    first, last = max(math.floor(scale.low), -307), min(math.ceil(scale.high), 307)
    decades = range(first, last + 1, stride)
    values = [digit * 10.0**decade for decade in decades for digit in ((1, 2, 5) if few else (1,))]
    inside = [value for value in values if scale.low <= math.log10(value) <= scale.high]
    if len(inside) < 3 and few and max(abs(scale.low), abs(scale.high)) < 300:
        # Less than a decade: round numbers in between say more.
        low, high = 10**scale.low, 10**scale.high
        step = _round_step((high - low) / 5)
        inside = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return tuple(
        Tick(at=scale.share(value), label=_tick_label(value, "number")) for value in inside
    )


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if rough <= digit * power * 1.0001)


def _x(share: float) -> str:
    return f"{share * _WIDTH:.1f}".removesuffix(".0")


def _y(share: float) -> str:
    return f"{(1 - share) * _HEIGHT:.1f}".removesuffix(".0")


def _path(classes: str, pieces: Iterable[str], *, key: str | None = None) -> Markup:
    d = "".join(pieces)
    if not d:
        return Markup("")
    named = Markup(' data-key="{}"').format(key) if key else ""
    return Markup('<path class="{}"{} d="{}"/>').format(classes, named, d)


def _svg(content: Markup) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(_WIDTH, _HEIGHT, content)
