"""The report on a terminal: what happened, on one screen."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.communication import communication_lines
from yunlu.jobs.worker_groups import name_worker
from yunlu.render.format import show_fault, show_finding, show_metric, show_quantity
from yunlu.render.terminal.fitting_table import FittingTable, Flowing
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import in_language, spoken
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from yunlu.jobs.communication import Communication
    from yunlu.jobs.report_model import (
        Comparison,
        ConfusionMatrix,
        EvaluationRow,
        Report,
        WorkerGroupHistory,
    )
    from yunlu.runs.events import TraceWritten
    from yunlu.runs.fold import GroupGeneration

_COLOURS = {
    RunState.FINISHED: "green",
    RunState.FAILED: "red",
    RunState.LOST: "red",
    RunState.STOPPED: "yellow",
    RunState.STOPPING: "yellow",
}
_QUANTITIES = {
    "memory_bytes": "peak memory",
    "step_s": "step time",
    "samples_per_s": "samples per second",
    "total_s": "total time",
    "dollars": "cost",
}
_PARTS = {
    "data": "yellow",
    "compute": "blue",
    "communication": "green",
    "checkpoint": "magenta",
    "evaluation": "cyan",
    "other": "bright_black",
}
_MOST_CLASSES = 12
_MOST_EVALUATIONS = 8
_MOST_OPERATORS = 15
_MOST_CHANGES = 12
_MOST_MEMBERS = 16
_BAR_WIDTH = 48
_BARS = "▁▂▃▄▅▆▇█"


def print_summary(report: Report, console: Console) -> None:
    """State, scores, confusion, loss, predicted beside measured, time and paths."""
    console.print(Hanging(_heading(report), hang=2))
    if report.failure is not None:
        first = f"{report.failure.worker}: " if report.failure.worker else ""
        console.print(Hanging(Text(f"  {first + report.failure.message}", "red"), hang=4))
        if report.failure.hint:
            console.print(Hanging(Text(f"  → {report.failure.hint}"), hang=4))
    for warning in report.warnings:
        console.print(Hanging(Text(f"  ! {warning}", "yellow"), hang=4))
    for finding in report.findings:
        console.print(Hanging(Text(f"  · {spoken(show_finding(finding))}"), hang=4))
    if (loss := report.curve("train_loss")) is not None:
        room = console.width - len("  loss    0.0000 → 0.0000")
        console.print(_loss_line(loss.values, width=max(8, min(_BAR_WIDTH, room))))
    if report.evaluations:
        console.print(_evaluation_table(report.evaluations))
    matrix = report.confusion
    if matrix is not None and len(matrix.labels) <= _MOST_CLASSES:
        console.print(_confusion_table(matrix))
    if any(comparison.is_known for comparison in report.comparisons):
        console.print(_comparison_table(report))
    if report.time is not None:
        console.print(_time_line(report.time.totals, width=console.width))
    if report.worker_group is not None:
        console.print(_group_block(report.worker_group))
    if report.communication is not None:
        console.print(_communication_block(report.communication))
    if report.trace is not None:
        console.print(_trace_table(report.trace))
    console.print(_paths(report), soft_wrap=True)  # a path is to be copied whole


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The curve in one line of text; ``×`` where a value is not finite."""
    width = min(width, len(values))
    groups = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    drawn: list[str] = []
    for group in groups:
        if not all(math.isfinite(value) for value in group):
            drawn.append("×")
            continue
        mean = math.fsum(value / len(group) for value in group)
        share = (mean - low) / (high - low) if high > low else 0.0
        drawn.append(_BARS[min(int(share * len(_BARS)), len(_BARS) - 1)])
    return "".join(drawn)


def _heading(report: Report) -> Text:
    colour = _COLOURS.get(report.state, "blue")
    text = Text.assemble(
        (report.name, "bold"),
        "  ",
        (in_language(report.state.value, is_label=True), f"bold {colour}"),
    )
    if report.headline is not None:
        value = show_metric(report.headline.metric, report.headline.value)
        quoted = f"{report.headline.split} {report.headline.metric}"
        text.append_text(Text.assemble("  ", quoted, " ", (value, "bold")))
    facts = [report.task, report.model]
    if report.parameters:
        facts.append(f"{show_count(report.parameters)} parameters")
    if report.step:
        of = f" of {report.plan.steps:,}" if report.plan else ""
        facts.append(f"step {report.step:,}{of}")
    if report.attempts > 1:
        facts.append(f"resumed {report.attempts - 1} ×")
    if report.reason:
        facts.append(report.reason)
    known = " · ".join(fact for fact in facts if fact)
    return text.append(f"\n  {known}", "dim") if known else text


def _loss_line(values: Sequence[float], *, width: int) -> Text:
    span = f"  {show_number(values[0])} → {show_number(values[-1])}"
    label = in_language("loss", is_label=True)
    return Text.assemble(f"\n  {label}  ", (sparkline(values, width), "blue"), (span, "dim"))


def _table(title: str, **fitting: Any) -> FittingTable:
    return FittingTable(
        **fitting, heading=f"  {title}", caption_justify="left", box=box.SIMPLE_HEAD
    )


