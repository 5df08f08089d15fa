"""Events and plans as text: one line or one block each, the same wherever they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.worker_groups import gist_of, name_worker
from yunlu.render.format import show_fault
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import ACCENT, in_language, indented, plain_table, spoken
from yunlu.runs.events import (
    BatchChanged,
    CommunicationChosen,
    DataOpened,
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
    ModelBuilt,
    PlanMade,
    PrecisionChanged,
    RolledBack,
    StateChanged,
    StepSkipped,
    StragglerSeen,
    TraceWritten,
    WarningRaised,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.fold import Incident

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from yunlu.planning.plan import AutotuneTrial, Plan, Prediction
    from yunlu.render.terminal.run_display import DisplayedProgress
    from yunlu.runs.events import Event
    from yunlu.runs.fold import GroupGeneration

_LABEL = 12
_NOTICES = {
    "skip": "skipped",
    "rollback": "rolled back",
    "out_of_memory": "memory",
    "precision": "precision",
    "trace": "trace",
    "batch": "batch",
}
Notice = Incident | TraceWritten | BatchChanged
GroupEvent = WorkerGroupFormed | WorkerLost | StragglerSeen | CommunicationChosen


def describe(event: Event, progress: DisplayedProgress) -> RenderableType | None:
    """Text of an event; None where nothing is shown."""
    row = None
    match event:
        case PlanMade():
            row = plan_block(event.plan)
        case DataOpened():
            row = event_row("data", data_line(event))
        case ModelBuilt():
            count = show_count(event.parameters)
            row = event_row("model", Text(f"{event.name}, {count} parameters"))
        case Evaluated():
            row = event_row(event.split, evaluation_line(event, progress), style=ACCENT)
        case WarningRaised():
            row = event_row("warning", Text(event.message), style="yellow")
        case StepSkipped(reason="overflow"):
            pass  # how a loss scale is found: counted among the figures
        case StepSkipped() | RolledBack() | MemoryExhausted():
            row = event_row(_NOTICES[event.kind], notice_line(event), style="yellow")
        case PrecisionChanged() | TraceWritten() | BatchChanged():
            row = event_row(_NOTICES[event.kind], notice_line(event))
        case WorkerGroupFormed() | WorkerLost() | StragglerSeen() | CommunicationChosen():
            row = _group_row(event, progress)
        case ErrorRaised():
            row = _trace_rows(event)
        case StateChanged() if event.resumed_from_step is not None:
            row = event_row(
                "resumed", Text(f"from the checkpoint of step {event.resumed_from_step}")
            )
        case _:
            pass
    return row


def notice_line(event: Notice) -> Text:
    """What the engine did about trouble, or wrote besides the model, in one line."""
    match event:
        case StepSkipped():
            figures = f"loss {show_number(event.loss)}, norm {show_number(event.norm)}"
            text = f"update left out, {event.reason} ({figures})"
        case RolledBack():
            text = f"back to step {event.to_step}, then on past the bad samples"
        case MemoryExhausted():
            text = f"memory ran out, micro-batch is now {event.micro_batch}"
        case PrecisionChanged():
            text = f"{event.module} to {event.to} precision, {event.reason}"
        case BatchChanged():
            text = f"batches of {event.batch} from here on, learning rate × {event.rate:.3g}"
            text += f"; {event.steps} steps in all" if event.steps else ""
        case TraceWritten():
            return Text(f"{event.steps} steps traced: {event.path or 'no file'}")
    return Text(f"step {event.step}: {text}")


def worker_group_line(event: WorkerGroupFormed, before: GroupGeneration | None) -> Text:
    """The layout from now on; after a change also what it cost."""
    workers = f"{len(event.ranks)} worker" + ("s" if len(event.ranks) != 1 else "")
    if before is None:
        hosts = len({rank.host for rank in event.ranks})
        return _joined([event.layout, workers, *([f"{hosts} hosts"] if hosts > 1 else [])])
    text = Text(f"{before.layout} → ") if before.layout != event.layout else Text("still ")
    text.append(event.layout, style="bold").append(f", {workers}, from step {event.from_step}")
    costs = [f"{show_duration(event.lost_s)} lost"] if event.lost_s is not None else []
    costs += [f"{event.redone_steps} steps again"] if event.redone_steps else []
    text.append(f"; {', '.join([*costs, 'no sample lost'])}")
    return text.append(f"  {event.reason}", style="dim") if event.reason else text


def fault_line(event: WorkerLost) -> Text:
    """Who was lost, when, and how."""
    when = f" at step {event.step}" if event.step is not None else ""
    why = f": {gist}" if (gist := gist_of(event.detail)) else ""
    return Text(f"{name_worker(event)} {spoken(show_fault(event))}{when}{why}")


def straggler_line(event: StragglerSeen) -> Text:
    """Who is slow, and how much; or is so no more."""
    when = f"step {event.step}: " if event.step is not None else ""
    if event.recovered:
        return Text(f"{when}{name_worker(event)} keeps up again")
    return Text(f"{when}the others wait for {name_worker(event)}, {event.ratio:.1f} × slower")


def communication_line(event: CommunicationChosen) -> Text:
    """How the workers exchange gradients from now on, and why."""
    text = Text(f"step {event.step}: " if event.step else "").append(event.chosen, style="bold")
    reason = event.reason.removeprefix(f"{event.chosen}: ")
    return text.append(f"  {reason}", style="dim") if reason else text


def _group_row(event: GroupEvent, progress: DisplayedProgress) -> RenderableType:
    match event:
        case WorkerGroupFormed():
            return event_row("workers", worker_group_line(event, progress.group_before))
        case StragglerSeen():
            return event_row("slow", straggler_line(event), style="yellow")
        case CommunicationChosen():
            return event_row("exchange", communication_line(event))
        case WorkerLost():
            label, style = ("left", "yellow") if event.cause == "left" else ("lost", "bold red")
            return event_row(label, fault_line(event), style=style)


def _trace_rows(event: ErrorRaised) -> RenderableType | None:
    """Of several workers, where the one that failed did: its error alone would not say whose it is."""
    trace = (event.traceback or "").rstrip()
    if event.worker is None or not trace:
        return None
    return Group(*(event_row("", Text(line, style="dim")) for line in trace.splitlines()))


def plan_block(plan: Plan) -> RenderableType:
    """The table of choices, what was tried for them, and what is predicted after it."""
    table = plain_table(lead=2, prose=("reason",))
    table.add_column("choice", style="bold", no_wrap=True)
    table.add_column("value", style=ACCENT, overflow="fold", ratio=2)
    table.add_column("reason", ratio=5)
    for choice in plan.choices:
        style = "bold" if choice.pinned else "dim"
        name = in_language(choice.name, is_label=True)
        table.add_row(name, choice.value, Text(choice.reason, style=style))
    predicted = event_row("predicted", prediction_line(plan.prediction))
    return Group("", indented(table), "", *_trial_rows(plan), predicted, *_refined_rows(plan))


def _refined_rows(plan: Plan) -> list[RenderableType]:
    """Where the worker departed from the submitted plan, and why."""
    rows: list[RenderableType] = []
    for change in plan.refinements:
        name = in_language(change.name, is_label=True)
        line = Text(f"{name} {change.planned} → ").append(change.refined, style="bold")
        line.append(f"  {change.reason}", style="dim")
        rows.append(event_row("" if rows else "refined", line))
    return rows


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
            text = f"{trial.value} ×{trial.speedup:.2f}" + (" ✔" if trial.is_adopted else "")
            line.append(" · " if i else "", style="dim")
            line.append(text, style="bold" if trial.is_adopted else "dim")
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


def evaluation_line(evaluation: Evaluated, progress: DisplayedProgress) -> Text:
    """Where it was taken, and every figure."""
    step, width = evaluation.step, len(str(progress.steps))
    epoch = progress.epochs_at(step)
    text = Text(f"step {step:>{width}}" + (f"  epoch {epoch:<4.3g}" if epoch else "") + "  ")
    figures = {**evaluation.metrics, "loss": evaluation.loss}
    return text.append_text(
        figures_text((key, f"{show_number(value):<7}") for key, value in figures.items())
    )


def data_line(data: DataOpened) -> Text:
    """Samples of each split, and the source of the data."""
    counts = {"train": data.train, "validation": data.validation, "test": data.test}
    shown = [f"{count:,} {split}" for split, count in counts.items() if count]
    return _joined(shown).append(f"  {data.source}", style="dim")


def event_row(label: str, content: Text, *, style: str = "dim") -> RenderableType:
    """A label, and what belongs to it."""
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=_LABEL + 1, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(f" {label}", style=style), Hanging(content, hang=0))
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
