"""Figures as values: what is shown and on which ranges, without how it is drawn.

A figure holds numbers, names in both languages and the range of its axes. It survives a trip through
JSON unchanged, so that the page, matplotlib and a browser draw the same data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from yunlu.core.value import Value
from yunlu.render.format import is_share_metric, show_param
from yunlu.render.i18n import BilingualText, same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Dimension, ParamValue

Unit = Literal["number", "count", "percent", "bytes", "rate", "duration", "dollars"]
LineStyle = Literal["faint", "line", "dots", "steps"]
TrialShade = Literal["best", "none", "0", "1", "2", "3", "4", "5"]
"""How good a trial is among the others: ``0`` to ``5`` from good to bad; ``none``: not known."""

NUM_COLOURS = 8
"""Colours of a palette that can be told apart; numbered from 1."""


class Axis(Value):
    """The range of an axis, in the unit of its values."""

    low: float
    high: float
    log: bool = False
    unit: Unit = "number"
    name: BilingualText | None = None
    categories: tuple[str, ...] = ()
    """Names instead of numbers: category ``i`` lies at ``i``."""
    ticks: int = 5
    """About how many labels fit."""

    def share(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end, at the edge if beyond."""
        if math.isnan(value):
            return 1.0
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = (math.log10(edge) for edge in (low, high, at))
        return (at - low) / (high - low) if high > low else 0.5

    def has(self, value: float) -> bool:
        """Whether a value lies on the axis."""
        return self.low <= value <= self.high


class Series(Value):
    """One line of a figure."""

    key: str
    name: BilingualText
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: int = 1
    """Number in the palette."""
    style: LineStyle = "line"


class EventMarks(Value):
    """Positions on the horizontal axis at which something happened."""

    kind: str
    name: BilingualText
    x: tuple[float, ...]


class Band(Value):
    """A stretch of the horizontal axis with a background of its own."""

    start: float
    end: float
    label: str
    colour: int


class LineFigure(Value):
    """Lines over a common horizontal axis."""

    id: str
    title: BilingualText
    x: Axis
    y: Axis
    log_y: Axis | None = None
    """The same on a logarithmic scale, where that helps."""
    scale: Literal["linear", "log"] = "linear"
    """Shown first."""
    series: tuple[Series, ...]
    marks: tuple[EventMarks, ...] = ()
    bands: tuple[Band, ...] = ()
    bands_name: BilingualText | None = None
    """What the bands tell apart."""
    palette: Literal["curves", "workers"] = "curves"
    wide: bool = False


class StackLayer(Value):
    """One layer of a stack."""

    key: str
    name: BilingualText
    shares: tuple[float, ...]


class StackFigure(Value):
    """Layers that fill the whole height: their shares add up to 1 at each position."""

    id: str
    title: BilingualText
    x: Axis
    positions: tuple[float, ...]
    layers: tuple[StackLayer, ...]
    """From the bottom up."""
    wide: bool = False


class BarSegment(Value):
    """One part of a bar."""

    key: str
    name: BilingualText
    value: float
    colour: int = 1


class Bar(Value):
    """One bar: its segments stand end to end."""

    key: str
    name: BilingualText
    segments: tuple[BarSegment, ...]
    label: str = ""
    """The value as text."""
    interval: tuple[float, float] | None = None
    interval_label: str = ""

    @property
    def value(self) -> float:
        """Length of the whole bar."""
        return math.fsum(segment.value for segment in self.segments)


class BarFigure(Value):
    """Horizontal bars on a common scale."""

    id: str
    title: BilingualText
    unit: Unit = "number"
    axis: BilingualText | None = None
    """Name of the scale."""
    bars: tuple[Bar, ...]

    @property
    def longest(self) -> float:
        """The value at the end of the scale."""
        values = [bar.value for bar in self.bars]
        values += [bar.interval[1] for bar in self.bars if bar.interval is not None]
        return max((value for value in values if math.isfinite(value)), default=0.0)

    def share(self, value: float) -> float:
        """Length of a value as a share of the scale."""
        return value / self.longest if math.isfinite(value) and self.longest else 0.0


class HeatmapFigure(Value):
    """Counts of rows by columns, shaded."""

    id: str
    title: BilingualText
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]
    """Of each row, with the columns that are not shown."""
    shades: tuple[tuple[float, ...], ...]
    """0 to 1."""


