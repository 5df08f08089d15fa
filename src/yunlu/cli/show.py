"""``yunlu show``: one run on one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs import service
from yunlu.jobs.run import remaining_s
from yunlu.jobs.run_view import describe_run
from yunlu.render.terminal.event_lines import communication_line, fault_line, plan_block
from yunlu.render.terminal.page import (
    ACCENT,
    indented,
    make_console,
    plain_table,
    state_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from yunlu.jobs.run import RunRecord
    from yunlu.runs.events import BatchChanged, CheckpointSaved, Evaluated
    from yunlu.runs.fold import GroupGeneration
    from yunlu.runs.run_store import RunStore

_FEW = 8


def show(run: str = "last", /, *, json: bool = False) -> int:
    """Show one run: job, state, plan, evaluations, checkpoints, warnings, paths.

    Args:
        run: Its id, a unique beginning of it, or: last.
        json: Print the same as JSON.
    """
    store = service.find(run)
    record = service.read_record(store)
    details = describe_run(store, record)
    if json:
        print(details.model_dump_json(indent=2))
        return 0
    console = make_console()
    _print_head(console, store, record)
    if details.plan is not None:
        console.print(plan_block(details.plan))
    if details.worker_group is not None:
        group = details.worker_group
        _print_rows(console, f"workers: {group.layout}", _workers(group))
        for lost in details.lost_workers[-_FEW:]:
            console.print(Text(f" {fault_line(lost)}"))
    if details.communication is not None:
        line = communication_line(details.communication)
        console.print(Text("\n exchange    ").append_text(line))
    if details.batch or details.noise:
        console.print(Text(f"\n batch       {_batch_line(details.batch, details.noise)}"))
    _print_rows(console, "evaluations", _evaluations(details.evaluations))
    _print_rows(console, "checkpoints", _checkpoints(details.checkpoints))
    console.print()
    for warning in details.warnings:
        console.print(Text(f" warning     {warning}", style="yellow"))
    _print_paths(console, details.paths)
    return 0


def _batch_line(change: BatchChanged | None, noise: dict[str, float]) -> str:
    parts: list[str] = []
    if change:
        parts.append(f"{change.batch} from step {change.step} on, rate x{change.rate:.3g}")
    if noise:
        parts.append(f"noise scale about {show_count(round(noise['noise_scale'], 1))} samples")
    return "; ".join(parts)


def _print_head(console: Console, run: RunStore, record: RunRecord) -> None:
    title = Text(f"\n {record.id}", style=f"bold {ACCENT}")
    console.print(Text.assemble(title, (f"  {record.task} · {record.model}", "dim")))
    line = Text.assemble(" ", state_text(record.state))
    if record.step is not None and record.steps:
        line.append(f"  step {record.step}/{record.steps} ({record.progress or 0:.0%})")
    if record.metric_value is not None:
        line.append(f"  {record.metric} ").append(show_number(record.metric_value), style="bold")
    eta_s = remaining_s(run, record)
    if eta_s is not None:
        line.append(f"  ETA {show_duration(eta_s)}")
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
    console.print(line.append(f"  since {created}", style="dim"))
    if record.error:
        console.print(Text(f" {record.error}", style="red"))
    if record.state.can_resume:
        console.print(Text(f" yunlu resume {record.id} goes on", style="dim"))


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


def _print_rows(console: Console, title: str, table: Table | None) -> None:
    if table is not None:
        console.print(Text(f"\n {title}", style=f"bold {ACCENT}"), indented(table), sep="\n")


def _print_paths(console: Console, paths: dict[str, str]) -> None:
    for name, path in paths.items():
        console.print(Text.assemble((f" {name:<12}", "dim"), path), soft_wrap=True)
