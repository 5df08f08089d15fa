"""An active run and its log: live on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.run_log import FollowedItem, MetricRecord
from yunlu.render.terminal.event_lines import (
    communication_line,
    data_line,
    describe,
    evaluation_line,
    event_row,
    fault_line,
    figures_text,
    notice_line,
    prediction_line,
    straggler_line,
    worker_group_line,
)
from yunlu.render.terminal.page import ACCENT, indented, print_note, state_text, to_json
from yunlu.runs.events import (
    CheckpointSaved,
    CommunicationChosen,
    DataOpened,
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
    PlanMade,
    PrecisionChanged,
    ProgressReported,
    RolledBack,
    StateChanged,
    StepSkipped,
    StragglerSeen,
    TraceWritten,
    WarningRaised,
    WorkerGroupFormed,
    WorkerLost,
    event_fields,
)
from yunlu.runs.fold import RunView, apply
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from rich.console import Console, RenderableType

    from yunlu.runs.events import Event
    from yunlu.runs.fold import GroupGeneration

_LINE_EVERY_S = 5.0
_PACE_S = 10.0


class Display(Protocol):
    """Shows events and metrics of a run, one at a time."""

    def show(self, item: FollowedItem) -> None:
        """Take one event or metric record."""
        ...

    def note(self, message: str) -> None:
        """Show a message that does not come from the run."""
        ...

    def close(self) -> None:
        """Restore the screen."""
        ...


class DisplayedProgress:
    """Plan, newest step and speed of a run, for a display."""

    def __init__(self) -> None:
        self.view = RunView()
        self.record: dict[str, Any] = {}
        self._recent: deque[tuple[float, int, float]] = deque()

    def take(self, item: FollowedItem) -> None:
        """Take in one event or metric record."""
        if isinstance(item, MetricRecord):
            self._take_record(item.record)
        else:
            self.view = apply(self.view, item)

    @property
    def steps(self) -> int:
        """Steps planned; 0 while there is no plan."""
        return self.view.plan.steps if self.view.plan else 0

    @property
    def saved_step(self) -> int | None:
        """Of the newest checkpoint."""
        return self.view.saved[-1][1].step if self.view.saved else None

    @property
    def skipped(self) -> int:
        """Updates that were left out."""
        return sum(isinstance(incident, StepSkipped) for incident in self.view.incidents)

    @property
    def worker_group(self) -> GroupGeneration | None:
        """The newest generation of this attempt."""
        groups = self._groups()
        return groups[-1] if groups else None

    @property
    def group_before(self) -> GroupGeneration | None:
        """The generation before the newest one, in this attempt."""
        groups = self._groups()
        return groups[-2] if len(groups) > 1 else None

    def _groups(self) -> list[GroupGeneration]:
        attempt = max(len(self.view.attempts), 1)
        return [group for group in self.view.worker_groups if group.attempt == attempt]

    @property
    def samples_per_s(self) -> float | None:
        """Over the last seconds, including evaluations."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return None
        (began_at, _, before), (at, _, after) = self._recent[0], self._recent[-1]
        return (after - before) / (at - began_at)

    @property
    def remaining_s(self) -> float | None:
        """At the speed of the last seconds."""
        if len(self._recent) < 2 or self.steps <= self.record["step"]:
            return None
        (began_at, first, _), (at, last, _) = self._recent[0], self._recent[-1]
        return (self.steps - last) * (at - began_at) / (last - first) if last > first else None

    def where(self) -> str:
        """``step 420/1000  epoch 4.2/10``."""
        text = f"step {self.record['step']}"
        text += f"/{self.steps}" if self.steps else ""
        planned = (self.view.plan and self.view.plan.epochs) or self.epochs_at(self.steps)
        epochs = f"/{planned:.4g}" if planned else ""
        return f"{text}  epoch {float(self.record.get('epoch') or 0):.1f}{epochs}"

    def workers(self) -> str | None:
        """``dp2 x tp2 · 4 workers``; None where one plain worker trains alone."""
        if self.worker_group is None:
            return None
        count = len(self.worker_group.ranks)
        return f"{self.worker_group.layout} · {count} worker" + ("s" if count != 1 else "")

    def figures(self) -> list[tuple[str, str]]:
        """What the newest step measured, as name and text."""
        record = self.record
        pairs = [
            ("loss", show_number(float(record["loss"])) if "loss" in record else None),
            ("lr", f"{float(record['lr']):.2e}" if "lr" in record else None),
            ("samples/s", show_count(self.samples_per_s) if self.samples_per_s else None),
            ("memory", show_bytes(record["memory_bytes"]) if "memory_bytes" in record else None),
            ("saved", f"step {self.saved_step}" if self.saved_step else None),
            ("skipped", str(self.skipped) if self.skipped else None),
        ]
        return [(name, text) for name, text in pairs if text is not None]

    def epochs_at(self, step: int) -> float | None:
        """Epochs that a step completes."""
        if self.record and self.record["step"] == step:
            return self.record.get("epoch")
        steps = self.view.plan.steps_per_epoch if self.view.plan else None
        return step / steps if steps and step else None

    def _take_record(self, record: dict[str, Any]) -> None:
        if self.record and record["step"] <= self.record["step"]:  # a later attempt made it again
            self._recent.clear()
        self.record = record
        self._recent.append((record["at"], record["step"], record.get("samples") or 0))
        while len(self._recent) > 2 and record["at"] - self._recent[0][0] > _PACE_S:
            self._recent.popleft()


