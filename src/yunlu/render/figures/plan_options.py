"""A picture of a job's options: cost against time, what nothing beats in both, what was chosen."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, missing_part
from yunlu.core.files import write_atomically
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.search.explain import describe_layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.jobs.outlook import Outlook
    from yunlu.planning.search.options import PlanOption

    Candidate = tuple[float, float, str]

FORMATS = (".png", ".svg", ".html")
_ACCENT, _QUIET, _EDGE, _INK = "#d9480f", "#ced4da", "#495057", "#212529"


def draw_outlook(outlook: Outlook, path: Path, *, title: str) -> None:
    """Write the picture; the format follows the name."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise JobError(
            f"--plot: {path} is not a picture that can be drawn.",
            hint=f"its name may end in {', '.join(FORMATS)}",
        )
    if not path.parent.is_dir():
        raise JobError(f"--plot: there is no directory {path.parent}.")
    figure = _draw(outlook, title)
    file = io.BytesIO()
    kind = "png" if suffix == ".png" else "svg"
    figure.savefig(file, format=kind, dpi=160, bbox_inches="tight")
    content = file.getvalue()
    if suffix == ".html":
        content = _page(outlook, content.decode(), title).encode()
    write_atomically(path, content)


def find_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both cost and time, the quickest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates):
        if not front or candidate[1] < front[-1][1]:
            front.append(candidate)
    return front


def _draw(outlook: Outlook, title: str) -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415
    except ImportError as error:
        raise missing_part("matplotlib", "plot", "A picture of the options") from error
    # Free machines have no place on a logarithmic axis; nor has what costs nothing a front.
    priced = [each for each in outlook.candidates if each[1] > 0]
    figure = Figure(figsize=(9, 5.6))
    axes: Any = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    if priced:
        hours, dollars, _ = zip(*priced, strict=True)
        axes.scatter(
            hours, dollars, s=14, color=_QUIET, linewidths=0, label="every candidate", zorder=2
        )
        front = find_front(priced)
        axes.plot(
            [each[0] for each in front], [each[1] for each in front],
            color=_EDGE, linewidth=1.2, marker="o", markersize=4, label="nothing beats these", zorder=3,
        )  # fmt: skip
    for place, option in enumerate(outlook.options):
        _mark(axes, option, place)
    _zoom(axes, outlook)
    axes.set_xlabel("time, hours")
    axes.set_ylabel("cost, dollars")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(_plain_number))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{title}: what it could run on (bars: 10 to 90 %)", loc="left", color=_INK)
    axes.grid(visible=True, which="major", color="#e9ecef", linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, markerscale=0.6
    )
    return figure


def _plain_number(value: float, _place: int) -> str:
    return f"{value:,.12g}"


def _zoom(axes: Any, outlook: Outlook) -> None:
    """Near the options and the front: what is far dearer and slower only squeezes the rest."""
    front = find_front([each for each in outlook.candidates if each[1] > 0])
    marked = [
        (option.total_s.value / 3600, option.dollars.value)
        for option in outlook.options
        if option.dollars is not None and option.dollars.value > 0
    ]
    places = [*marked, *((each[0], each[1]) for each in front)]
    if places:
        hours, dollars = zip(*places, strict=True)
        axes.set_xlim(min(hours) / 2, max(hours) * 3)
        axes.set_ylim(min(dollars) / 2, max(dollars) * 4)


def _mark(axes: Any, option: PlanOption, place: int) -> None:
    """An option with its interval and its name; the first stands out."""
    dollars = option.dollars
    if dollars is None or dollars.value <= 0:
        return
    hours = option.total_s.times(1 / 3600)
    is_first = place == 0
    name = f"{option.hardware.devices} x {option.hardware.device}, {option.hardware.cloud}"
    axes.errorbar(
        [hours.value], [dollars.value],
        xerr=[[hours.value - hours.low], [hours.high - hours.value]],
        yerr=[[dollars.value - dollars.low], [dollars.high - dollars.value]],
        fmt="o", markersize=15 if is_first else 12, color=_ACCENT if is_first else _EDGE,
        elinewidth=1, capsize=2, zorder=8 - 0.1 * place,
        label=f"{place + 1}  {name}{' (chosen)' if is_first else ''}",
    )  # fmt: skip
    axes.annotate(
        str(place + 1), (hours.value, dollars.value), ha="center", va="center",
        fontsize=9, color="white", fontweight="bold", zorder=9,
    )  # fmt: skip


def _page(outlook: Outlook, svg: str, title: str) -> str:
    """The picture with the table below it, in one file."""
    head = ("", "hardware", "layout", "memory", "time", "cost", "why")
    rows = "".join(_row(place, option) for place, option in enumerate(outlook.options, start=1))
    notes = "".join(
        f"<p>{escape(each)}</p>" for each in (*outlook.options.problems, *outlook.options.notes)
    )
    drawing = svg[svg.index("<svg") :]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;"
        f"padding:0 1rem;color:{_INK}}}svg{{width:100%;height:auto}}table{{border-collapse:collapse}}"
        "td,th{text-align:left;padding:.35rem .8rem .35rem 0;border-bottom:1px solid #e9ecef;"
        "vertical-align:top}</style>"
        f"{drawing}<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{rows}</table>"
        f"{notes}</html>"
    )


def _row(place: int, option: PlanOption) -> str:
    dollars, hardware = option.dollars, option.hardware
    time, memory = option.total_s, option.memory_bytes
    cost = "unknown"
    if dollars is not None:
        cost = f"${dollars.value:,.2f} (${dollars.low:,.2f} to ${dollars.high:,.2f})"
    spans = [show_duration(bound) for bound in (time.value, time.low, time.high)]
    cells = (
        str(place),
        f"{hardware} ({hardware.devices} x {hardware.device})",
        describe_layout(option),
        f"{show_bytes(memory.value)} of {show_bytes(hardware.memory_bytes)}",
        f"{spans[0]} ({spans[1]} to {spans[2]})",
        cost,
        option.reason,
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
