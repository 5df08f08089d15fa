"""Figures drawn with matplotlib, for files: PNG and SVG."""

from __future__ import annotations

import io
from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, missing_part
from yunlu.core.files import write_atomically
from yunlu.core.secrets import clean_for_page
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.plan import describe_layout
from yunlu.render.figure_values import (
    BarFigure,
    CostTimeFigure,
    LineFigure,
    StripFigure,
    TimelineFigure,
)
from yunlu.render.run_figures import plan_options_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.planning.plan import Plan
    from yunlu.render.figure_values import OptionPoint

    PlotFigure = BarFigure | CostTimeFigure | LineFigure | StripFigure | TimelineFigure

PALETTE = ("#d9480f", "#1971c2", "#2f9e44", "#7048e8", "#e8a50c", "#0c8599", "#c2255c", "#868e96")
IDLE = "#e6e9ec"
_INK, _GRID, _QUIET, _EDGE = "#212529", "#e9ecef", "#ced4da", "#495057"
_ACCENT, _DOT = PALETTE[0], PALETTE[-1]


def plot(
    figures: Sequence[PlotFigure],
    *,
    size: tuple[float, float],
    format: str = "png",
    dpi: int = 150,
    heights: Sequence[float] = (),
) -> bytes:
    """One or several figures below each other, as the content of a file.

    Args:
        figures: From top to bottom; they share a horizontal axis of the same name.
        size: Inches.
        format: ``png`` or ``svg``.
        dpi: Dots per inch.
        heights: Of each figure, relative to the others.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("matplotlib", "plot", "A picture") from error
    canvas = Figure(figsize=size, layout="constrained" if heights else None)
    grid: dict[str, Any] = {"height_ratios": heights} if heights else {"sharex": len(figures) > 1}
    axes_of: Any = canvas.subplots(len(figures), 1, squeeze=False, **grid)
    for axes, figure in zip(axes_of[:, 0], figures, strict=True):
        axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        draw_on(figure, axes)
        if not heights:
            axes.label_outer()  # one axis for all
    file = io.BytesIO()
    canvas.savefig(file, format=format, dpi=dpi, bbox_inches="tight")
    return file.getvalue()


@singledispatch
def draw_on(figure: Any, axes: Any) -> None:
    """Draw a figure on matplotlib's axes."""
    raise TypeError(f"no drawing for {type(figure).__name__} on {axes}")


@draw_on.register
def _(figure: LineFigure, axes: Any) -> None:
    for line in figure.series:
        colour = PALETTE[(line.colour - 1) % len(PALETTE)]
        if line.style == "dots":
            axes.plot(line.x, line.y, linestyle="", marker="o", markersize=6, color=colour)
        else:
            label = None if figure.palette == "workers" else line.name.en
            axes.step(line.x, line.y, where="post", color=colour, linewidth=1.5, label=label)
    if figure.x.log:
        axes.set_xscale("log")
        _label_decades(axes.xaxis)
    else:
        axes.set_xlim(left=figure.x.low)
    axes.set_ylim(figure.y.low, figure.y.high if figure.y.unit == "percent" else None)
    if figure.y.unit == "count":
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(figure.x.name.en if figure.x.name else "")
    axes.set_ylabel(figure.y.name.en if figure.y.name else "")
    if any(line.name.en for line in figure.series):
        axes.legend(frameon=False, fontsize=9)
    _set_title(axes, figure.title.en)


