"""A file with the replays of spot policies: PNG or SVG."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.files import write_atomically
from yunlu.lab.spot.figures import replay_figures
from yunlu.render.drawing.plots import plot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from yunlu.lab.spot.comparison import ReplayedJob
    from yunlu.scheduler.spot.values import DeadlineJob, SpotMarket

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
