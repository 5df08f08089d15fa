"""A table of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_duration, show_number
from yunlu.render.terminal.page import ACCENT, plain_table, state_text
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.jobs.run_view import ListedRun

_DAY_S = 86_400


def run_table(runs: Sequence[ListedRun], *, now: float) -> Table:
    """One line for each run."""
    table = plain_table()
    table.add_column("run", style="bold", no_wrap=True)
    table.add_column("task", overflow="ellipsis", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    has_groups = any(run.workers is not None for run in runs)
    if has_groups:
        table.add_column("workers", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("ETA", justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.id,
            run.task,
            run.model,
            state_text(run.state),
            _progress(run),
            _metric(run),
            *([_workers(run)] if has_groups else []),
            _age(now - run.created_at),
            "" if run.eta_s is None else show_duration(run.eta_s),
        )
    return table


def _progress(run: ListedRun) -> RenderableType:
    if run.progress is None:
        return Text("–", style="dim")
    style = "green" if run.state is RunState.FINISHED else ACCENT
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=1, completed=run.progress, width=10, complete_style=style, finished_style=style
    )
    grid.add_row(bar, f"{run.progress:.0%}")
    return grid


def _metric(run: ListedRun) -> Text:
    if run.metric_value is None:
        return Text("–", style="dim")
    return Text.assemble((f"{run.metric} ", "dim"), show_number(run.metric_value))


def _workers(run: ListedRun) -> Text:
    if run.workers is None or run.layout is None:
        return Text("–" if run.state is RunState.PENDING else "1", style="dim")
    return Text.assemble(f"{run.workers} ", (run.layout, "dim"))


def _age(seconds: float) -> str:
    if seconds < 2 * _DAY_S:
        return show_duration(max(1.0, round(seconds)))
    return f"{seconds / _DAY_S:.0f} days"
