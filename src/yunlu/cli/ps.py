"""``yunlu ps``: the runs, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_duration, show_number
from yunlu.jobs import service
from yunlu.jobs.run import remaining_s
from yunlu.jobs.worker_groups import newest_worker_group
from yunlu.render.terminal.page import (
    ACCENT,
    indented,
    make_console,
    plain_table,
    state_text,
    to_json,
)
from yunlu.runs.home import open_run
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from yunlu.jobs.run import RunRecord
    from yunlu.runs.fold import GroupGeneration

_FEW = 20


def ps(
    *,
    all: bool = False,
    json: bool = False,
) -> int:
    """List runs, newest first.

    Args:
        all: Also the older ones.
        json: Print one JSON line for each run.
    """
    records = service.list_runs()
    shown = [
        record for place, record in enumerate(records) if all or place < _FEW or _is_busy(record)
    ]
    if json:
        for record in shown:
            crew = _crew(record)
            more = {
                "eta_s": _eta_s(record),
                "layout": crew.layout if crew else None,
                "workers": len(crew.ranks) if crew else None,
            }
            print(to_json({**record.model_dump(mode="json"), **more}))
        return 0
    console = make_console()
    if not records:
        console.print(f"no runs in {service.home()}; start one: yunlu train JOB")
        return 0
    console.print(indented(_table(shown)))
    if len(shown) < len(records):
        console.print(f" {len(records) - len(shown)} older: yunlu ps --all", style="dim")
    return 0


def _table(records: list[RunRecord]) -> Table:
    table = plain_table()
    table.add_column("run", style="bold", no_wrap=True)
    table.add_column("task", overflow="ellipsis", no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    crews = [_crew(record) for record in records]
    if any(crews):
        table.add_column("workers", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("ETA", justify="right", no_wrap=True)
    for record, crew in zip(records, crews, strict=True):
        eta_s = _eta_s(record)
        table.add_row(
            record.id,
            record.task,
            record.model,
            state_text(record.state),
            _progress(record),
            _metric(record),
            *([_workers(record, crew)] if any(crews) else []),
            _age(time.time() - record.created_at),
            "" if eta_s is None else show_duration(eta_s),
        )
    return table


def _progress(record: RunRecord) -> RenderableType:
    if record.progress is None:
        return Text("–", style="dim")
    style = "green" if record.state is RunState.FINISHED else ACCENT
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=1, completed=record.progress, width=10, complete_style=style, finished_style=style
    )
    grid.add_row(bar, f"{record.progress:.0%}")
    return grid


def _metric(record: RunRecord) -> Text:
    if record.metric_value is None:
        return Text("–", style="dim")
    return Text.assemble((f"{record.metric} ", "dim"), show_number(record.metric_value))


def _workers(record: RunRecord, crew: GroupGeneration | None) -> Text:
    if crew is None:
        return Text("–" if record.state is RunState.PENDING else "1", style="dim")
    return Text.assemble(f"{len(crew.ranks)} ", (crew.layout, "dim"))


def _crew(record: RunRecord) -> GroupGeneration | None:
    return newest_worker_group(open_run(service.home() / record.id))


def _age(seconds: float) -> str:
    if seconds < 172_800:
        return show_duration(max(1.0, round(seconds)))
    return f"{seconds / 86_400:.0f} days"


def _is_busy(record: RunRecord) -> bool:
    return record.state.is_active


def _eta_s(record: RunRecord) -> float | None:
    return remaining_s(open_run(service.home() / record.id), record) if _is_busy(record) else None
