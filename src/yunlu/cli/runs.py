"""``yunlu ps``, ``show``, ``logs``, ``report``, ``stop``, ``resize``, ``join``: look at runs and change them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import StoreError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import (
    indented,
    make_console,
    print_json,
    print_json_text,
    print_lines,
    print_note,
    print_value,
    state_text,
)

if TYPE_CHECKING:
    from yunlu.client.protocol import Client
    from yunlu.jobs.report_model import ReportPage
    from yunlu.render.terminal.page import TerminalConsole

_FEW = 20
_LOG_HANG = 10
"""Below the time, where an event goes on in a second line."""


def ps(
    *,
    all: bool = False,
    json: bool = False,
) -> int:
    """List runs, newest first.

    Args:
        all: Also the older ones.
        json: Print one JSON line for each run, also the older ones.
    """
    listed = default_client().ps(most=None if all or json else _FEW)
    if json:
        for run in listed.runs:
            print_value(run)
        for name, problem in listed.problems.items():
            print_note(f"{name} cannot be read: {problem}")
        return 0
    console = make_console()
    if listed.runs:
        from yunlu.render.terminal.run_page import run_table  # noqa: PLC0415 (slow to import)

        console.print(indented(run_table(listed.runs, now=time.time())))
    elif not listed.problems:
        print_lines(console, Text(f"no runs in {listed.home}; start one: yunlu train JOB"))
    if listed.older:
        print_lines(console, Text(f" {listed.older} older: yunlu ps --all", style="dim"))
    for run in listed.runs:
        if run.caution:
            print_lines(console, Text(f" {run.id}: {run.caution}", style="yellow"))
    for name, problem in listed.problems.items():
        print_lines(console, Text(f" {name} cannot be read: {problem}", style="red"))
    return 0


def show(run: str = "last", /, *, json: bool = False) -> int:
    """Show one run: job, state, plan, evaluations, checkpoints, warnings, paths.

    Args:
        run: Its id, a unique prefix of it, or: last.
        json: Print the same as JSON.
    """
    details = default_client().show(run)
    if json:
        print_value(details)
        return 0
    from yunlu.render.terminal.run_page import path_lines, run_page  # noqa: PLC0415 (slow)

    console = make_console()
    console.print(run_page(details))
    for line in path_lines(details.paths):
        print_lines(console, line, hang=13)
    return 0


def logs(
    run: str = "last",
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: int = 20,
    rank: Annotated[int | None, Parameter(show_default=False)] = None,
    worker: Annotated[str | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Print the events of a run, then the last lines of its worker's output.

    Args:
        run: Its id, a unique prefix of it, or: last.
        follow: Go on printing until the run is no longer active.
        lines: Number of lines of worker.log, or of the log of one worker.
        rank: Of several workers, only the output of the one that has this rank now.
        worker: The same by the worker's number, which stays when ranks change.
        json: Print JSON lines: one for each event, as of train --json, and for each line of output.
    """
    client, console = default_client(), make_console()
    run_id = client.run(run).id
    if rank is not None or worker is not None:
        if json:
            _print_json_worker_log(client, run_id, rank, worker, lines=lines, follow=follow)
        else:
            _print_worker_log(client, run_id, console, rank, worker, lines=lines, follow=follow)
        return 0
    if json:
        _print_json_log(client, run_id, lines=lines, follow=follow)
        return 0
    _print_events(client, run_id, console, follow=follow)
    tail = client.logs(run_id, lines=lines).lines
    if tail:
        console.rule("worker.log", style="dim", align="left")
    _print_text(console, tail)
    return 0


def _print_events(client: Client, run: str, console: TerminalConsole, *, follow: bool) -> None:
    from yunlu.render.terminal.run_display import LogLines  # noqa: PLC0415 (slow to import)

    shown, past = LogLines(), client.events(run)
    for line in shown.take(past.items):
        print_lines(console, line, hang=_LOG_HANG)
    for update in client.follow(run, since=past.cursor) if follow else ():
        for line in shown.take(update.items):
            print_lines(console, line, hang=_LOG_HANG)


def _print_worker_log(
    client: Client,
    run: str,
    console: TerminalConsole,
    rank: int | None,
    worker: str | None,
    *,
    lines: int,
    follow: bool,
) -> None:
    log = client.logs(run, rank=rank, worker=worker, lines=lines)
    _print_text(console, log.lines)
    for _ in client.follow(run) if follow else ():
        log = client.logs(run, rank=rank, worker=worker, since=log.end)
        _print_text(console, log.lines)


def _print_json_log(client: Client, run: str, *, lines: int, follow: bool) -> None:
    from yunlu.render.terminal.run_display import JsonDisplay  # noqa: PLC0415 (slow to import)

    shown, past = JsonDisplay(run), client.events(run)
    for item in past.items:
        shown.show(item)
    for update in client.follow(run, since=past.cursor) if follow else ():
        for item in update.items:
            shown.show(item)
    for line in client.logs(run, lines=lines).lines:
        shown.show_output(line)


