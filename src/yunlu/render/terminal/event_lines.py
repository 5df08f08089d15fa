"""How an event and a plan read: one line or one block each, the same wherever they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.worker_groups import (
    gist_of,
    name_worker,
    read_change,
    read_fault,
    read_straggler,
)
from yunlu.planning.plan import Plan
from yunlu.render.format import show_fault
from yunlu.render.terminal.page import ACCENT, indented, plain_table
from yunlu.runs.run_dir import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType

    from yunlu.jobs.report_model import WorkerGroupChange
    from yunlu.planning.plan import AutotuneTrial, Prediction
    from yunlu.render.terminal.run_display import Course

_LABEL = 12
_NOTICES = {
    EventKind.SKIP: "skipped",
    EventKind.ROLLBACK: "rolled back",
    EventKind.OUT_OF_MEMORY: "memory",
    EventKind.PRECISION: "precision",
    EventKind.TRACE: "trace",
    EventKind.BATCH: "batch",
}


def describe(event: Event, course: Course) -> RenderableType | None:
    """What an event leaves on the page; None where it leaves nothing."""
    data, row = event.data, None
    match event.kind:
        case EventKind.PLAN:
            return plan_block(Plan.model_validate(data))
        case EventKind.DATA:
            row = event_row("data", data_line(data))
        case EventKind.MODEL:
            count = show_count(data.get("parameters") or 0)
            row = event_row("model", Text(f"{data.get('name')}, {count} parameters"))
        case EventKind.EVALUATION:
            row = event_row(str(data.get("split")), evaluation_line(data, course), style=ACCENT)
        case EventKind.WARNING:
            row = event_row("warning", Text(str(data.get("message"))), style="yellow")
        case EventKind.SKIP if data.get("reason") == "overflow":
            pass  # how a loss scale is found: counted among the figures
        case EventKind.SKIP | EventKind.ROLLBACK | EventKind.OUT_OF_MEMORY:
            row = event_row(_NOTICES[event.kind], notice_line(event), style="yellow")
        case EventKind.PRECISION | EventKind.TRACE | EventKind.BATCH:
            row = event_row(_NOTICES[event.kind], notice_line(event))
        case EventKind.CREW | EventKind.FAULT | EventKind.STRAGGLER | EventKind.COMMUNICATION:
            row = _crew_row(event, course)
        case EventKind.ERROR:
            row = _trace_rows(event)
        case EventKind.STATE if data.get("resumed_from_step") is not None:
            row = event_row(
                "resumed", Text(f"from the checkpoint of step {data['resumed_from_step']}")
            )
        case _:
            pass
    return row


def notice_line(event: Event) -> Text:
    """What the engine did about trouble, or wrote besides the model, in one line."""
    data, step = event.data, f"step {event.data.get('step')}: "
    match event.kind:
        case EventKind.SKIP:
            figures = ", ".join(f"{key} {_number(data.get(key))}" for key in ("loss", "norm"))
            text = f"{step}update left out, {data.get('reason')} ({figures})"
        case EventKind.ROLLBACK:
            text = f"{step}back to step {data.get('to_step')}, then on past the bad samples"
        case EventKind.OUT_OF_MEMORY:
            text = f"{step}memory ran out, micro-batch is now {data.get('micro_batch')}"
        case EventKind.PRECISION:
            text = f"{step}{data.get('module')} to {data.get('to')} precision, {data.get('reason')}"
        case EventKind.BATCH:
            steps, rate = data.get("steps"), float(data.get("rate") or 1.0)
            text = f"{step}batches of {data.get('batch')} from here on, learning rate × {rate:.3g}"
            text += f"; {steps} steps in all" if steps else ""
        case _:
            text = f"{data.get('steps')} steps traced: {data.get('path') or 'no file'}"
    return Text(text)


def crew_line(event: Event, before: WorkerGroupChange | None) -> Text:
    """The layout from now on; after a change also what it cost."""
    change = read_change(event.data)
    if change is None:
        return Text("")
    workers = f"{len(change.ranks)} worker" + ("s" if len(change.ranks) != 1 else "")
    if before is None:
        hosts = len({each.host for each in change.ranks})
        return _joined([change.layout, workers, *([f"{hosts} hosts"] if hosts > 1 else [])])
    text = Text(f"{before.layout} → ") if before.layout != change.layout else Text("still ")
    text.append(change.layout, style="bold").append(f", {workers}, from step {change.from_step}")
    costs = [f"{show_duration(change.lost_s)} lost"] if change.lost_s is not None else []
    costs += [f"{change.redone_steps} steps again"] if change.redone_steps else []
    text.append(f"; {', '.join([*costs, 'no sample lost'])}")
    return text.append(f"  {change.reason}", style="dim") if change.reason else text


def fault_line(event: Event) -> Text:
    """Who was lost, when, and how."""
    fault = read_fault(event.data)
    when = f" at step {fault.step}" if fault.step is not None else ""
    why = f": {gist}" if (gist := gist_of(fault.detail)) else ""
    return Text(f"{name_worker(fault)} {show_fault(fault).en}{when}{why}")


def straggler_line(event: Event) -> Text:
    """Who is slow, and how much; or is so no more."""
    slow = read_straggler(event.data)
    if slow is None:
        return Text("")
    when = f"step {slow.step}: " if slow.step is not None else ""
    if event.data.get("over"):
        return Text(f"{when}{name_worker(slow)} keeps up again")
    return Text(f"{when}the others wait for {name_worker(slow)}, {slow.ratio:.1f} × slower")


def communication_line(event: Event) -> Text:
    """How the workers exchange what they learn from now on, and why."""
    data, step = event.data, event.data.get("step")
    name = str(data.get("chosen") or "")
    text = Text(f"step {step}: " if step else "").append(name, style="bold")
    reason = str(data.get("reason") or "").removeprefix(f"{name}: ")
    return text.append(f"  {reason}", style="dim") if reason else text


def _crew_row(event: Event, course: Course) -> RenderableType:
    if event.kind is EventKind.CREW:
        return event_row("workers", crew_line(event, course.crew_before))
    if event.kind is EventKind.STRAGGLER:
        return event_row("slow", straggler_line(event), style="yellow")
    if event.kind is EventKind.COMMUNICATION:
        return event_row("exchange", communication_line(event))
    gone = event.data.get("what") == "left"
    label, style = ("left", "yellow") if gone else ("lost", "bold red")
    return event_row(label, fault_line(event), style=style)


def _trace_rows(event: Event) -> RenderableType | None:
    """Of several workers, where the one that failed did: its error alone would not say whose it is."""
    trace = str(event.data.get("traceback") or "").rstrip()
    if "member" not in event.data or not trace:
        return None
    return Group(*(event_row("", Text(line, style="dim")) for line in trace.splitlines()))


def plan_block(plan: Plan) -> RenderableType:
    """The table of choices, what was tried for them, and what is predicted after it."""
    table = plain_table()
    table.add_column("choice", style="bold", no_wrap=True)
    table.add_column("value", style=ACCENT, overflow="fold", ratio=2)
    table.add_column("reason", ratio=5)
    for choice in plan.choices:
        style = "bold" if choice.pinned else "dim"
        table.add_row(choice.name, choice.value, Text(choice.reason, style=style))
    predicted = event_row("predicted", prediction_line(plan.prediction))
    return Group("", indented(table), "", *_trial_rows(plan), predicted)


def _trial_rows(plan: Plan) -> list[RenderableType]:
    """One line for each setting that was tried, with every value of it."""
    tried: dict[str, list[AutotuneTrial]] = {}
    for trial in plan.trials:
        tried.setdefault(trial.name, []).append(trial)
    width = max(map(len, tried), default=0)
    rows: list[RenderableType] = []
    for name, trials in tried.items():
        line = Text(f"{name:<{width}}  ")
        for i, trial in enumerate(trials):
            text = f"{trial.value} ×{trial.speedup:.2f}" + (" ✔" if trial.kept else "")
            line.append(" · " if i else "", style="dim")
            line.append(text, style="bold" if trial.kept else "dim")
        if all(trial.remembered for trial in trials):
            line.append("  remembered", style="dim")
        rows.append(event_row("" if rows else "tried", line))
    return rows


def prediction_line(predicted: Prediction) -> Text:
    """Memory, step time, pace, total time, cost."""
    dollars = predicted.dollars
    return _joined(
        [
            show_bytes(predicted.memory_bytes),
            f"{show_duration(predicted.step_s)} a step",
            f"{show_count(predicted.samples_per_s)} samples/s",
            f"{show_duration(predicted.total_s)} in all",
            "no price set" if dollars is None else f"${dollars:.2f}",
        ]
    )


def evaluation_line(data: Mapping[str, Any], course: Course) -> Text:
    """Where it was taken, and every figure."""
    step, width = int(data.get("step") or 0), len(str(course.steps))
    epoch = course.epochs_at(step)
    text = Text(f"step {step:>{width}}" + (f"  epoch {epoch:<4.3g}" if epoch else "") + "  ")
    named = {**(data.get("metrics") or {}), "loss": data.get("loss")}
    found = {key: show_number(float(value)) for key, value in named.items() if value is not None}
    return text.append_text(figures_text((key, f"{value:<7}") for key, value in found.items()))


def _number(value: Any) -> str:
    return "–" if value is None else show_number(float(value))


def data_line(data: Mapping[str, Any]) -> Text:
    """How many samples each part has, and where they come from."""
    counts = [
        f"{data[part]:,} {part}" for part in ("train", "validation", "test") if data.get(part)
    ]
    return _joined(counts).append(f"  {data.get('source')}", style="dim")


def event_row(label: str, content: Text, *, style: str = "dim") -> RenderableType:
    """A label, and what belongs to it."""
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=_LABEL + 1, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(f" {label}", style=style), content)
    return grid


def figures_text(pairs: Iterable[tuple[str, str]]) -> Text:
    """Names, each before its figure."""
    text = Text()
    for name, value in pairs:
        text.append("  " if text else "").append(f"{name} ", style="dim").append(
            value, style="bold"
        )
    return text


def _joined(parts: Iterable[str]) -> Text:
    text = Text()
    for part in parts:
        text.append(" · " if text else "", style="dim").append(part)
    return text