class LiveDisplay:
    """For a terminal: events stay above, the current step moves below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = DisplayedProgress()
        self._spinner = Spinner("dots", style=ACCENT)
        self._phase: str | None = "starting the worker"
        self._live = Live(
            console=console,
            get_renderable=self._moving,
            transient=True,
            refresh_per_second=8,
            # What a script prints goes where the script wants it.
            redirect_stdout=not console.stderr,
        )
        self._live.start()

    def show(self, item: FollowedItem) -> None:
        """Print events; update the moving part."""
        self._progress.take(item)
        if isinstance(item, MetricRecord):
            self._phase = None
            return
        if isinstance(item, ProgressReported):
            self._phase = item.phase
        elif isinstance(item, StateChanged):
            is_stopping = item.state is RunState.STOPPING
            self._phase = "stopping: saving a checkpoint" if is_stopping else None
        block = describe(item, self._progress)
        if block is not None:
            self._console.print(block)

    def note(self, message: str) -> None:
        """A yellow line."""
        self._console.print(event_row("", Text(message, style="yellow")))

    def close(self) -> None:
        """Stop moving."""
        self._live.stop()

    def _moving(self) -> RenderableType:
        progress = self._progress
        lines: list[RenderableType] = []
        if progress.record and progress.steps:
            left = progress.remaining_s
            share = f"{progress.record['step'] / progress.steps:4.0%}"
            where = progress.where() + (f"  ETA {show_duration(left)}" if left is not None else "")
            where += f"  {workers}" if (workers := progress.workers()) else ""
            room = self._console.width - len(share + where) - 8
            bar = ProgressBar(
                total=progress.steps,
                completed=progress.record["step"],
                width=max(8, min(48, room)),
                complete_style=ACCENT,
                finished_style="green",
            )
            grid = Table.grid(padding=(0, 1))
            text = Text(where, no_wrap=True, overflow="ellipsis")
            grid.add_row(" ", bar, Text(share, style="bold"), text)
            lines.append(grid)
        phase = self._phase or ("" if lines else "working")
        text = Text(phase, style="dim") if phase else figures_text(progress.figures())
        text.no_wrap, text.overflow = True, "ellipsis"
        # Not padded to the far edge: the ^C a terminal echoes there would begin a new line.
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, text)
        lines.append(indented(line))
        return Group(*lines)


class PlainDisplay:
    """For a file or a pipe: a line for each event, and one for the steps every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = DisplayedProgress()
        self._shown_at = 0.0

    def show(self, item: FollowedItem) -> None:
        """Print the event; print a step only when the last line is old enough."""
        progress = self._progress
        progress.take(item)
        if isinstance(item, MetricRecord):
            last = progress.steps and progress.record["step"] >= progress.steps
            if item.at - self._shown_at >= _LINE_EVERY_S or last:
                self._shown_at = item.at
                self._print(event_row("train", Text(step_line(progress))))
            return
        if isinstance(item, ProgressReported):
            self._print(event_row("", Text(f"{item.phase} ...")))
        block = describe(item, progress)
        if block is not None:
            self._print(block)

    def note(self, message: str) -> None:
        """A line."""
        self._print(event_row("", Text(message)))

    def close(self) -> None:
        """Nothing moves here."""

    def _print(self, block: RenderableType) -> None:
        with self._console.capture() as text:
            self._console.print(block)
        # Tables are padded to the width of the page: of no use in a file.
        lines = [line.rstrip() for line in text.get().splitlines()]
        self._console.file.write("\n".join(lines) + "\n")
        self._console.file.flush()


