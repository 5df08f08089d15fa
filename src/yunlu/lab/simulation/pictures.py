"""Pictures of outcomes: who held which devices, how long jobs took, who waited, what it cost."""

from __future__ import annotations

import io
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.core.files import write_atomically
from yunlu.lab.simulation.seats import find_seats
from yunlu.lab.simulation.tables import SimulationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from yunlu.lab.simulation.outcome import Outcome

_INK, _GRID, _EMPTY = "#212529", "#e9ecef", "#e6e9ec"
_COLOURS = ("#d9480f", "#1971c2", "#2f9e44", "#7048e8", "#e8a50c", "#0c8599", "#c2255c", "#868e96")
_HOUR_S = 3600


def prepare(directory: Path) -> None:
    """Make the directory of the pictures, and find out before all else whether it can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise SimulationError(
            f"--plot: no pictures can be written to {directory}: {error.strerror}.",
            hint="name a directory that you may write to; it is made where there is none",
        ) from error


def draw_all(runs: Mapping[str, Sequence[Outcome]], directory: Path) -> list[Path]:
    """Draw every picture of what each policy (by name) made of each workload; where they lie."""
    prepare(directory)
    made: list[Path] = []
    for of_policies in zip(*runs.values(), strict=True):  # side by side, an hour is as long in each
        until_s = max(outcome.makespan_s for outcome in of_policies)
        for name, outcome in zip(runs, of_policies, strict=True):
            path = directory / f"allocation-{outcome.workload}-{_file_name(name)}.png"
            made.append(_save(draw_allocation(outcome, until_s=until_s), path))
    for place, first in enumerate(next(iter(runs.values()))):
        of_one = {name: outcomes[place] for name, outcomes in runs.items()}
        made.append(_save(draw_queue(of_one), directory / f"queue-{first.workload}.png"))
    made.append(_save(draw_completion(runs), directory / "jct.png"))
    made.append(_save(draw_cost(runs), directory / "cost.png"))
    return made


def draw_allocation(outcome: Outcome, *, until_s: float | None = None) -> Any:
    """Time across, one row for each device; a colour for each application, a shade for each job."""
    rows = sum(node.devices for node in outcome.nodes)
    figure, axes = _open(11, min(2.2 + rows * 0.085, 12))
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - optional, slow to import
    from matplotlib.patches import Patch  # noqa: PLC0415

    axes.set_facecolor(_EMPTY)
    applications = sorted({job.application for job in outcome.jobs})
    colours = dict(zip(applications, _COLOURS * len(applications), strict=False))
    boxes: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}
    for order, (job, seats) in enumerate(zip(outcome.jobs, find_seats(outcome), strict=True)):
        # Neighbours of one application differ a little, so that jobs can be told apart.
        kept = boxes.setdefault((job.application, order % 3), [])
        for low, high, start, end in seats:
            left, right = start / _HOUR_S, end / _HOUR_S
            kept.append([(left, low), (right, low), (right, high), (left, high)])
    for (application, shade), corners in boxes.items():
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=colours[application],
                alpha=(0.95, 0.75, 0.55)[shade],
                edgecolors="white",
                linewidths=0.25,
            )
        )
    edge = 0
    for node in outcome.nodes:
        axes.axhline(edge, color="white", linewidth=1.2, zorder=3)
        edge += node.devices
    last = outcome.makespan_s / _HOUR_S
    most = max(last, (until_s or 0.0) / _HOUR_S)
    if most > last:
        axes.axvspan(last, most, color="white", zorder=2)
        axes.text(last, rows / 2, " the last job has ended", color=_INK, fontsize=8, rotation=90,
                  va="center", zorder=4)  # fmt: skip
    axes.set_xlim(0, most)
    axes.set_ylim(rows, 0)
    axes.set_yticks(_name_nodes(outcome), [node.name for node in outcome.nodes][:: _step(outcome)])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel("hours")
    axes.set_ylabel(f"{rows} devices on {len(outcome.nodes)} nodes")
    axes.grid(visible=False)
    handles = [Patch(color=colours[name], label=name) for name in applications]
    handles.append(Patch(facecolor=_EMPTY, edgecolor=_GRID, label="idle"))
    legend = axes.legend(
        handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=9,
        title="colour: application\nshade: job", title_fontsize=8, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(_INK)
    average = outcome.average_s / 60
    _title(axes, f"{outcome.workload}, {outcome.policy}: who held which devices "
                 f"(average completion {average:,.0f} min)")  # fmt: skip
    return figure


def _step(outcome: Outcome) -> int:
    """Every node has its name, as long as there is room for them all."""
    return -(-len(outcome.nodes) // 32)


def _name_nodes(outcome: Outcome) -> list[float]:
    middles: list[float] = []
    row = 0
    for node in outcome.nodes:
        middles.append(row + node.devices / 2)
        row += node.devices
    return middles[:: _step(outcome)]


def draw_completion(runs: Mapping[str, Sequence[Outcome]]) -> Any:
    """Share of jobs that took no longer than so long; a line for each policy, its mean marked."""
    figure, axes = _open(9, 5)
    for name, colour in _coloured(runs):
        times = sorted(job.jct_s / 60 for outcome in runs[name] for job in outcome.jobs)
        shares = [(place + 1) / len(times) for place in range(len(times))]
        mean = sum(times) / len(times)
        label = f"{name}: mean {mean:,.0f} min"
        axes.step(times, shares, where="post", color=colour, linewidth=1.6, label=label)
        share = sum(time <= mean for time in times) / len(times)
        axes.plot([mean], [share], marker="o", markersize=6, color=colour)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    _plain_log(axes)
    axes.set_xlabel("minutes from submission to end")
    axes.set_ylabel("share of jobs")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    _title(axes, "How long jobs took (points: means)")
    return figure


def draw_queue(outcomes: Mapping[str, Outcome]) -> Any:
    """Jobs that hold nothing, over time, and below them all that have not ended."""
    figure, above = _open(9, 6, rows=2)
    below: Any = figure.add_subplot(2, 1, 2, sharex=above)
    _dress(below)
    for name, colour in _coloured(outcomes):
        rounds = outcomes[name].rounds
        hours = [each.at / _HOUR_S for each in rounds]
        waiting = [each.waiting for each in rounds]
        style: dict[str, Any] = {"where": "post", "color": colour, "linewidth": 1.3}
        above.step(hours, waiting, label=f"{name}: at most {max(waiting)}", **style)
        below.step(hours, [each.waiting + each.running for each in rounds], **style)
    above.tick_params(labelbottom=False)
    above.set_ylabel("jobs without devices")
    below.set_ylabel("jobs not ended")
    below.set_xlabel("hours")
    below.set_xlim(left=0)
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
    above.legend(frameon=False, fontsize=9)
    workload = next(iter(outcomes.values())).workload
    _title(above, f"{workload}: who waited")
    return figure


def draw_cost(runs: Mapping[str, Sequence[Outcome]]) -> Any:
    """Device-hours until the last job ended, held and idle; dollars where nodes have prices."""
    names = list(runs)
    figure, axes = _open(9, 1.4 + 0.45 * len(names))
    most = max(_rented_hours(runs[name]) for name in names)
    for row, (name, colour) in enumerate(_coloured(runs)):
        held = sum(outcome.device_hours for outcome in runs[name])
        whole = _rented_hours(runs[name])
        dollars = sum(outcome.dollars for outcome in runs[name])
        axes.barh(row, held, color=colour, height=0.62)
        axes.barh(row, whole - held, left=held, color=colour, alpha=0.22, height=0.62)
        words = f"{held:,.0f} of {whole:,.0f}" + (f", ${dollars:,.0f}" if dollars else "")
        axes.text(whole + most * 0.01, row, words, va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("device-hours until the last job ended")
    axes.grid(visible=False)  # it would shine through what is idle; each bar has its figures
    _title(axes, "What it took: held by jobs (dark), idle (light)")
    return figure


def _rented_hours(outcomes: Sequence[Outcome]) -> float:
    return sum(
        sum(node.devices for node in outcome.nodes) * outcome.makespan_s / _HOUR_S
        for outcome in outcomes
    )


def _coloured(runs: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _COLOURS[place % len(_COLOURS)]) for place, name in enumerate(runs)]


def _open(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("matplotlib", "plot", "A picture of a simulation") from error
    figure = Figure(figsize=(width, height))
    axes: Any = figure.add_subplot(rows, 1, 1)
    _dress(axes)
    return figure, axes


def _dress(axes: Any) -> None:
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", color=_INK, fontsize=11)


def _plain_log(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plain_number(value: float, _place: int) -> str:
    return f"{value:,.12g}"


def _save(figure: Any, path: Path) -> Path:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, bbox_inches="tight")
    write_atomically(path, file.getvalue())
    return path


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
