"""Figures of simulation results: device timeline, completion times, queue, cost."""

from __future__ import annotations

from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from yunlu.core.files import write_atomically
from yunlu.lab.simulation.cluster import assign_device_rows
from yunlu.lab.simulation.profiles import SimulationError
from yunlu.render.figure_values import (
    Axis,
    Bar,
    BarFigure,
    BarSegment,
    LineFigure,
    Series,
    TimelineFigure,
    TimelineSpan,
)
from yunlu.render.i18n import same
from yunlu.render.plots import IDLE, PALETTE, plot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from yunlu.lab.simulation.simulator import DecisionRecord, SimulationResult

_HOUR_S = 3600
_SHADES = (0.95, 0.75, 0.55)
_MOST_NODE_NAMES = 32


def check_plot_directory(directory: Path) -> None:
    """Make the directory of the plots, and refuse early where it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise SimulationError(
            f"--plot: no pictures can be written to {directory}: {error.strerror}.",
            hint="name a directory that you may write to; it is made where there is none",
        ) from error


def write_plots(runs: Mapping[str, Sequence[SimulationResult]], directory: Path) -> list[Path]:
    """Plot the results of each policy (by name) on each workload; returns the files."""
    check_plot_directory(directory)
    paths: list[Path] = []

    def write(name: str, content: bytes) -> None:
        write_atomically(directory / name, content)
        paths.append(directory / name)

    for outcomes in zip(*runs.values(), strict=True):  # the same time scale in all of them
        until_s = max(outcome.makespan_s for outcome in outcomes)
        for name, outcome in zip(runs, outcomes, strict=True):
            figure = allocation_figure(outcome, until_s=until_s)
            size = (11, min(2.2 + figure.rows * 0.085, 12))
            file = f"allocation-{outcome.workload}-{_file_name(name)}.png"
            write(file, plot([figure], size=size))
    for index, first in enumerate(next(iter(runs.values()))):
        of_workload = {name: outcomes[index] for name, outcomes in runs.items()}
        write(f"queue-{first.workload}.png", plot(queue_figures(of_workload), size=(9, 6)))
    write("jct.png", plot([completion_figure(runs)], size=(9, 5)))
    write("cost.png", plot([cost_figure(runs)], size=(9, 1.4 + 0.45 * len(runs))))
    return paths


def allocation_figure(outcome: SimulationResult, *, until_s: float | None = None) -> TimelineFigure:
    """A row for each device over time; a colour for each application, a shade for each job."""
    rows = sum(node.devices for node in outcome.nodes)
    applications = sorted({job.application for job in outcome.jobs})
    colours = dict(zip(applications, PALETTE * len(applications), strict=False))
    spans = tuple(
        TimelineSpan(
            first_row=low,
            last_row=high,
            start=start / _HOUR_S,
            end=end / _HOUR_S,
            colour=colours[job.application],
            # Jobs of one application differ slightly in shade.
            opacity=_SHADES[order % len(_SHADES)],
        )
        for order, (job, seats) in enumerate(
            zip(outcome.jobs, assign_device_rows(outcome), strict=True)
        )
        for low, high, start, end in seats
    )
    edges = [sum(node.devices for node in outcome.nodes[:i]) for i in range(len(outcome.nodes))]
    stride = -(-len(outcome.nodes) // _MOST_NODE_NAMES)
    labels = [
        (edge + node.devices / 2, node.name)
        for edge, node in zip(edges, outcome.nodes, strict=True)
    ]
    ended_h = outcome.makespan_s / _HOUR_S
    return TimelineFigure(
        title=f"{outcome.workload}, {outcome.policy}: who held which devices "
        f"(average completion {outcome.average_s / 60:,.0f} min)",
        x_name="hours",
        y_name=f"{rows} devices on {len(outcome.nodes)} nodes",
        rows=rows,
        until=max(ended_h, (until_s or 0.0) / _HOUR_S),
        spans=spans,
        row_labels=tuple(labels[::stride]),
        separators=tuple(edges),
        legend=(*colours.items(), ("idle", IDLE)),
        legend_title="colour: application\nshade: job",
        ended_at=ended_h,
    )


def completion_figure(runs: Mapping[str, Sequence[SimulationResult]]) -> LineFigure:
    """Cumulative share of jobs by completion time; a line per policy, its mean marked."""
    series: list[Series] = []
    slowest = 1.0
    for colour, (name, outcomes) in enumerate(runs.items(), 1):
        minutes = sorted(job.jct_s / 60 for outcome in outcomes for job in outcome.jobs)
        shares = tuple((index + 1) / len(minutes) for index in range(len(minutes)))
        mean = sum(minutes) / len(minutes)
        at_mean = sum(time <= mean for time in minutes) / len(minutes)
        label = same(f"{name}: mean {mean:,.0f} min")
        slowest = max(slowest, minutes[-1])
        series.append(
            Series(key=name, name=label, x=tuple(minutes), y=shares, colour=colour, style="steps")
        )
        series.append(
            Series(
                key=f"{name}-mean",
                name=same(""),
                x=(mean,),
                y=(at_mean,),
                colour=colour,
                style="dots",
            )
        )
    return LineFigure(
        id="completion",
        title=same("Job completion times (points: means)"),
        x=Axis(low=1e-3, high=slowest, log=True, name=same("minutes from submission to end")),
        y=Axis(low=0, high=1.01, unit="percent", name=same("share of jobs")),
        series=tuple(series),
    )


def queue_figures(outcomes: Mapping[str, SimulationResult]) -> tuple[LineFigure, LineFigure]:
    """Jobs without devices over time, and below all unfinished jobs."""
    workload = next(iter(outcomes.values())).workload
    waiting, unfinished = list[Series](), list[Series]()
    for colour, (name, outcome) in enumerate(outcomes.items(), 1):
        rounds = outcome.rounds
        most = max(one.waiting for one in rounds)
        label = f"{name}: at most {most}"
        waiting.append(_count_series(name, label, rounds, [one.waiting for one in rounds], colour))
        active = [one.waiting + one.running for one in rounds]
        unfinished.append(_count_series(name, "", rounds, active, colour))
    return (
        _count_figure("waiting", f"{workload}: queue", "jobs without devices", waiting),
        _count_figure("unfinished", "", "jobs not ended", unfinished),
    )


def cost_figure(runs: Mapping[str, Sequence[SimulationResult]]) -> BarFigure:
    """Device-hours until the last job ended, held and idle; dollars where nodes have prices."""
    return BarFigure(
        id="cost",
        title=same("Device-hours: held by jobs (dark), idle (light)"),
        axis=same("device-hours until the last job ended"),
        bars=tuple(_cost_bars(runs)),
    )


def _cost_bars(runs: Mapping[str, Sequence[SimulationResult]]) -> Iterator[Bar]:
    for colour, (name, outcomes) in enumerate(runs.items(), 1):
        held = sum(outcome.device_hours for outcome in outcomes)
        rented = sum(
            sum(node.devices for node in outcome.nodes) * outcome.makespan_s / _HOUR_S
            for outcome in outcomes
        )
        dollars = sum(outcome.dollars for outcome in outcomes)
        yield Bar(
            key=name,
            name=same(name),
            segments=(
                BarSegment(key="held", name=same("held"), value=held, colour=colour),
                BarSegment(key="idle", name=same("idle"), value=rented - held, colour=colour),
            ),
            label=f"{held:,.0f} of {rented:,.0f}" + (f", ${dollars:,.0f}" if dollars else ""),
        )


def _count_series(
    key: str, label: str, rounds: Sequence[DecisionRecord], counts: Sequence[int], colour: int
) -> Series:
    hours = tuple(one.at / _HOUR_S for one in rounds)
    return Series(key=key, name=same(label), x=hours, y=tuple(counts), colour=colour, style="steps")


def _count_figure(key: str, title: str, name: str, series: Sequence[Series]) -> LineFigure:
    last = max(at for line in series for at in line.x)
    most = max(count for line in series for count in line.y)
    return LineFigure(
        id=key,
        title=same(title),
        x=Axis(low=0, high=max(last, 1e-9), name=same("hours")),
        y=Axis(low=0, high=max(most, 1), unit="count", name=same(name)),
        series=tuple(series),
    )


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
