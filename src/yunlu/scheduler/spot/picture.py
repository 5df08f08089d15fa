"""Pictures of replays: what one job ran on, hour by hour, and what all of them cost."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import missing_part
from yunlu.core.files import write_atomically
from yunlu.scheduler.spot.traces import TraceError
from yunlu.scheduler.spot.values import HOUR_S, Mode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from yunlu.scheduler.spot.study import Trial
    from yunlu.scheduler.spot.values import DeadlineJob, Market

FORMATS = (".png", ".svg")
_COLOURS = {Mode.SPOT: "#2b8a3e", Mode.ON_DEMAND: "#d9480f"}
_UP = "#ced4da"


def check_picture(path: Path) -> None:
    """Refuse, before anything is computed, a picture that cannot be drawn."""
    if path.suffix.lower() not in FORMATS:
        raise TraceError(
            f"--plot: {path} is not a picture that can be drawn.",
            hint=f"its name may end in {', '.join(FORMATS)}",
        )
    if not path.parent.is_dir():
        raise TraceError(
            f"--plot: there is no directory {path.parent}.", hint="make it, or name another"
        )
    if not os.access(path.parent, os.W_OK):
        raise TraceError(
            f"--plot: {path.parent} may not be written to.", hint="name another directory"
        )


def draw_trials(
    job: DeadlineJob, trials: Sequence[Trial], markets: Mapping[str, Market], path: Path
) -> None:
    """The job whose policies differ most, above; the costs of all jobs, below."""
    check_picture(path)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("matplotlib", "plot", "A picture of the replays") from error
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    shown = max(trials, key=_spread)
    _draw_course(above, job, shown, markets[shown.zone])
    _draw_costs(below, trials)
    file = io.BytesIO()
    figure.savefig(file, format=path.suffix.lower()[1:], dpi=160)
    write_atomically(path, file.getvalue())


def _spread(trial: Trial) -> float:
    ratios = [outcome.ratio for name, outcome in trial.outcomes.items() if name != "on-demand"]
    return max(ratios) - min(ratios)


def _draw_course(axes: Any, job: DeadlineJob, trial: Trial, market: Market) -> None:
    """One row for spot itself, one for each policy."""
    step_h = market.step_s / HOUR_S
    ticks = int(job.deadline_s / market.step_s)
    up = market.is_up[trial.start : trial.start + ticks].astype(int)
    rows = [("spot is up", up, {1: _UP})]
    rows += [
        (f"{name}  {outcome.ratio:.2f}", outcome.modes, {int(k): v for k, v in _COLOURS.items()})
        for name, outcome in trial.outcomes.items()
    ]
    for place, (_, values, colours) in enumerate(rows):
        for value, colour in colours.items():
            axes.broken_barh(
                [(begin * step_h, (end - begin) * step_h) for begin, end in _runs(values == value)],
                (-place - 0.35, 0.7),
                color=colour,
            )
    axes.axvline(job.deadline_s / HOUR_S, color="#495057", linestyle="--", linewidth=1)
    axes.set_yticks([-place for place in range(len(rows))], [name for name, _, _ in rows])
    axes.set_xlabel("hours from the start; dashed: the deadline")
    axes.set_title(
        f"{trial.zone}: one job (green: spot, orange: on-demand; cost against on-demand)",
        loc="left", fontsize=10,
    )  # fmt: skip
    _tidy(axes)


def _draw_costs(axes: Any, trials: Sequence[Trial]) -> None:
    """Every job of every policy, the mean as a line."""
    names = list(trials[0].outcomes)
    for place, name in enumerate(names):
        ratios = np.array([trial.outcomes[name].ratio for trial in trials])
        spread = np.linspace(-0.25, 0.25, len(ratios))
        axes.scatter(ratios, -place + spread, s=8, color="#868e96", linewidths=0, alpha=0.7)
        axes.plot([ratios.mean()] * 2, [-place - 0.4, -place + 0.4], color="#d9480f", linewidth=2)
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set_xlabel("cost against on-demand; each point a job, the line the mean")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(visible=True, axis="x", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _runs(mask: Any) -> list[tuple[int, int]]:
    """Where it is true: begins and ends."""
    edges = np.flatnonzero(np.diff(np.r_[0, np.asarray(mask, dtype=int), 0]))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