class RankTile(Value):
    """What one rank holds."""

    rank: int
    worker: str
    host: str
    pid: int | None
    colour: int
    """The same colour for the same part of the weights."""
    holds: tuple[BilingualText, ...]
    lost: BilingualText | None
    """The fault that ended it."""


class LayoutFigure(Value):
    """Ranks in a parallel layout: stages across, replicas down, shards and slices in each cell."""

    id: str
    layout: str
    colour: int
    first_step: int
    last_step: int | None
    """None while it is in use."""
    sizes: dict[str, int]
    """Ranks along each axis of the layout."""
    stages: tuple[tuple[str, ...], ...]
    """What each pipeline stage holds."""
    cells: tuple[tuple[tuple[RankTile | None, ...], ...], ...]
    """Replicas, stages, tiles."""
    columns: int
    """Cells in a row of the drawing."""
    tile_columns: int
    """Tiles in a row of a cell."""
    has_replica_rows: bool
    colour_meaning: BilingualText
    notes: tuple[BilingualText, ...]
    """What each axis of the layout splits."""


class TrialPoint(Value):
    """One trial in a scatter."""

    trial: int
    x: float
    y: float
    shade: TrialShade


class DensityGrid(Value):
    """How good the neighbourhood of each cell is: level 0 is best, -1 unknown."""

    levels: tuple[tuple[int, ...], ...]
    """Rows from the bottom up."""


class ScatterFigure(Value):
    """Trials by two quantities."""

    id: str
    title: BilingualText
    x: Axis
    y: Axis
    points: tuple[TrialPoint, ...]
    """Best last, so that it is drawn on top."""
    small: bool = False
    """Many points: smaller dots."""
    line: tuple[tuple[float, float], ...] = ()
    line_kind: Literal["best", "front"] = "best"
    """The best value so far, or the Pareto front."""
    background: DensityGrid | None = None
    star: tuple[float, float] | None = None
    """The best trial."""
    note: BilingualText | None = None
    wide: bool = False


class TrialCurve(Value):
    """The evaluations of one trial."""

    trial: int
    state: str
    shade: TrialShade
    x: tuple[float, ...]
    y: tuple[float, ...]


class TrialCurvesFigure(Value):
    """Learning curves of trials."""

    id: str
    title: BilingualText
    x: Axis
    y: Axis
    curves: tuple[TrialCurve, ...]
    """Best last."""
    note: BilingualText | None = None
    wide: bool = True


class ParallelLine(Value):
    """One trial through all axes."""

    trial: int
    state: str
    shade: TrialShade
    values: tuple[float | None, ...]
    """On each axis; None where the trial lacks it."""


class ParallelFigure(Value):
    """Parallel coordinates: each trial from its setting to its result."""

    id: str
    title: BilingualText
    axes: tuple[Axis, ...]
    lines: tuple[ParallelLine, ...]
    """Best last."""
    note: BilingualText | None = None
    wide: bool = True


class Sparkline(Value):
    """A curve small enough for a cell of a table."""

    x: Axis
    y: Axis
    points: tuple[tuple[float, float], ...]


class OptionPoint(Value):
    """A plan option with the interval of its time and cost."""

    name: str
    hours: tuple[float, float, float]
    """Low, expected, high."""
    dollars: tuple[float, float, float]


class CostTimeFigure(Value):
    """Cost against time of all candidates of a plan, with the options that are offered."""

    title: str
    candidates: tuple[tuple[float, float], ...]
    """Hours and dollars."""
    front: tuple[tuple[float, float], ...]
    """Candidates that no other beats in both."""
    options: tuple[OptionPoint | None, ...]
    """The first is the chosen one; None where no price is known."""
    hours: tuple[float, float] | None
    """What is shown of the axis."""
    dollars: tuple[float, float] | None


class TimelineSpan(Value):
    """A stretch of time in one or several rows."""

    first_row: float
    last_row: float
    start: float
    end: float
    colour: str
    opacity: float = 1.0


class TimelineFigure(Value):
    """What occupies each row over time."""

    title: str
    x_name: str
    y_name: str = ""
    rows: float
    until: float
    """End of the axis."""
    spans: tuple[TimelineSpan, ...]
    row_labels: tuple[tuple[float, str], ...]
    """Position and name."""
    separators: tuple[float, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    """Names and colours."""
    legend_title: str = ""
    ended_at: float | None = None
    """From here on nothing runs."""
    deadline: float | None = None


class StripFigure(Value):
    """Every value of each group, and the mean of the group."""

    title: str = ""
    x_name: str
    groups: tuple[tuple[str, tuple[float, ...]], ...]


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