def _print_json_worker_log(
    client: Client, run: str, rank: int | None, worker: str | None, *, lines: int, follow: bool
) -> None:
    from yunlu.render.terminal.run_display import JsonDisplay  # noqa: PLC0415 (slow to import)

    shown, log = JsonDisplay(run), client.logs(run, rank=rank, worker=worker, lines=lines)
    for line in log.lines:
        shown.show_output(line, rank=rank, worker=worker)
    for _ in client.follow(run) if follow else ():
        log = client.logs(run, rank=rank, worker=worker, since=log.end)
        for line in log.lines:
            shown.show_output(line, rank=rank, worker=worker)


def _print_text(console: TerminalConsole, lines: tuple[str, ...]) -> None:
    for line in lines:
        console.print_verbatim(Text.from_ansi(line))


def report(
    run: str = "last",
    /,
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    html: Annotated[Path | None, Parameter(show_default=False)] = None,
    open_: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Write the report of a run: terminal, JSON, one HTML page.

    Args:
        run: Its id, a unique prefix of it, or: last; or its directory.
        json_: Print the report as JSON instead of the summary.
        html: Write the page here too, to send it to someone.
        open_: Open the page in the browser.
    """
    client = default_client()
    written = client.report(run)
    page = client.report_page(run)
    if html is not None:
        _write_page(page, html.expanduser())
    if json_:
        print_json_text(written.model_dump_json())
    else:
        from yunlu.render.terminal.report_summary import print_summary  # noqa: PLC0415 (slow)

        print_summary(written, make_console())
    if open_:
        import webbrowser  # noqa: PLC0415 (slow to import)

        webbrowser.open(_find_file(page, html).absolute().as_uri())


def _find_file(page: ReportPage, html: Path | None) -> Path:
    if html is None and not page.location:
        raise StoreError(
            "The run belongs to another user, so its page was not written there.",
            hint="Say where to write it: --html FILE",
        )
    return html.expanduser() if html is not None else Path(page.location)


def _write_page(page: ReportPage, target: Path) -> None:
    try:
        write_atomically(target, page.html, private=False)
    except OSError as error:
        raise StoreError(
            f"The page cannot be written to {target}: {error.strerror or error}.",
            hint=f"It is in {page.location}." if page.location else None,
        ) from error


def stop(run: str = "last", /, *, now: bool = False, json: bool = False) -> int:
    """Ask a run to save a checkpoint and stop, and wait until it is no longer active.

    Args:
        run: Its id, a unique prefix of it, or: last.
        now: End it at once, without saving.
        json: Print one JSON line.
    """
    client, console = default_client(), make_console()
    if json:
        stopped = client.stop(run, now=now)
        print_json({"run": stopped.id, "state": stopped.state, "step": stopped.step})
        return 0
    before = client.run(run)
    if not before.state.is_active:
        client.stop(before.id)  # the pool would start it again
        text = f"  {before.id} has ended: nothing to stop"
        print_lines(console, Text.assemble(state_text(before.state), text))
        return 0
    doing = "ending it" if now else "saving a checkpoint"
    with console.status(Text(f"stopping {before.id}: {doing}")):
        stopped = client.stop(before.id, now=now)
    again = f"; yunlu resume {stopped.id} continues it" if stopped.state.can_resume else ""
    step = f" at step {stopped.step}" if stopped.step else ""
    print_lines(console, Text.assemble(state_text(stopped.state), f"  {stopped.id}{step}{again}"))
    return 0


def resize(run: str = "last", /, *, devices: int, json: bool = False) -> int:
    """Continue with more or fewer workers from the next step on; no step and no sample is lost.

    Args:
        run: Its id, a unique prefix of it, or: last.
        devices: Number of workers.
        json: Print one JSON line.
    """
    client = default_client()
    run_id = client.run(run).id
    resized = client.resize(run_id, devices=devices)
    if json:
        print_value(resized, run=run_id, devices=devices)
        return 0
    line = Text.assemble((run_id, "bold"), f": {resized.text}, as ", (resized.layout, "bold"))
    print_lines(make_console(), line)
    return 0


def join(
    address: str,
    /,
    *,
    devices: int = 1,
    token_file: Annotated[Path | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Take part in a run until it ends, or until this process is asked to leave (SIGTERM, Ctrl-C).

    The run's directory must be on a file system that both machines share.

    Args:
        address: HOST:PORT of the run's supervisor; its worker_group.json has it.
        devices: Number of workers to lend.
        token_file: File with the run's token, which its worker_group.json has: arguments are seen by others.
        name: Name of the node in the run. Default: host and process id.
        json: Print JSON lines: one when it has joined, one when it has left.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(f"{address!r} is not an address", hint="write HOST:PORT")
    if devices < 1:
        raise StoreError(f"{devices} devices are none to lend", hint="give one or more")
    token = "" if token_file is None else _read_token(token_file)
    if not token:
        raise StoreError("the run's token is missing", hint="give --token-file")
    client = default_client()
    target = client.find_group(host, int(port), token, name=name)
    if json:
        print_value(target, event="joined", devices=devices)
        sys.stdout.flush()  # the next line may be hours away
        code = client.join(target, devices=devices)
        print_value(target, event="left", exit_code=code)
        return code
    line = Text.assemble((target.node, "bold"), f" lends {devices} to {target.run}")
    print_lines(make_console(), line)
    return client.join(target, devices=devices)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"the token cannot be read from {path}: {error}", hint="check --token-file"
        ) from error