def _evaluation_table(rows: Sequence[EvaluationRow]) -> Table:
    table = _table("Evaluation")
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    table.add_column("split")
    for name in ("step", "loss", *names):
        table.add_column(name, justify="right")
    shown = [
        row for row in rows if row.best or row.split == "test" or row in rows[-_MOST_EVALUATIONS:]
    ]
    for row in shown:
        star = " ★" if row.best else ""
        table.add_row(
            Text(row.split + star),
            f"{row.step:,}",
            show_metric("loss", row.loss),
            *(show_metric(name, row.metrics.get(name)) for name in names),
            style="bold" if row.split == "test" else "green" if row.best else None,
        )
    if len(shown) < len(rows):
        table.caption = f"  {len(rows) - len(shown)} earlier evaluations are in the report"
    return table


def _confusion_table(matrix: ConfusionMatrix) -> Table:
    title = f"Confusion ({matrix.split}; rows are true labels)"
    labels = len(matrix.labels)
    table = _table(title, instead=f"no room for {labels} labels: see the report")
    table.add_column("", no_wrap=True, max_width=16)
    for label in matrix.labels:
        table.add_column(Text(label), justify="right", no_wrap=True, max_width=8)
    for i, (label, row) in enumerate(zip(matrix.labels, matrix.counts, strict=True)):
        cells = [
            Text(str(count), "dim" if not count else "bold green" if i == j else "red")
            for j, count in enumerate(row)
        ]
        table.add_row(Text(label), *cells)
    return table


def _comparison_table(report: Report) -> Table:
    known = [comparison for comparison in report.comparisons if comparison.is_known]
    has_estimate = any(comparison.estimated is not None for comparison in known)
    table = _table("Predicted beside measured", drop=("estimated", "ratio"))
    table.add_column("")
    for name in (*(("estimated", "10–90 %") if has_estimate else ()), "predicted", "measured"):
        table.add_column(name, justify="right")
    table.add_column("ratio", justify="right")
    for comparison in known:
        ratio = "–" if comparison.ratio is None else f"× {comparison.ratio:.2f}"
        shown = [show_quantity(comparison.quantity, comparison.predicted)]
        if has_estimate:
            shown = [
                show_quantity(comparison.quantity, comparison.estimated),
                _interval(comparison),
                *shown,
            ]
        style = {True: "green", False: "yellow", None: ""}[comparison.inside]
        table.add_row(
            _QUANTITIES[comparison.quantity],
            *shown,
            Text(show_quantity(comparison.quantity, comparison.measured), style=style),
            "so far" if comparison.so_far and comparison.measured is not None else ratio,
        )
    if has_estimate:
        table.caption = "  estimated: before any pass was timed; predicted: after timing a few"
    return table


def _interval(comparison: Comparison) -> str:
    if comparison.interval is None:
        return ""
    low, high = (show_quantity(comparison.quantity, value) for value in comparison.interval)
    sign = {True: " ✓", False: " ✗", None: ""}[comparison.inside]
    number, _, unit = low.partition(" ")
    same_unit = unit and high.endswith(f" {unit}")
    return f"{number if same_unit else low}–{high}{sign}"


def _time_line(totals: dict[str, float], *, width: int) -> RenderableType:
    whole = sum(totals.values())
    text = Text(f"  {in_language('time', is_label=True)}  ")
    bar = max(8, min(_BAR_WIDTH, width - 16))
    spent = {part: seconds for part, seconds in totals.items() if whole and seconds / whole >= 5e-4}
    for part, seconds in spent.items():
        text.append("█" * max(1, round(bar * seconds / whole)), _PARTS[part])
    items = [
        Text.assemble(
            ("■ ", _PARTS[part]),
            f"{in_language(part, is_label=True)} {show_duration(seconds)} ({seconds / whole:.0%})",
        )
        for part, seconds in spent.items()
    ]
    return Group(text, Padding(Flowing(items, "  "), (0, 0, 0, 8)))


def _group_block(worker_group: WorkerGroupHistory) -> Group:
    """Lost time in a line, then what happened, each worker, and who holds what."""
    newest = worker_group.newest
    line = Text.assemble("\n  workers  ", (f"{len(newest.ranks)} as {newest.layout}", "bold"))
    if worker_group.effective is not None:
        line.append(f"  effective training time {worker_group.effective:.1%}", "bold")
        line.append(
            f"  ({show_duration(worker_group.lost_s)} of {show_duration(worker_group.wall_s)} lost)",
            "dim",
        )
    blocks: list[RenderableType] = [_member_table(worker_group), _layout_table(newest)]
    if len(worker_group.changes) > 1 or worker_group.faults:
        blocks.insert(0, _happened_table(worker_group))
    return Group(Hanging(line, hang=4), *blocks)


def _communication_block(communication: Communication) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for index, line in enumerate(communication_lines(communication)):
        label, style = ("", "dim") if index else ("  exchange", "bold")
        grid.add_row(label, Text(line, style))
    return grid