@draw_on.register
def _(figure: BarFigure, axes: Any) -> None:
    for row, bar in enumerate(figure.bars):
        left = 0.0
        for index, segment in enumerate(bar.segments):
            axes.barh(
                row, segment.value, left=left, height=0.62, alpha=0.22 if index else 1.0,
                color=PALETTE[(segment.colour - 1) % len(PALETTE)],
            )  # fmt: skip
            left += segment.value
        at = left + figure.longest * 0.01
        axes.text(at, row, bar.label, va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(figure.bars)), [bar.name.en for bar in figure.bars])
    axes.set_ylim(len(figure.bars) - 0.5, -0.5)
    axes.set_xlim(0, figure.longest * 1.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(figure.axis.en if figure.axis else "")
    axes.grid(visible=False)  # it would shine through light segments; each bar has its label
    _set_title(axes, figure.title.en)


@draw_on.register
def _(figure: TimelineFigure, axes: Any) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - optional, slow to import
    from matplotlib.patches import Patch  # noqa: PLC0415

    corners: dict[tuple[str, float], list[list[tuple[float, float]]]] = {}
    for span in figure.spans:
        (left, right), (top, bottom) = (span.start, span.end), (span.first_row, span.last_row)
        box = [(left, top), (right, top), (right, bottom), (left, bottom)]
        corners.setdefault((span.colour, span.opacity), []).append(box)
    for (colour, opacity), boxes in corners.items():
        axes.add_collection(
            PolyCollection(
                boxes, facecolors=colour, alpha=opacity, edgecolors="white", linewidths=0.25
            )
        )
    if figure.separators:
        axes.set_facecolor(IDLE)
        axes.grid(visible=False)
    else:
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
    for row in figure.separators:
        axes.axhline(row, color="white", linewidth=1.2, zorder=3)
    if figure.ended_at is not None and figure.ended_at < figure.until:
        axes.axvspan(figure.ended_at, figure.until, color="white", zorder=2)
        axes.text(
            figure.ended_at, figure.rows / 2, " the last job has ended", color=_INK, fontsize=8,
            rotation=90, va="center", zorder=4,
        )  # fmt: skip
    if figure.deadline is not None:
        axes.axvline(figure.deadline, color=_EDGE, linestyle="--", linewidth=1)
    axes.set_xlim(0, figure.until)
    axes.set_ylim(figure.rows, 0)
    axes.set_yticks([at for at, _ in figure.row_labels], [name for _, name in figure.row_labels])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel(figure.x_name)
    axes.set_ylabel(figure.y_name)
    if figure.legend:
        legend = axes.legend(
            handles=[Patch(color=colour, label=name) for name, colour in figure.legend],
            frameon=False, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=9,
            title=figure.legend_title, title_fontsize=8, alignment="left",
        )  # fmt: skip
        legend.get_title().set_color(_INK)
    _set_title(axes, figure.title)


@draw_on.register
def _(figure: StripFigure, axes: Any) -> None:
    names = [name for name, _ in figure.groups]
    for row, (_, values) in enumerate(figure.groups):
        # Spread over the height of the row, so that equal values stay visible.
        spread = [0.5 * index / max(len(values) - 1, 1) - 0.25 for index in range(len(values))]
        rows = [row - offset for offset in spread]
        axes.scatter(values, rows, s=8, color=_DOT, linewidths=0, alpha=0.7)
        mean = sum(values) / len(values)
        axes.plot([mean] * 2, [row - 0.4, row + 0.4], color=_ACCENT, linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(figure.x_name)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


@draw_on.register
def _(figure: CostTimeFigure, axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    if figure.candidates:
        hours, dollars = zip(*figure.candidates, strict=True)
        axes.scatter(
            hours, dollars, s=14, color=_QUIET, linewidths=0, label="every candidate", zorder=2
        )
        hours, dollars = zip(*figure.front, strict=True)
        axes.plot(
            hours, dollars, color=_EDGE, linewidth=1.2, marker="o", markersize=4,
            label="Pareto front", zorder=3,
        )  # fmt: skip
    for index, option in enumerate(figure.options):
        if option is not None:
            _draw_option(axes, option, index)
    if figure.hours is not None and figure.dollars is not None:
        axes.set_xlim(*figure.hours)
        axes.set_ylim(*figure.dollars)
    axes.set_xlabel("time, hours")
    axes.set_ylabel("cost, dollars")
    _label_decades(axes.xaxis)
    _label_decades(axes.yaxis)
    axes.legend(
        frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, markerscale=0.6
    )
    _set_title(axes, figure.title)


def _draw_option(axes: Any, option: OptionPoint, index: int) -> None:
    """An option with its interval and its number; the first stands out."""
    is_first = index == 0
    (low_h, hours, high_h), (low, dollars, high) = option.hours, option.dollars
    axes.errorbar(
        [hours], [dollars], xerr=[[hours - low_h], [high_h - hours]],
        yerr=[[dollars - low], [high - dollars]], fmt="o", markersize=15 if is_first else 12,
        color=_ACCENT if is_first else _EDGE, elinewidth=1, capsize=2, zorder=8 - 0.1 * index,
        label=f"{index + 1}  {option.name}{' (chosen)' if is_first else ''}",
    )  # fmt: skip
    axes.annotate(
        str(index + 1), (hours, dollars), ha="center", va="center", fontsize=9, color="white",
        fontweight="bold", zorder=9,
    )  # fmt: skip


def _set_title(axes: Any, title: str) -> None:
    if title:
        axes.set_title(title, loc="left", color=_INK, fontsize=11)


def _label_decades(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_show_plain))
    axis.set_minor_formatter(NullFormatter())


def _show_plain(value: float, _place: int) -> str:
    return f"{value:,.12g}"


FORMATS = (".png", ".svg", ".html")
_COLUMNS = ("", "hardware", "layout", "memory", "time", "cost", "reason")


def write_plan_plot(outcome: PlanOutcome, path: Path, *, title: str) -> None:
    """Write the plot; the format follows the suffix."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise JobError(
            f"--plot: {path} has no suffix of a picture.", hint=f"use one of {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise JobError(f"--plot: there is no directory {path.parent}.")
    figure = plan_options_figure(outcome, title=title)
    kind = "png" if suffix == ".png" else "svg"
    content = plot([figure], size=(9, 5.6), format=kind, dpi=160)
    if suffix == ".html":
        content = _render_page(outcome, content.decode(), title).encode()
    write_atomically(path, content, private=False)


def _render_page(outcome: PlanOutcome, svg: str, title: str) -> str:
    """The plot with the table below it, in one file."""
    rows = "".join(_row(index, option) for index, option in enumerate(outcome.options, start=1))
    notes = "".join(
        f"<p>{_show(note)}</p>" for note in (*outcome.options.problems, *outcome.options.notes)
    )
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_show(title)}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;"
        "padding:0 1rem;color:#212529}svg{width:100%;height:auto}table{border-collapse:collapse}"
        "td,th{text-align:left;padding:.35rem .8rem .35rem 0;border-bottom:1px solid #e9ecef;"
        "vertical-align:top}</style>"
        f"{svg[svg.index('<svg') :]}<table><tr>{head}</tr>{rows}</table>{notes}</html>"
    )


def _row(index: int, option: Plan) -> str:
    dollars, hardware = option.dollars, option.hardware
    time, memory = option.total_s, option.memory_bytes
    cost = "unknown"
    if dollars is not None:
        cost = f"${dollars.value:,.2f} (${dollars.low:,.2f} to ${dollars.high:,.2f})"
    spans = [show_duration(bound) for bound in (time.value, time.low, time.high)]
    cells = (
        str(index),
        f"{hardware} ({hardware.devices} x {hardware.device})",
        describe_layout(option),
        f"{show_bytes(memory.value)} of {show_bytes(hardware.memory_bytes)}",
        f"{spans[0]} ({spans[1]} to {spans[2]})",
        cost,
        option.reason,
    )
    return f"<tr>{''.join(f'<td>{_show(cell)}</td>' for cell in cells)}</tr>"


def _show(text: str) -> str:
    return escape(clean_for_page(text))
