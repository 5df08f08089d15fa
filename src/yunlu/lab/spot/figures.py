"""Replays of spot policies: one job hour by hour, and the cost of all jobs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import JobError
from yunlu.core.files import write_atomically
from yunlu.render.figure_values import StripFigure, TimelineFigure, TimelineSpan
from yunlu.render.plots import plot
from yunlu.scheduler.spot import HOUR_S, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from yunlu.lab.spot.replay import ReplayedJob
    from yunlu.scheduler.spot import DeadlineJob, SpotMarket

_COLOURS = {Mode.SPOT: "#2b8a3e", Mode.ON_DEMAND: "#d9480f"}
_UP = "#ced4da"


def replay_figures(
    job: DeadlineJob, trials: Sequence[ReplayedJob], markets: Mapping[str, SpotMarket]
) -> tuple[TimelineFigure, StripFigure]:
    """The job whose policies differ most, and the cost of every job under every policy."""
    shown = max(trials, key=_spread)
    costs = StripFigure(
        x_name="cost against on-demand; each point a job, the line the mean",
        groups=tuple(
            (name, tuple(trial.outcomes[name].ratio for trial in trials))
            for name in trials[0].outcomes
        ),
    )
    return _timeline(job, shown, markets[shown.zone]), costs


def _spread(trial: ReplayedJob) -> float:
    ratios = [outcome.ratio for name, outcome in trial.outcomes.items() if name != "on-demand"]
    return max(ratios) - min(ratios)


def _timeline(job: DeadlineJob, trial: ReplayedJob, market: SpotMarket) -> TimelineFigure:
    """One row for the availability of spot, one for each policy."""
    step_h, steps = market.step_s / HOUR_S, int(job.deadline_s / market.step_s)
    is_up = market.is_up[trial.start : trial.start + steps].astype(int)
    policy_colours = {int(mode): colour for mode, colour in _COLOURS.items()}
    rows: list[tuple[str, Any, dict[int, str]]] = [("spot is available", is_up, {1: _UP})]
    for name, outcome in trial.outcomes.items():
        rows.append((f"{name}  {outcome.ratio:.2f}", outcome.modes, policy_colours))
    deadline_h = job.deadline_s / HOUR_S
    return TimelineFigure(
        title=f"{trial.zone}: one job (green: spot, orange: on-demand; cost against on-demand)",
        x_name="hours from the start; dashed: the deadline",
        rows=len(rows),
        until=max([deadline_h, *(len(values) * step_h for _, values, _ in rows)]) * 1.02,
        spans=tuple(
            TimelineSpan(
                first_row=row + 0.15,
                last_row=row + 0.85,
                start=start * step_h,
                end=end * step_h,
                colour=colour,
            )
            for row, (_, values, colours) in enumerate(rows)
            for value, colour in colours.items()
            for start, end in _stretches(values == value)
        ),
        row_labels=tuple((row + 0.5, name) for row, (name, _, _) in enumerate(rows)),
        deadline=deadline_h,
    )


def _stretches(mask: Any) -> Iterator[tuple[int, int]]:
    """Beginning and end of each stretch where it is true."""
    edges = np.flatnonzero(np.diff(np.r_[0, np.asarray(mask, dtype=int), 0])).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


FORMATS = (".png", ".svg")


def check_spot_plot(path: Path) -> None:
    """Refuse, before anything is computed, a plot that could not be written."""
    if path.suffix.lower() not in FORMATS:
        raise JobError(
            f"--plot: {path} has no suffix of a picture.", hint=f"use one of {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise JobError(
            f"--plot: there is no directory {path.parent}.", hint="make it, or name another"
        )
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"--plot: {path.parent} is not writable.", hint="name another directory")


def write_spot_plot(
    job: DeadlineJob, trials: Sequence[ReplayedJob], markets: Mapping[str, SpotMarket], path: Path
) -> None:
    """One job above, the costs of all jobs below."""
    check_spot_plot(path)
    figures = replay_figures(job, trials, markets)
    kind = path.suffix.lower()[1:]
    write_atomically(path, plot(figures, size=(9, 6.4), format=kind, dpi=160, heights=(3, 2)))