def _happened_table(worker_group: WorkerGroupHistory) -> Table:
    table = _table("What happened to the workers", prose=("what",), lead=2)
    for name in ("time", "step", "what", "lost", "again"):
        table.add_column(name, justify="left" if name == "what" else "right")
    rows: list[tuple[float, str, str, str, str, str | None]] = []
    for fault in worker_group.faults:
        step = "" if fault.step is None else f"{fault.step:,}"
        rows.append(
            (fault.at, step, f"{name_worker(fault)} {spoken(show_fault(fault))}", "", "", "red")
        )
    for before, change in pairwise(worker_group.changes):
        lost = "" if change.lost_s is None else show_duration(change.lost_s)
        what = f"{before.layout} → {change.layout}, {len(change.ranks)} workers"
        what += f": {change.reason}" if change.reason else ""
        step, again = f"{change.from_step:,}", f"{change.redone_steps:,}"
        rows.append((change.at, step, what, lost, again, None))
    for at, step, what, lost, again, style in sorted(rows, key=lambda row: row[0])[-_MOST_CHANGES:]:
        since = show_duration(max(worker_group.elapsed_at(at), 0.0))
        table.add_row(since, step, Text(what), lost, again, style=style)
    if len(rows) > _MOST_CHANGES:
        table.caption = f"  {len(rows) - _MOST_CHANGES} earlier ones are in the report"
    return table


def _member_table(worker_group: WorkerGroupHistory) -> Table:
    table = _table("Each worker", drop=("rank", "memory"))
    table.add_column("worker")
    table.add_column("rank", justify="right")
    table.add_column("host")
    for name in ("step", "waiting", "memory"):
        table.add_column(name, justify="right")
    shown = [worker for worker in worker_group.workers if worker.rank is not None][:_MOST_MEMBERS]
    slow = {straggler.worker: straggler.ratio for straggler in worker_group.stragglers}
    for worker in shown:
        tag = f"  {slow[worker.worker]:.1f} × slower" if worker.worker in slow else ""
        share = worker.wait_share
        table.add_row(
            Text(worker.worker + tag),
            str(worker.rank),
            Text(worker.host),
            "–" if worker.step_s is None else show_duration(worker.step_s),
            "–" if share is None else f"{share:.1%}",
            "–" if worker.memory_bytes is None else show_bytes(worker.memory_bytes),
            style="yellow" if tag else None,
        )
    if len(shown) < len(worker_group.workers):
        table.caption = f"  {len(worker_group.workers) - len(shown)} more are in the report"
    return table


def _layout_table(change: GroupGeneration) -> Group:
    """Stages from left to right, replicas downwards; in a cell, a line for each shard."""
    table = _table("Which rank holds what")
    table.add_column("")
    stages = max((rank.pp for rank in change.ranks), default=0) + 1
    for pp in range(stages):
        held = " + ".join(change.stages[pp::stages])
        title = f"stage {pp + 1}" if stages > 1 else "all layers"
        table.add_column(Text(title + (f": {held}" if held else "")))
    for dp in sorted({rank.dp for rank in change.ranks}):
        cells: list[Text] = []
        for pp in range(stages):
            here = [rank for rank in change.ranks if (rank.dp, rank.pp) == (dp, pp)]
            lines = [
                " ".join(
                    f"{r.rank}@{r.host}" if r.host else str(r.rank) for r in here if r.fsdp == fsdp
                )
                for fsdp in sorted({rank.fsdp for rank in here})
            ]
            cells.append(Text("\n".join(lines)))
        table.add_row(f"replica {dp + 1}", *cells)
    cut = any(rank.tp for rank in change.ranks), any(rank.fsdp for rank in change.ranks)
    legends = ("side by side: cuts of one matrix", "below each other: shards")
    notes = "; ".join(note for note, is_so in zip(legends, cut, strict=True) if is_so)
    return Group(table, Text(f"  {notes}", "dim")) if notes else Group(table)


def _trace_table(traced: TraceWritten) -> Group:
    """By phase in a line, by operator in a table. The profiler slows steps: shares are what counts."""
    phases = Text("  phases  ")
    for phase in traced.phases:
        if phase.share >= 5e-4:
            phases.append(f"{phase.name} ").append(f"{phase.share:.0%}  ", "bold")
    table = _table(f"Where {traced.steps} traced steps spent their time")
    table.add_column("operator", max_width=60, no_wrap=True)
    for name in ("own time", "share", "calls"):
        table.add_column(name, justify="right")
    for row in traced.table[:_MOST_OPERATORS]:
        own = show_duration(row.self_s)
        table.add_row(Text(row.name), own, f"{row.share:.1%}", f"{row.calls:,}")
    return Group("", table, Hanging(phases, hang=10))


def _paths(report: Report) -> Text:
    text = Text()
    if report.trace is not None and report.trace.path:
        text.append(f"\n  trace   {report.path}/{report.trace.path}")
        text.append("\n          (opens in ui.perfetto.dev)", "dim")
    if report.exported is not None:
        text.append(f"\n  model   {report.path}/{report.exported.path}")
    return text.append(f"\n  report  {report.path}/{Document.REPORT_PAGE}")
