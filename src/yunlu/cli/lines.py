"""How an event and a plan read: one line or one block each, the same wherever they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from yunlu.cli.page import ACCENT, indented, plain_table
from yunlu.core.rundir import Event, EventKind
from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.planning.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType

    from yunlu.cli.display import Course
    from yunlu.planning.plan import Prediction, Trial

_LABEL = 12
_NOTICES = {
    EventKind.SKIP: "skipped",
    EventKind.ROLLBACK: "rolled back",
    EventKind.OUT_OF_MEMORY: "memory",
    EventKind.PRECISION: "precision",
    EventKind.TRACE: "trace",
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
        case EventKind.PRECISION | EventKind.TRACE:
            row = event_row(_NOTICES[event.kind], notice_line(event))
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
        case _:
            text = f"{data.get('steps')} steps traced: {data.get('path') or 'no file'}"
    return Text(text)


def plan_block(plan: Plan) -> RenderableType:
    """The table of choices, what was tried for them, and what they foretell."""
    table = plain_table()
    table.add_column("choice", style="bold", no_wrap=True)
    table.add_column("value", style=ACCENT, overflow="fold", ratio=2)
    table.add_column("reason", ratio=5)
    for choice in plan.choices:
        style = "bold" if choice.pinned else "dim"
        table.add_row(choice.name, choice.value, Text(choice.reason, style=style))
    foretold = event_row("foretold", prediction_line(plan.prediction))
    return Group("", indented(table), "", *_trial_rows(plan), foretold)


def _trial_rows(plan: Plan) -> list[RenderableType]:
    """One line for each setting that was tried, with every value of it."""
    tried: dict[str, list[Trial]] = {}
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


def prediction_line(foretold: Prediction) -> Text:
    """Memory, step time, pace, total time, cost."""
    dollars = foretold.dollars
    return _joined(
        [
            show_bytes(foretold.memory_bytes),
            f"{show_duration(foretold.step_s)} a step",
            f"{show_count(foretold.samples_per_s)} samples/s",
            f"{show_duration(foretold.total_s)} in all",
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
