"""``yunlu train``, ``finetune`` and ``resume``: start or continue a run, and watch it until it ends."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import StoreError, YunluError
from yunlu.render.terminal.page import make_console, print_json, print_lines, title_text

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from yunlu.client.protocol import Client
    from yunlu.jobs.run_view import StartedRun
    from yunlu.render.terminal.run_display import Display


def train(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    plan: Annotated[str | None, Parameter(show_default=False)] = None,
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    detach: bool = False,
    json: bool = False,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    profile: bool = False,
) -> int:
    """Train a job: plan it, show its progress, report on it.

    Ctrl-C saves a checkpoint and stops; `yunlu resume` continues from there.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        plan: Train so as `yunlu plan JOB --json > FILE` planned it: FILE, or FILE:2 for its second option.
        devices: Number of workers, one for each device.
        detach: Return at once; the run continues. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name of the run.
        profile: Trace a few steps: a table of where their time goes, and a file for Perfetto.
    """
    from yunlu.spec.load import load_job, source_of  # noqa: PLC0415 (slow to import)

    options = [f"name={name}"] if name else []
    options += ["train.profile=true"] if profile else []
    options += [f"devices={devices}"] if devices is not None else []
    loaded = load_job(job, overrides=(*overrides, *options))
    client = default_client()
    chosen = None if plan is None else client.load_plan(plan)
    started = client.train(loaded, source=source_of(job), plan=chosen, detach=detach)
    title = run_title(started.id, started.task)
    return watch_started(client, started, title=title, json=json, detach=detach)


def finetune(
    start: str,
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    detach: bool = False,
    json: bool = False,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Fine-tune a trained model on other data: every weight, or a LoRA adapter.

    Model, tokenizer and labels come from the trained model, so the job needs only task and data.
    --set model.adapter=lora trains an adapter; the exported model has it merged.

    Args:
        start: A run (its id, a unique prefix of it, or: last), a model directory, or hf:NAME.
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set model.adapter=lora; may be repeated.
        devices: Number of workers, one for each device.
        detach: Return at once; the run continues. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name of the run.
    """
    options = [f"name={name}"] if name else []
    options += [f"devices={devices}"] if devices is not None else []
    client = default_client()
    started = client.finetune(start, job, overrides=(*overrides, *options), detach=detach)
    title = title_text(started.id, f"{started.task}, from").append(f" {start}\n")
    return watch_started(client, started, title=title, json=json, detach=detach)


def resume(
    run: str = "last",
    /,
    *,
    detach: bool = False,
    json: bool = False,
) -> int:
    """Continue a stopped, failed or lost run from its newest good checkpoint.

    Args:
        run: Its id, a unique prefix of it, or: last.
        detach: Return at once; the run continues.
        json: Write every event and metric record as one JSON line, and nothing else.
    """
    client = default_client()
    started = client.resume(run, detach=detach)
    if not started.is_queued:
        title = (
            "" if started.is_launched else Text.assemble("\n resuming    ", (started.id, "bold"))
        )
        return watch_started(client, started, title=title, json=json, detach=detach)
    if json:
        print_json({"run": started.id, "dir": started.dir, "queued": True})
    else:
        then = "; yunlu pool shows when it continues"
        text = Text.assemble("\n queued again  ", (started.id, "bold"), then)
        print_lines(make_console(), text)
    return 0


STOPPED_CODE = 130
"""Exit code that a shell gives a program that Ctrl-C ended."""


def watch_started(
    client: Client, started: StartedRun, *, title: str | Text, json: bool, detach: bool = False
) -> int:
    """Show a run that was started or resumed; the exit code of the command."""
    if started.exit_code is not None:  # a launched rank above 0: rank 0 shows the run
        return started.exit_code
    if detach:
        return _leave(started, title=title, json=json)
    code = _watch(client, started, title=title, json=json)
    # A launcher must not start again what was stopped on request.
    return 0 if started.is_launched and code == STOPPED_CODE else code


def run_title(run: str, about: str) -> Text:
    """First line of a run."""
    return title_text(run, about).append("\n")


@contextmanager
def counted_signals(on_signal: Any = None) -> Generator[list[int]]:
    """Collect SIGINT and SIGTERM instead of ending: the run is to be stopped first."""
    presses: list[int] = []

    def count(number: int, _frame: Any) -> None:
        presses.append(number)
        if on_signal is not None:
            on_signal(len(presses))

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(started: StartedRun, *, title: str | Text, json: bool) -> int:
    _print_title(title, json=json)
    if json:
        print_json({"run": started.id, "dir": started.dir})
    else:
        print_lines(make_console(), Text(f" started     yunlu logs -f {started.id}"))
    return 0


def _print_title(title: str | Text, *, json: bool) -> None:
    if title and not json:
        print_lines(make_console(), title if isinstance(title, Text) else Text(title))


def _watch(client: Client, started: StartedRun, *, title: str | Text, json: bool) -> int:
    with counted_signals() as presses:  # from here on they stop the run, not this command
        _print_title(title, json=json)
        console = make_console()
        display = _open_display(started.id, console, json=json)
        try:
            _follow(client, started, display, presses)
        finally:
            display.close()
    return _conclude(client, started.id, None if json else console)


def _open_display(run: str, console: Console, *, json: bool) -> Display:
    from yunlu.render.terminal import run_display  # noqa: PLC0415 (slow to import)

    if json:
        return run_display.JsonDisplay(run)
    live = console.is_terminal
    return run_display.LiveDisplay(console) if live else run_display.PlainDisplay(console)


def _follow(client: Client, started: StartedRun, display: Display, presses: list[int]) -> None:
    answered = 0
    for update in client.follow(started.id, since=started.cursor):
        for item in update.items:
            display.show(item)
        if len(presses) > answered:
            answered += 1
            now = answered > 1
            display.note("killed" if now else "stopping: saving a checkpoint (again to kill)")
            client.stop(started.id, now=now, wait=False)


def _conclude(client: Client, run: str, console: Console | None) -> int:
    ended = client.run(run)
    _write_report(client, run, console)
    if ended.state.is_failure:
        failure = client.failure(run)
        if failure is None:
            raise StoreError(f"{run} is {ended.state}", hint=f"see yunlu logs {run}")
        raise failure.to_error()
    if not ended.state.can_resume:
        return 0
    if console is not None:
        where = f" at step {ended.step}" if ended.step else ""
        text = f" stopped{where}; resume with: yunlu resume {run}"
        print_lines(console, Text(text, style="yellow"))
    return STOPPED_CODE


def _write_report(client: Client, run: str, console: Console | None) -> None:
    from yunlu.render.terminal.report_summary import print_summary  # noqa: PLC0415 (slow)

    try:
        report = client.report(run)
    except (OSError, YunluError) as error:  # the model is what was asked for; it is there
        if console is not None:
            text = f" warning     the report could not be written: {error}"
            print_lines(console, Text(text, style="yellow"))
        return
    if console is not None and not report.state.can_resume:
        print_summary(report, console)
