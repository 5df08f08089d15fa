"""Figures of trials drawn as SVG.

Every mark carries the number of its trial, so that pointing at one lights up the trial everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from markupsafe import Markup

from yunlu.render.drawing.svg import (
    HEIGHT,
    WIDTH,
    dot,
    draw_frame,
    draw_grid,
    draw_path,
    draw_verticals,
    join,
)
from yunlu.render.drawing.ticks import Tick, find_ticks
from yunlu.render.figures.landscape import NUM_LEVELS
from yunlu.render.figures.values import ParallelFigure, ScatterFigure, TrialCurvesFigure
from yunlu.render.i18n.texts import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.render.figures.values import DensityGrid, ParallelLine, Sparkline
    from yunlu.render.i18n.texts import BilingualText

TrialFigure = ScatterFigure | TrialCurvesFigure | ParallelFigure
Share = tuple[float, float]
"""From the left and from the bottom."""

_FLOOR = 0.1
"""Below the parallel axes, lines pass that lack a dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAxis:
    """One of several vertical axes beside each other."""

    at: float
    name: str
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialDrawing:
    """A drawing without its texts, and the positions of the texts."""

    svg: Markup
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    axes: tuple[ParallelAxis, ...] = ()
    star: Share | None = None
    legend: tuple[tuple[BilingualText, str], ...] = ()
    """Names, each with the class of its key."""

    @property
    def label_length(self) -> int:
        """Characters of the longest label on the vertical axis."""
        return max((len(tick.label) for tick in self.y_ticks), default=1)


def draw_trial_figure(figure: TrialFigure) -> TrialDrawing:
    """The drawing of any figure of trials."""
    if isinstance(figure, ScatterFigure):
        return _draw_scatter(figure)
    return _draw_curves(figure) if isinstance(figure, TrialCurvesFigure) else _draw_parallel(figure)


def find_targets(figure: TrialFigure) -> list[tuple[float, float, int]]:
    """What can be pointed at: shares from the left and from the bottom, and the trial."""
    targets: list[tuple[float, float, int]] = []
    if isinstance(figure, ScatterFigure):
        x, y = figure.x, figure.y
        targets = [(x.share(point.x), y.share(point.y), point.trial) for point in figure.points]
    elif isinstance(figure, TrialCurvesFigure):
        for curve in figure.curves:
            pairs = zip(curve.x, curve.y, strict=True)
            targets += [(figure.x.share(x), figure.y.share(y), curve.trial) for x, y in pairs]
    else:
        for line in figure.lines:
            shares = _line_shares(figure, line)
            targets += [(left, up, line.trial) for left, up in _between(shares)]
    return [(round(left, 4), round(up, 4), trial) for left, up, trial in targets]


def draw_sparkline(figure: Sparkline) -> Markup:
    """A curve without axes; nothing where it has no points."""
    shares = [(figure.x.share(x), figure.y.share(y)) for x, y in figure.points]
    return draw_frame(draw_path("spark", [join(shares)])) if shares else Markup("")


def _draw_scatter(figure: ScatterFigure) -> TrialDrawing:
    x, y = figure.x, figure.y
    y_ticks = find_ticks(y)
    background = draw_grid(y_ticks)
    if figure.background is not None:
        background = _draw_density(figure.background)
    line = draw_path(figure.line_kind, [join([(x.share(a), y.share(b)) for a, b in figure.line])])
    dots = _draw_dots(figure)
    # The best so far runs over the many dots; a front passes below the few.
    content = dots + line if figure.line_kind == "best" else line + dots
    star = figure.star
    return TrialDrawing(
        svg=draw_frame(background + content),
        x_ticks=find_ticks(x),
        y_ticks=y_ticks,
        star=None if star is None else (x.share(star[0]), y.share(star[1])),
    )


def _draw_dots(figure: ScatterFigure) -> Markup:
    shares = [(figure.x.share(point.x), figure.y.share(point.y)) for point in figure.points]
    # A ring in the colour of the background tells apart dots that overlap.
    drawn = draw_path("halo", [] if figure.small else map(dot, shares))
    size = "speck" if figure.small else "spot"
    for point, share in zip(figure.points, shares, strict=True):
        drawn += draw_path(f"{size} q-{point.shade}", [dot(share)], trial=point.trial)
    return drawn


def _draw_density(grid: DensityGrid) -> Markup:
    """Cells by level; neighbours in a row become one piece."""
    height, drawn = HEIGHT / len(grid.levels), Markup("")
    pieces: dict[int, list[str]] = {}
    for row, levels in enumerate(grid.levels):
        width, top, start = WIDTH / len(levels), HEIGHT - (row + 1) * height, 0
        for level, cells in groupby(levels):
            end = start + len(list(cells))
            box = f"M{start * width:g} {top:g}h{(end - start) * width:g}"
            box += f"v{height:g}h{(start - end) * width:g}z"
            pieces.setdefault(level, []).append(box)
            start = end
    for level in range(NUM_LEVELS):
        drawn += draw_path(f"ground g{level}", pieces.get(level, []))
    return drawn


def _draw_curves(figure: TrialCurvesFigure) -> TrialDrawing:
    """Curves of trials; of one that was not trained to its end, its last point stands out."""
    y_ticks, drawn = find_ticks(figure.y), Markup("")
    for curve in figure.curves:
        pairs = zip(curve.x, curve.y, strict=True)
        shares = [(figure.x.share(x), figure.y.share(y)) for x, y in pairs]
        look = f"{curve.state} q-{curve.shade}"
        drawn += draw_path(f"curve {look}", [join(shares)], trial=curve.trial)
        if curve.state != "done":
            drawn += draw_path(f"left {look}", [join(shares[-1:])], trial=curve.trial)
    return TrialDrawing(
        svg=draw_frame(draw_grid(y_ticks) + drawn),
        x_ticks=find_ticks(figure.x),
        y_ticks=y_ticks,
        legend=(
            (text("study.curves.best"), "line q-best"),
            (text("study.curves.done"), "line q-0"),
            (text("study.curves.pruned"), "thin q-3"),
        ),
    )


def _draw_parallel(figure: ParallelFigure) -> TrialDrawing:
    positions = _positions(figure)
    axes = tuple(
        ParallelAxis(
            at=at,
            name=axis.name.en if axis.name else "",
            ticks=tuple(
                Tick(at=_above_floor(tick.at), label=tick.label) for tick in find_ticks(axis)
            ),
        )
        for at, axis in zip(positions, figure.axes, strict=True)
    )
    drawn = draw_verticals("pole", positions, floor=_FLOOR)
    for line in figure.lines:
        look = f"thread {line.state} q-{line.shade}"
        drawn += draw_path(look, [join(_line_shares(figure, line))], trial=line.trial)
    return TrialDrawing(svg=draw_frame(drawn), axes=axes)


def _positions(figure: ParallelFigure) -> list[float]:
    return [index / (len(figure.axes) - 1) for index in range(len(figure.axes))]


def _line_shares(figure: ParallelFigure, line: ParallelLine) -> list[Share]:
    return [
        (at, 0.0 if value is None else _above_floor(axis.share(value)))
        for at, axis, value in zip(_positions(figure), figure.axes, line.values, strict=True)
    ]


def _between(shares: Sequence[Share], count: int = 6) -> Iterator[Share]:
    """Points on a line close enough for a pointer to find it anywhere."""
    for (left, low), (right, high) in pairwise(shares):
        for step in range(count):
            share = step / count
            yield left + share * (right - left), low + share * (high - low)
    yield shares[-1]


def _above_floor(share: float) -> float:
    return _FLOOR + share * (1 - _FLOOR)
