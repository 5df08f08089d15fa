"""A file with the plan options of a job: PNG, SVG, or HTML with their table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.files import write_atomically
from yunlu.core.foreign_text import clean_for_page
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.search.explain import describe_layout
from yunlu.render.drawing.plots import plot
from yunlu.render.figures.plan_options import plan_options_figure

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.planning.search.options import PlanOption

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


def _row(index: int, option: PlanOption) -> str:
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
