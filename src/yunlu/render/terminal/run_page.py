"""Runs on one screen: a table of all, or one in detail."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.cells import set_cell_size
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import ACCENT, in_language, indented, plain_table, state_text
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.jobs.run_record import ListedRun
    from yunlu.jobs.run_view import RunDetails
    from yunlu.runs.events import BatchChanged, CheckpointSaved, Evaluated
    from yunlu.runs.fold import GroupGeneration

_FEW = 8


def run_page(run: RunDetails) -> RenderableType:
    """State, plan, workers, evaluations, checkpoints and warnings; not the paths."""
    from yunlu.render.terminal.event_lines import (  # noqa: PLC0415 (slow to import; no list needs it)
        communication_line,
        event_row,
        fault_line,
        plan_block,
    )

    parts: list[RenderableType] = [*_head(run)]
    if run.plan is not None:
        parts.append(plan_block(run.plan))
    if (group := run.worker_group) is not None:
        parts += _section(f"workers: {group.layout}", _workers(group))
        parts += [Hanging(Text(f" {fault_line(lost)}")) for lost in run.lost_workers[-_FEW:]]
    if run.communication is not None:
        parts += ["", event_row("exchange", communication_line(run.communication), style="")]
    if run.batch or run.noise:
        parts += ["", event_row("batch", Text(_batch_line(run.batch, run.noise)), style="")]
    parts += _section("evaluations", _evaluations(run.evaluations))
    parts += _section("checkpoints", _checkpoints(run.checkpoints))
    parts.append("")
    parts += [
        event_row("warning", Text(warning, style="yellow"), style="yellow")
        for warning in run.warnings
    ]
    return Group(*parts)


def path_lines(paths: dict[str, str]) -> list[Text]:
    """One line for each path; not to be wrapped."""
    return [
        Text.assemble((f" {set_cell_size(in_language(name, is_label=True), 12)}", "dim"), path)
        for name, path in paths.items()
    ]


def _head(run: RunDetails) -> list[RenderableType]:
    title = Text(f" {run.id}", style=f"bold {ACCENT}")
    line = Text.assemble(" ", state_text(run.state))
    if run.step is not None and run.steps:
        line.append(f"  step {run.step}/{run.steps} ({run.progress or 0:.0%})")
    if run.metric_value is not None:
        line.append(f"  {run.metric} ").append(show_number(run.metric_value), style="bold")
    if run.eta_s is not None:
        line.append(f"  ETA {show_duration(run.eta_s)}")
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_at))
    line.append(f"  since {created}", style="dim")
    lines = [Text.assemble(title, (f"  {run.task} · {run.model}", "dim")), line]
    if run.caution:
        lines.append(Text(f" {run.caution}", style="yellow"))
    if run.error:
        lines.append(Text(f" {run.error}", style="red"))
    if run.state.can_resume:
        lines.append(Text(f" yunlu resume {run.id} continues it", style="dim"))
    return ["", *(Hanging(line) for line in lines)]


def _batch_line(change: BatchChanged | None, noise: dict[str, float]) -> str:
    parts: list[str] = []
    if change:
        parts.append(f"{change.batch} from step {change.step} on, rate x{change.rate:.3g}")
    if noise:
        parts.append(f"noise scale about {show_count(round(noise['noise_scale'], 1))} samples")
    return "; ".join(parts)


def _workers(group: GroupGeneration) -> Table:
    table = _small_table("rank", "worker", "host", "pid", "stage", "replica", "shard", "cut")
    for rank in group.ranks:
        position = (rank.pp, rank.dp, rank.fsdp, rank.tp)
        cells = (rank.rank, rank.worker, rank.host, rank.pid, *(at + 1 for at in position))
        table.add_row(*(Text("–" if cell is None else str(cell)) for cell in cells))
    return table


def _evaluations(rows: Sequence[Evaluated]) -> Table | None:
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    table = _small_table("split", "step", "loss", *names)
    if len(rows) > _FEW:
        table.add_row(f"({len(rows) - _FEW} earlier)", style="dim")
    for row in rows[-_FEW:]:
        figures = {"loss": row.loss, **row.metrics}
        cells = [_cell(figures.get(name)) for name in ("loss", *names)]
        table.add_row(row.split, str(row.step), *cells)
    return table


def _checkpoints(rows: Sequence[CheckpointSaved]) -> Table | None:
    if not rows:
        return None
    table = _small_table("step", "size", "saved in", "path")
    for row in rows[-_FEW:]:
        table.add_row(str(row.step), show_bytes(row.bytes), show_duration(row.seconds), row.path)
    return table


def _small_table(*names: str) -> Table:
    table = plain_table()
    for name in names:
        table.add_column(name, justify="left" if name in {"split", "path", "host"} else "right")
    return table


def _cell(value: Any) -> str:
    return "–" if value is None else show_number(float(value))


def _section(title: str, table: Table | None) -> list[RenderableType]:
    if table is None:
        return []
    title = in_language(title, is_label=True)
    return [Text(f"\n {title}", style=f"bold {ACCENT}"), indented(table)]


_DAY_S = 86_400
_LONG_MODEL = 40


def run_table(runs: Sequence[ListedRun], *, now: float) -> Table:
    """One line for each run."""
    table = plain_table(drop=("model", "task", "workers", "age"), dropped_note="yunlu show RUN")
    table.add_column("run", style="bold", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("model", no_wrap=True, max_width=_LONG_MODEL, overflow="ellipsis")
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
            *([_worker_count(run)] if has_groups else []),
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


def _worker_count(run: ListedRun) -> Text:
    if run.workers is None or run.layout is None:
        return Text("–" if run.state is RunState.PENDING else "1", style="dim")
    return Text.assemble(f"{run.workers} ", (run.layout, "dim"))


def _age(seconds: float) -> str:
    if seconds < 2 * _DAY_S:
        return show_duration(max(1.0, round(seconds)))
    return f"{seconds / _DAY_S:.0f} days"
