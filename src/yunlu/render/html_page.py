"""HTML pages that need nothing else: no network, no fonts, no libraries; figures in them are SVG.

Both languages are in a page; an attribute of the root decides which one shows. Scripts only add
comfort (hover, switches): everything can be read without them, and on paper.

An SVG fills its box. Strokes do not stretch with the drawing (``vector-effect`` in the style sheet); texts
would, so they are not part of it: a drawing names positions at which the page sets them. Every mark of a
figure of trials carries the number of its trial, so that pointing at one lights up the trial everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from yunlu.core.secrets import clean_for_page
from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.render.figure_values import (
    Axis,
    LineFigure,
    ParallelFigure,
    ScatterFigure,
    StackFigure,
    TrialCurvesFigure,
)
from yunlu.render.format import (
    show_dollars,
    show_finding,
    show_metric,
    show_param,
    show_quantity,
    show_value,
)
from yunlu.render.i18n import known_text, same, text, translated
from yunlu.render.study_figures import NUM_LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from yunlu.render.figure_values import Band, DensityGrid, ParallelLine, Series, Sparkline, Unit
    from yunlu.render.i18n import BilingualText

TEMPLATES = Path(__file__).with_name("templates")


def render_html(
    template: str, *, language: str, scripts: Sequence[str], styles: Sequence[str], **values: Any
) -> str:
    """The whole page.

    Args:
        template: Its file.
        language: ``en`` or ``zh``: what a reader sees first.
        scripts: Files of its script.
        styles: Files of its style sheet.
        values: For the template.
    """
    script = "".join(map(_read, scripts))
    return (
        _environment()
        .get_template(template)
        .render(
            language="zh" if language == "zh" else "en",
            style=Markup("".join(map(_read, styles))),  # noqa: S704 (our own files)
            script=Markup(script),  # noqa: S704 (our own files)
            # Only this very script may run, so nothing smuggled in through data ever does.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )


def render_fragment(template: str, *, style: str, **values: Any) -> str:
    """A part of somebody else's page: no script, and a style that names its own block only."""
    sheet = Markup(_read(style))  # noqa: S704 (our own file)
    return _environment().get_template(template).render(style=sheet, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=show_bytes,
        count=show_count,
        duration=show_duration,
        dollars=show_dollars,
        instant=_show_instant,
        plain=_show_plain,
    )
    filters: dict[str, Any] = environment.filters
    filters["both"] = translated
    functions: dict[str, Any] = environment.globals  # typed too narrowly by Jinja
    functions.update(
        text=text,
        known_text=known_text,
        finding=show_finding,
        metric=show_metric,
        quantity=show_quantity,
        param=show_param,
        value=show_value,
        draw_chart=draw_chart,
        legend=find_legend,
        read_out=read_out,
        draw_trials=draw_trial_figure,
        draw_spark=draw_sparkline,
        targets=find_targets,
    )
    return environment


def _clean(value: Any) -> Any:
    """Every value on its way into a page, before it is escaped."""
    if hasattr(value, "__html__"):
        return Markup(clean_for_page(value.__html__()))  # noqa: S704 (escaped by whoever made it)
    return clean_for_page(value) if isinstance(value, str) else value


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _show_instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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


WIDTH, HEIGHT = 1000, 400


def draw_path(
    classes: str, pieces: Iterable[str], *, key: str | None = None, trial: int | None = None
) -> Markup:
    """One path; nothing where there are no pieces."""
    d = "".join(pieces)
    if not d:
        return Markup("")
    owner = Markup(' data-key="{}"').format(key) if key else Markup("")
    owner += Markup(' data-trial="{}"').format(trial) if trial is not None else Markup("")
    return Markup('<path class="{}"{} d="{}"/>').format(classes, owner, d)


def draw_frame(content: Markup) -> Markup:
    """The whole drawing."""
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(WIDTH, HEIGHT, content)


def draw_grid(ticks: Sequence[Tick]) -> Markup:
    """A line across at each label."""
    return draw_path("grid", (f"M0 {place_y(tick.at)}H{WIDTH}" for tick in ticks))


def draw_verticals(classes: str, shares: Iterable[float], *, floor: float = 0.0) -> Markup:
    """Lines from the top down to the floor."""
    return draw_path(classes, (f"M{place_x(share)} 0V{place_y(floor)}" for share in shares))


def join(shares: Sequence[tuple[float, float]]) -> str:
    """A line through points; a lone point becomes a dot by its round cap."""
    if not shares:
        return ""
    return "M" + "L".join(map(_place, shares)) + ("h0" if len(shares) == 1 else "")


def dot(share: tuple[float, float]) -> str:
    """A dot, whatever the drawing is stretched to."""
    return f"M{_place(share)}h0"


def place_x(share: float) -> str:
    """Horizontal coordinate."""
    return f"{share * WIDTH:.1f}".removesuffix(".0")


def place_y(share: float) -> str:
    """Vertical coordinate, counted from the bottom."""
    return f"{(1 - share) * HEIGHT:.1f}".removesuffix(".0")


def _place(share: tuple[float, float]) -> str:
    return f"{place_x(share[0])} {place_y(share[1])}"


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
