"""``yunlu train``: from a job file to a trained, evaluated, reported model."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from yunlu.client.api import source_of, validate
from yunlu.core.errors import StoreError, YunluError
from yunlu.jobs import launch, service
from yunlu.jobs.follow import end_of, follow
from yunlu.jobs.launch import find_launch
from yunlu.jobs.run import error_of, log_tail
from yunlu.render.terminal.page import ACCENT, make_console, to_json
from yunlu.render.terminal.run_display import Display, JsonDisplay, LiveDisplay, PlainDisplay
from yunlu.runs.run_store import WORKER_LOG
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from rich.console import Console

    from yunlu.core.launch import LaunchInfo
    from yunlu.jobs.follow import LogCursor
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

STOPPED_CODE = 130
"""What a shell gives a program that Ctrl-C ended."""


def train(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    detach: bool = False,
    json: bool = False,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    profile: bool = False,
) -> int:
    """Train a job: plan it, show its progress, report on it.

    Ctrl-C saves a checkpoint and stops; `yunlu resume` goes on from there.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        devices: Workers that share the training, one for each device.
        detach: Return at once; the run goes on. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name the run.
        profile: Trace a few steps: a table of where their time goes, and a file for Perfetto.
    """
    said = [f"name={name}"] if name else []
    said += ["train.profile=true"] if profile else []
    said += [f"devices={devices}"] if devices is not None else []
    asked = validate(job, overrides=(*overrides, *said))
    place = find_launch(asked, waits=not detach)
    if place is not None:
        return watch_launched(asked, place, source=source_of(job), json=json)
    run = service.submit(asked, source=source_of(job))
    if not json:
        print_title(make_console(), run, asked)
    service.start(run)
    if detach:
        return leave(run, json=json)
    return watch(run, json=json)


def watch_launched(
    job: Job | RunStore, place: LaunchInfo, *, source: Path | None = None, json: bool
) -> int:
    """Train a job, or go on with a run, together with those that a launcher started beside us."""
    if place.rank:  # rank 0 shows the run
        return launch.join()[1]
    from yunlu.spec.job import Job  # noqa: PLC0415 (slow to import)

    if not isinstance(job, Job):
        since, run = end_of(job), launch.go_on(job)
    else:
        run = launch.begin(job, place, source=source)
        since = None
        if not json:
            print_title(make_console(), run, job)
    code = watch(run, json=json, since=since)
    # Whoever asked for a stop does not want the launcher to start it again.
    return 0 if code == STOPPED_CODE else code


def watch(run: RunStore, *, json: bool, since: LogCursor | None = None) -> int:
    """Show the run until it rests, then its result; the exit code."""
    console = make_console()
    display = _open_display(run, console, json=json)
    try:
        _follow(run, display, since)
    finally:
        display.close()
    return _conclude(run, None if json else console)


def leave(run: RunStore, *, json: bool) -> int:
    """Say where a run is that goes on without us."""
    if json:
        print(to_json({"run": run.id, "dir": run.address}))
    else:
        make_console().print(f" started     yunlu logs -f {run.id}", highlight=False)
    return 0


def _open_display(run: RunStore, console: Console, *, json: bool) -> Display:
    if json:
        return JsonDisplay(run)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def _follow(run: RunStore, display: Display, since: LogCursor | None) -> None:
    answered = 0
    with _counted_signals() as presses:
        for update in follow(run, since=since):
            for item in update.items:
                display.show(item)
            if len(presses) > answered:
                answered += 1
                now = answered > 1
                display.note("killed" if now else "stopping: saving a checkpoint (again to kill)")
                service.request_stop(run, now=now)


@contextmanager
def _counted_signals() -> Generator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them: the run is to be stopped first."""
    presses: list[int] = []

    def count(number: int, _frame: Any) -> None:
        presses.append(number)

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield presses
    finally:
        for number, reaction in before.items():
            signal.signal(number, reaction)


def _conclude(run: RunStore, console: Console | None) -> int:
    record = service.read_record(run)
    _write_report(run, console)
    if record.state in {RunState.FAILED, RunState.LOST}:
        raise _why(run, record.state)
    if record.state is RunState.FINISHED:
        return 0
    if console is not None:
        where = f" at step {record.step}" if record.step else ""
        console.print(f" stopped{where}; go on with: yunlu resume {run.id}", style="yellow")
    return STOPPED_CODE


def _write_report(run: RunStore, console: Console | None) -> None:
    from yunlu.render.run_report.write import write_report  # noqa: PLC0415 (needed only at the end)
    from yunlu.render.terminal.report_summary import print_summary  # noqa: PLC0415

    try:
        report = write_report(run)
    except (OSError, YunluError) as error:  # the model is what was asked for; it is there
        if console is not None:
            console.print(f" warning     the report could not be written: {error}", style="yellow")
        return
    if console is not None and report.state == RunState.FINISHED:
        print_summary(report, console)


def _why(run: RunStore, state: RunState) -> YunluError:
    error = error_of(event for event, _ in run.read_events())
    if error is None:
        return StoreError(f"{run.id} is {state}", hint=f"see {run.location(WORKER_LOG)}")
    if state is RunState.LOST:
        words = "".join(f"\n  {line}" for line in log_tail(run, 8))
        said = f"; its last words:{words}" if words else ""
        return type(error)(f"{error.message}{said}", hint=f"yunlu resume {run.id} goes on")
    return error


def print_title(console: Console, run: RunStore, job: Job) -> None:
    """Name the run."""
    console.print(f"\n [bold {ACCENT}]云炉[/]  [bold]{run.id}[/]  [dim]{job.task}[/]\n")
