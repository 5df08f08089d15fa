"""``yunlu logs``: what happened in a run, line by line."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from yunlu.core.errors import StoreError
from yunlu.core.units import show_bytes
from yunlu.jobs import service
from yunlu.jobs.follow import MetricRecord, end_of, follow
from yunlu.jobs.run import log_tail
from yunlu.jobs.worker_groups import newest_worker_group
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
from yunlu.render.terminal.page import make_console, state_text
from yunlu.render.terminal.run_display import Course, step_line
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
from yunlu.runs.run_store import Area

if TYPE_CHECKING:
    from rich.console import Console

    from yunlu.runs.events import Event
    from yunlu.runs.fold import GroupGeneration
    from yunlu.runs.run_store import RunStore

_STEP_EVERY_S = 2.0
_KIND_WIDTH = 13


def logs(
    run: str = "last",
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: int = 20,
    rank: Annotated[int | None, Parameter(show_default=False)] = None,
    member: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Print a run's events, then the last lines its worker printed.

    Args:
        run: Its id, a unique beginning of it, or: last.
        follow: Go on printing until the run rests.
        lines: How many lines of worker.log, or of the one worker's log.
        rank: Of several workers, only what the one that has this rank now printed.
        member: The same by the worker's number, which stays when ranks change.
    """
    console = make_console()
    store = service.find(run)
    if rank is not None or member is not None:
        log = _own_log(store, rank=rank, member=member)
        _print_own_log(store, log, console, lines=lines, go_on=follow)
        return 0
    if follow:
        _follow(store, console)
    else:
        course = Course()
        for event, _ in store.read_events():
            course.take(event)
            console.print(log_line(event, course.group_before), soft_wrap=True)
    _print_tail(store, console, lines)
    return 0


def log_line(event: Event, before: GroupGeneration | None = None) -> Text:
    """One event on one line, for ``yunlu logs``."""
    when = time.strftime("%H:%M:%S", time.localtime(event.at))
    kind = f"{event.kind:<{_KIND_WIDTH}}"
    return Text.assemble((f"{when}  ", "dim"), (kind, "dim"), _gist(event, before))


def _follow(run: RunStore, console: Console) -> None:
    course, shown_at = Course(), 0.0
    past = end_of(run)
    for event, _ in run.read_events():
        course.take(event)
        console.print(log_line(event, course.group_before), soft_wrap=True)
    for update in follow(run, since=past):
        for happening in update.items:
            course.take(happening)
            if not isinstance(happening, MetricRecord):
                console.print(log_line(happening, course.group_before), soft_wrap=True)
            elif happening.at - shown_at > _STEP_EVERY_S:
                shown_at = happening.at
                console.print(Text(f"          {step_line(course)}", style="dim"), soft_wrap=True)


def _own_log(run: RunStore, *, rank: int | None, member: str | None) -> str:
    """Name of the text log of one worker; a rank is looked up in the newest layout."""
    if rank is not None:
        crew = newest_worker_group(run)
        ranks = {each.rank: each.worker for each in crew.ranks} if crew else {}
        if rank not in ranks:
            raise StoreError(
                f"{run.id} has no rank {rank}",
                hint=f"it has the ranks 0 to {len(ranks) - 1}"
                if ranks
                else f"one worker trains it: yunlu logs {run.id}",
            )
        if member not in {None, ranks[rank]}:
            raise StoreError(
                f"rank {rank} is worker {ranks[rank]}, not {member}", hint="give one of the two"
            )
        member = ranks[rank]
    name = f"worker-{member}.log"
    # A name is a number or a word, never a way out of the directory.
    names = run.names(Area.LOGS)
    if name not in names:
        known = [
            log.removeprefix("worker-").removesuffix(".log")
            for log in names
            if log.startswith("worker-") and log.endswith(".log")
        ]
        hint = f"there are: {', '.join(known)}" if known else f"try: yunlu logs {run.id}"
        raise StoreError(f"{run.id} has no log of worker {member}", hint=hint)
    return f"{Area.LOGS}/{name}"


def _print_own_log(run: RunStore, log: str, console: Console, *, lines: int, go_on: bool) -> None:
    text = run.read(log) or b""
    read = len(text)
    for line in text.decode(errors="replace").splitlines()[-lines:] if lines > 0 else ():
        console.print(Text.from_ansi(line), soft_wrap=True)
    if not go_on:
        return
    for _ in follow(run):
        text = run.read(log, offset=read) or b""
        whole = text[: text.rfind(b"\n") + 1]  # half a line is left for later
        read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            console.print(Text.from_ansi(line), soft_wrap=True)


def _print_tail(run: RunStore, console: Console, lines: int) -> None:
    tail = log_tail(run, lines)
    if tail:
        console.rule("worker.log", style="dim", align="left")
    for line in tail:
        console.print(Text.from_ansi(line), soft_wrap=True)


def _gist(event: Event, before: GroupGeneration | None) -> Text:
    match event:
        case StateChanged():
            reason = f"  {event.reason}" if event.reason else ""
            text = Text.assemble(state_text(event.state), (reason, "dim"))
        case Evaluated():
            text = Text(f"{event.split}  ") + evaluation_line(event, Course())
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
