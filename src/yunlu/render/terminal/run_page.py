"""One run on one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.render.terminal.event_lines import communication_line, fault_line, plan_block
from yunlu.render.terminal.page import ACCENT, indented, plain_table, state_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from yunlu.jobs.run_view import RunDetails
    from yunlu.runs.events import BatchChanged, CheckpointSaved, Evaluated
    from yunlu.runs.fold import GroupGeneration

_FEW = 8


def run_page(run: RunDetails) -> RenderableType:
    """State, plan, workers, evaluations, checkpoints and warnings; not the paths."""
    parts: list[RenderableType] = [*_head(run)]
    if run.plan is not None:
        parts.append(plan_block(run.plan))
    if (group := run.worker_group) is not None:
        parts += _section(f"workers: {group.layout}", _workers(group))
        parts += [Text(f" {fault_line(lost)}") for lost in run.lost_workers[-_FEW:]]
    if run.communication is not None:
        line = communication_line(run.communication)
        parts.append(Text("\n exchange    ").append_text(line))
    if run.batch or run.noise:
        parts.append(Text(f"\n batch       {_batch_line(run.batch, run.noise)}"))
    parts += _section("evaluations", _evaluations(run.evaluations))
    parts += _section("checkpoints", _checkpoints(run.checkpoints))
    parts.append("")
    parts += [Text(f" warning     {warning}", style="yellow") for warning in run.warnings]
    return Group(*parts)


def path_lines(paths: dict[str, str]) -> list[Text]:
    """One line for each path; not to be wrapped."""
    return [Text.assemble((f" {name:<12}", "dim"), path) for name, path in paths.items()]


def _head(run: RunDetails) -> list[RenderableType]:
    title = Text(f"\n {run.id}", style=f"bold {ACCENT}")
    line = Text.assemble(" ", state_text(run.state))
    if run.step is not None and run.steps:
        line.append(f"  step {run.step}/{run.steps} ({run.progress or 0:.0%})")
    if run.metric_value is not None:
        line.append(f"  {run.metric} ").append(show_number(run.metric_value), style="bold")
    if run.eta_s is not None:
        line.append(f"  ETA {show_duration(run.eta_s)}")
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_at))
    line.append(f"  since {created}", style="dim")
    lines: list[RenderableType] = [
        Text.assemble(title, (f"  {run.task} · {run.model}", "dim")),
        line,
    ]
    if run.caution:
        lines.append(Text(f" {run.caution}", style="yellow"))
    if run.error:
        lines.append(Text(f" {run.error}", style="red"))
    if run.state.can_resume:
        lines.append(Text(f" yunlu resume {run.id} continues it", style="dim"))
    return lines


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
    return [Text(f"\n {title}", style=f"bold {ACCENT}"), indented(table)]
