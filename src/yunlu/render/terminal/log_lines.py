"""Events of a run as log lines."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from rich.text import Text

from yunlu.core.units import show_bytes
from yunlu.jobs.follow import MetricRecord
from yunlu.render.terminal.event_lines import (
    communication_line,
    data_line,
    evaluation_line,
    fault_line,
    notice_line,
    prediction_line,
    straggler_line,
    worker_group_line,
)
from yunlu.render.terminal.page import state_text
from yunlu.render.terminal.run_display import DisplayedProgress, step_line
from yunlu.runs.events import (
    CheckpointSaved,
    CommunicationChosen,
    DataOpened,
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
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
    event_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yunlu.jobs.follow import FollowedItem
    from yunlu.runs.events import Event
    from yunlu.runs.fold import GroupGeneration

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