class JsonDisplay:
    """For programs: every event and metric record is one JSON line."""

    def __init__(self, run: str, out: TextIO | None = None) -> None:
        """``run``: its id."""
        self._run_id = run
        self._out = out or sys.stdout

    def show(self, item: FollowedItem) -> None:
        """Write one line."""
        if isinstance(item, MetricRecord):
            line = {"event": "metrics", "run": self._run_id, **item.record}
        else:
            line = {"event": item.kind, "run": self._run_id, "at": item.at}
            line |= event_fields(item)
        self._write(line)

    def show_output(self, text: str, **of: Any) -> None:
        """Write a line that a worker printed; ``of``: which one, if it is one of several."""
        named = {name: value for name, value in of.items() if value is not None}
        self._write({"event": "output", "run": self._run_id, **named, "text": text})

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(to_json(line) + "\n")
        self._out.flush()

    def note(self, message: str) -> None:
        """On standard error: standard output carries JSON only."""
        print_note(message)

    def close(self) -> None:
        """Nothing to close."""


def step_line(progress: DisplayedProgress) -> str:
    """One line about the newest step."""
    parts = [progress.where(), *(f"{name} {text}" for name, text in progress.figures())]
    parts += [workers] if (workers := progress.workers()) else []
    left = progress.remaining_s
    return "  ".join(parts) + (f"  ETA {show_duration(left)}" if left is not None else "")


_STEP_EVERY_S = 2.0
_KIND_WIDTH = 13


class LogLines:
    """Lines for events, and one for the newest step every few seconds."""

    def __init__(self) -> None:
        self._progress = DisplayedProgress()
        self._shown_at = 0.0

    def take(self, items: Iterable[FollowedItem]) -> Iterator[Text]:
        """Lines for what is new."""
        for item in items:
            self._progress.take(item)
            if not isinstance(item, MetricRecord):
                yield log_line(item, self._progress.group_before)
            elif item.at - self._shown_at > _STEP_EVERY_S:
                self._shown_at = item.at
                yield Text(f"          {step_line(self._progress)}", style="dim")


def log_line(event: Event, before: GroupGeneration | None = None) -> Text:
    """One event on one line."""
    when = time.strftime("%H:%M:%S", time.localtime(event.at))
    kind = f"{event.kind:<{_KIND_WIDTH}}"
    return Text.assemble((f"{when}  ", "dim"), (kind, "dim"), _gist(event, before))


def _gist(event: Event, before: GroupGeneration | None) -> Text:
    match event:
        case StateChanged():
            reason = f"  {event.reason}" if event.reason else ""
            text = Text.assemble(state_text(event.state), (reason, "dim"))
        case Evaluated():
            text = Text(f"{event.split}  ") + evaluation_line(event, DisplayedProgress())
        case CheckpointSaved():
            text = Text(f"step {event.step}  {event.path}  {show_bytes(event.bytes)}")
        case PlanMade():
            text = prediction_line(event.plan.prediction)
        case DataOpened():
            text = data_line(event)
        case StepSkipped() | RolledBack() | MemoryExhausted() | PrecisionChanged() | TraceWritten():
            text = notice_line(event)
        case WorkerGroupFormed():
            text = worker_group_line(event, before)
        case WorkerLost():
            text = fault_line(event)
            text.stylize("red" if event.cause != "left" else "")
        case StragglerSeen():
            text = straggler_line(event)
        case CommunicationChosen():
            text = communication_line(event)
        case WarningRaised() | ErrorRaised():
            style = "yellow" if isinstance(event, WarningRaised) else "red"
            text = Text(event.message, style=style)
        case _:
            fields = event_fields(event).items()
            text = Text("  ".join(f"{key} {_brief(value)}" for key, value in fields))
    return text


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
