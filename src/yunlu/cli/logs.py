"""``yunlu logs``: what happened in a run, line by line."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from yunlu.cli.display import Course, step_line
from yunlu.cli.lines import data_line, evaluation_line, notice_line, prediction_line
from yunlu.cli.page import make_console, state_text
from yunlu.core.rundir import EventKind
from yunlu.core.states import RunState
from yunlu.core.units import show_bytes
from yunlu.jobs import service
from yunlu.jobs.follow import Metric, end_of, follow
from yunlu.jobs.run import log_tail
from yunlu.planning.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from yunlu.core.rundir import Event, RunDir

_STEP_EVERY_S = 2.0
_KIND_WIDTH = 13


def logs(
    run: str = "last",
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: int = 20,
) -> int:
    """Print a run's events, then the last lines its worker printed.

    Args:
        run: Its id, a unique beginning of it, or: last.
        follow: Go on printing until the run rests.
        lines: How many lines of worker.log.
    """
    console = make_console()
    run_dir = service.find(run)
    if follow:
        _follow(run_dir, console)
    else:
        for event, _ in run_dir.read_events():
            console.print(log_line(event), soft_wrap=True)
    _print_tail(run_dir, console, lines)
    return 0


def log_line(event: Event) -> Text:
    """One event on one line, for ``yunlu logs``."""
    when = time.strftime("%H:%M:%S", time.localtime(event.at))
    kind = f"{event.kind.value:<{_KIND_WIDTH}}"
    return Text.assemble((f"{when}  ", "dim"), (kind, "dim"), _gist(event))


def _follow(run_dir: RunDir, console: Console) -> None:
    course, shown_at = Course(), 0.0
    past = end_of(run_dir)
    for event, _ in run_dir.read_events():
        course.take(event)
        console.print(log_line(event), soft_wrap=True)
    for batch in follow(run_dir, since=past):
        for happening in batch:
            course.take(happening)
            if not isinstance(happening, Metric):
                console.print(log_line(happening), soft_wrap=True)
            elif happening.at - shown_at > _STEP_EVERY_S:
                shown_at = happening.at
                console.print(Text(f"          {step_line(course)}", style="dim"), soft_wrap=True)


def _print_tail(run_dir: RunDir, console: Console, lines: int) -> None:
    tail = log_tail(run_dir, lines)
    if tail:
        console.rule("worker.log", style="dim", align="left")
    for line in tail:
        console.print(Text.from_ansi(line), soft_wrap=True)


def _gist(event: Event) -> Text:
    data, text = event.data, Text()
    match event.kind:
        case EventKind.STATE:
            reason = f"  {data['reason']}" if data.get("reason") else ""
            text = Text.assemble(state_text(RunState(data["state"])), (reason, "dim"))
        case EventKind.EVALUATION:
            text = Text(f"{data.get('split')}  ") + evaluation_line(data, Course())
        case EventKind.CHECKPOINT:
            size = show_bytes(data.get("bytes") or 0)
            text = Text(f"step {data.get('step')}  {data.get('path')}  {size}")
        case EventKind.PLAN:
            text = prediction_line(Plan.model_validate(data).prediction)
        case EventKind.DATA:
            text = data_line(data)
        case (
            EventKind.SKIP
            | EventKind.ROLLBACK
            | EventKind.OUT_OF_MEMORY
            | EventKind.PRECISION
            | EventKind.TRACE
        ):
            text = notice_line(event)
        case EventKind.WARNING | EventKind.ERROR:
            style = "yellow" if event.kind is EventKind.WARNING else "red"
            text = Text(str(data.get("message")), style=style)
        case _:
            text = Text("  ".join(f"{key} {_brief(value)}" for key, value in data.items()))
    return text


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
