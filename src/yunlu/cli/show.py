"""``yunlu show``: one run on one screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from yunlu.client.api import Run
from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs import service
from yunlu.jobs.worker_groups import read_change
from yunlu.jobs.run import remaining_s
from yunlu.render.terminal.event_lines import communication_line, fault_line, plan_block
from yunlu.render.terminal.page import (
    ACCENT,
    indented,
    make_console,
    plain_table,
    state_text,
    to_json,
)
from yunlu.runs.run_dir import Event, EventKind
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log, last_record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from yunlu.runs.fold import GroupGeneration
    from yunlu.jobs.run import RunRecord
    from yunlu.runs.run_store import RunStore

_FEW = 8


def show(run: str = "last", /, *, json: bool = False) -> int:
    """Show one run: job, state, plan, evaluations, checkpoints, warnings, paths.

    Args:
        run: Its id, a unique beginning of it, or: last.
        json: Print the same as JSON.
    """
    store = service.find(run)
    record, data = service.read_record(store), _collect(store)
    if json:
        print(to_json({**record.model_dump(mode="json"), **data}))
        return 0
    console = make_console()
    _print_head(console, store, record)
    made = Run(Path(store.address)).plan
    if made is not None:
        console.print(plan_block(made))
    crew = read_change(data["crew"]) if data["crew"] else None
    if crew is not None:
        _print_rows(console, f"workers: {crew.layout}", _workers(crew))
        for fault in data["faults"][-_FEW:]:
            console.print(Text(f" {fault_line(Event(kind=EventKind.FAULT, at=0.0, data=fault))}"))
    if data["communication"]:
        event = Event(kind=EventKind.COMMUNICATION, at=0.0, data=data["communication"])
        console.print(Text("\n exchange    ").append_text(communication_line(event)))
    if data["batch"] or data["noise"]:
        console.print(Text(f"\n batch       {_batch_line(data['batch'], data['noise'])}"))
    _print_rows(console, "evaluations", _evaluations(data["evaluations"]))
    _print_rows(console, "checkpoints", _checkpoints(data["checkpoints"]))
    console.print()
    for warning in data["warnings"]:
        console.print(Text(f" warning     {warning}", style="yellow"))
    _print_paths(console, data["paths"])
    return 0


def _collect(run: RunStore) -> dict[str, Any]:
    found: dict[EventKind, list[dict[str, Any]]] = {kind: [] for kind in EventKind}
    for event, _ in run.read_events():
        found[event.kind].append(event.data)
    details = {"confusion", "examples"}
    kept = {entry["step"]: entry for entry in found[EventKind.CHECKPOINT]}.values()
    return {
        "plan": found[EventKind.PLAN][-1] if found[EventKind.PLAN] else None,
        "crew": found[EventKind.CREW][-1] if found[EventKind.CREW] else None,
        "communication": (found[EventKind.COMMUNICATION] or [None])[-1],
        "batch": (found[EventKind.BATCH] or [None])[-1],
        "noise": _read_noise(run),
        "faults": found[EventKind.FAULT],
        "evaluations": [
            {key: value for key, value in each.items() if key not in details}
            for each in found[EventKind.EVALUATION]
        ],
        # Old checkpoints are removed as new ones come: what is still there counts.
        "checkpoints": [entry for entry in kept if run.has(entry["path"])],
        "warnings": [str(each.get("message")) for each in found[EventKind.WARNING]],
        "paths": {
            name: run.location(item) if item else run.address
            for name, item in (
                ("run", ""),
                ("job", Document.JOB_SOURCE if run.has(Document.JOB_SOURCE) else Document.JOB),
                ("model", Area.MODEL),
                ("report", Document.REPORT_PAGE),
                ("log", WORKER_LOG),
                ("logs", Area.LOGS),
            )
            if run.has(item)
        },
    }


def _read_noise(run: RunStore) -> dict[str, float]:
    last = last_record(run, Log.METRICS) or {}
    return {key: value for key, value in last.items() if key.startswith("noise_")}


def _batch_line(turn: dict[str, Any] | None, noise: dict[str, float]) -> str:
    parts: list[str] = []
    if turn:
        parts.append(f"{turn['batch']} from step {turn['step']} on, rate x{turn['rate']:.3g}")
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


def _workers(crew: GroupGeneration) -> Table:
    table = _small_table("rank", "worker", "host", "pid", "stage", "replica", "shard", "cut")
    for each in crew.ranks:
        place = (each.pp, each.dp, each.fsdp, each.tp)
        cells = (each.rank, each.worker, each.host, each.pid, *(at + 1 for at in place))
        table.add_row(*(Text("–" if cell is None else str(cell)) for cell in cells))
    return table


def _evaluations(rows: list[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row.get("metrics") or {}))
    table = _small_table("split", "step", "loss", *names)
    if len(rows) > _FEW:
        table.add_row(f"({len(rows) - _FEW} earlier)", style="dim")
    for row in rows[-_FEW:]:
        figures = {"loss": row.get("loss"), **(row.get("metrics") or {})}
        cells = [_cell(figures.get(name)) for name in ("loss", *names)]
        table.add_row(str(row.get("split")), str(row.get("step")), *cells)
    return table


def _checkpoints(rows: list[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    table = _small_table("step", "size", "saved in", "path")
    for row in rows[-_FEW:]:
        table.add_row(
            str(row.get("step")),
            show_bytes(row.get("bytes") or 0),
            show_duration(row.get("seconds") or 0),
            str(row.get("path")),
        )
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
