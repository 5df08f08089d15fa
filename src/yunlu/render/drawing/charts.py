"""Line and stack figures drawn as SVG, with what hovering reads out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from yunlu.render.drawing.svg import (
    HEIGHT,
    dot,
    draw_frame,
    draw_grid,
    draw_path,
    draw_verticals,
    join,
    place_x,
    place_y,
)
from yunlu.render.drawing.ticks import find_ticks
from yunlu.render.figures.values import Axis, LineFigure, StackFigure
from yunlu.render.i18n.texts import same

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.render.drawing.ticks import Tick
    from yunlu.render.figures.values import Band, Series
    from yunlu.render.i18n.texts import BilingualText

_WIDTH_OF_LABEL = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing without its texts, and the positions of the texts."""

    svg: Markup
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    band_labels: tuple[tuple[float, float, str], ...] = ()
    """Where each begins, its width, its name."""
    has_breaks: bool = False
    """Whether steps are marked whose value is not finite."""

    @property
    def label_length(self) -> int:
        """Characters of the longest label on the vertical axis."""
        return max((len(tick.label) for tick in self.y_ticks), default=1)


def draw_chart(figure: LineFigure | StackFigure) -> dict[str, Drawing]:
    """The drawings of a figure by scale: ``linear``, and ``log`` where it has one."""
    if isinstance(figure, StackFigure):
        return {"linear": _draw_stack(figure)}
    drawings = {"linear": _draw_lines(figure, figure.y)}
    if figure.log_y is not None:
        drawings["log"] = _draw_lines(figure, figure.log_y)
    return drawings


def find_legend(figure: LineFigure | StackFigure) -> Iterator[tuple[BilingualText, str]]:
    """Names, each with the class of its key. A lone line needs none: it has the title."""
    if isinstance(figure, StackFigure):
        return
    for label, colour in {band.label: band.colour for band in figure.bands}.items():
        yield same(label), f"fill w{colour}"
    letter = "w" if figure.palette == "workers" else "c"
    if len(figure.series) > 1 or figure.palette == "workers":
        yield from ((line.name, f"{letter}{line.colour}") for line in figure.series)
    yield from ((mark.name, f"mark {mark.kind}") for mark in figure.marks)


def read_out(figure: LineFigure | StackFigure) -> dict[str, Any]:
    """What hovering tells, for the page's script."""
    if isinstance(figure, StackFigure):
        series: list[dict[str, Any]] = [
            {"name": _pair(layer.name), "x": figure.positions, "y": _short(layer.shares)}
            for layer in figure.layers
        ]
        return {"unit": "percent", "axis": figure.x.unit, "series": series, "marks": []}
    series: list[dict[str, Any]] = [
        {"name": _pair(line.name), "x": line.x, "y": _short(line.y)} for line in figure.series
    ]
    if figure.bands_name is not None:
        at = figure.series[0].x
        bands = [_band_at(figure.bands, x) for x in at]
        series.append({"name": _pair(figure.bands_name), "x": at, "y": bands})
    marks = [{"name": _pair(mark.name), "x": mark.x} for mark in figure.marks]
    return {"unit": figure.y.unit, "axis": figure.x.unit, "series": series, "marks": marks}


def _draw_lines(figure: LineFigure, y: Axis) -> Drawing:
    x, y_ticks = figure.x, find_ticks(y)
    background, labels = _draw_bands(figure.bands, x)
    marks = Markup("").join(
        draw_verticals(f"mark {mark.kind}", (x.share(at) for at in mark.x if x.has(at)))
        for mark in figure.marks
    )
    # A step that was dealt with has a mark that says how.
    breaks = {
        at
        for line in figure.series
        for at, value in zip(line.x, line.y, strict=True)
        if not math.isfinite(value)
    } - {at for mark in figure.marks for at in mark.x}
    broken = draw_verticals("broken", map(x.share, sorted(breaks)))
    lines = Markup("").join(_draw_series(line, x, y) for line in figure.series)
    return Drawing(
        svg=draw_frame(background + draw_grid(y_ticks) + broken + marks + lines),
        # The name of the axis stands where a label at its very beginning would.
        x_ticks=tuple(tick for tick in find_ticks(x) if tick.at > 0 or not figure.bands),
        y_ticks=y_ticks,
        band_labels=tuple(labels),
        has_breaks=bool(breaks),
    )


def _draw_bands(bands: Sequence[Band], x: Axis) -> tuple[Markup, list[tuple[float, float, str]]]:
    drawn, labels = Markup(""), list[tuple[float, float, str]]()
    for band in bands:
        left, right = x.share(band.start), x.share(band.end)
        box = f"M{place_x(left)} 0H{place_x(right)}V{HEIGHT}H{place_x(left)}Z"
        drawn += draw_path(f"band w{band.colour}", [box])
        if right - left >= _WIDTH_OF_LABEL:
            labels.append((left, right - left, band.label))
    return drawn, labels


def _draw_series(line: Series, x: Axis, y: Axis) -> Markup:
    """A line, broken where a value is not finite."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(line.x, line.y, strict=True):
        if math.isfinite(value):
            pieces[-1].append((x.share(at), y.share(value)))
        elif pieces[-1]:
            pieces.append([])
    drawn = draw_path(f"{line.style} c{line.colour}", map(join, pieces), key=line.key)
    if line.style == "dots":
        dots = (dot(share) for piece in pieces for share in piece)
        drawn += draw_path(f"dot c{line.colour}", dots)
    return drawn


def _draw_stack(figure: StackFigure) -> Drawing:
    # A single position has no width: draw it from edge to edge.
    is_single = len(figure.positions) == 1
    shares = [0.0, 1.0] if is_single else [figure.x.share(at) for at in figure.positions]
    floor, drawn = [0.0] * len(shares), Markup("")
    for number, layer in enumerate(figure.layers, 1):
        heights = layer.shares * 2 if is_single else layer.shares
        roof = [low + height for low, height in zip(floor, heights, strict=True)]
        outline = [*zip(shares, roof, strict=True), *reversed([*zip(shares, floor, strict=True)])]
        points = (f"{place_x(left)} {place_y(up)}" for left, up in outline)
        drawn += draw_path(f"layer c{number}", ["M" + "L".join(points) + "Z"])
        floor = roof
    return Drawing(
        svg=draw_frame(drawn),
        x_ticks=find_ticks(figure.x),
        y_ticks=find_ticks(Axis(low=0, high=1, unit="percent", ticks=6)),
    )


def _pair(name: BilingualText) -> tuple[str, str]:
    return name.en, name.zh


def _short(values: Sequence[float]) -> list[float | str]:
    return [float(f"{value:.6g}") if math.isfinite(value) else str(value) for value in values]


def _band_at(bands: Sequence[Band], x: float) -> str:
    return next((band.label for band in reversed(bands) if band.start <= x), "")
