"""``yunlu logs``: events and output of a run, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from yunlu.client.protocol import Client


def logs(
    run: str = "last",
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: int = 20,
    rank: Annotated[int | None, Parameter(show_default=False)] = None,
    worker: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Print the events of a run, then the last lines of its worker's output.

    Args:
        run: Its id, a unique prefix of it, or: last.
        follow: Go on printing until the run is no longer active.
        lines: Number of lines of worker.log, or of the log of one worker.
        rank: Of several workers, only the output of the one that has this rank now.
        worker: The same by the worker's number, which stays when ranks change.
    """
    client, console = default_client(), make_console()
    run_id = client.run(run).id
    if rank is not None or worker is not None:
        _print_worker_log(client, run_id, console, rank, worker, lines=lines, follow=follow)
        return 0
    _print_events(client, run_id, console, follow=follow)
    tail = client.logs(run_id, lines=lines).lines
    if tail:
        console.rule("worker.log", style="dim", align="left")
    _print_text(console, tail)
    return 0


def _print_events(client: Client, run: str, console: Console, *, follow: bool) -> None:
    from yunlu.render.terminal.run_display import LogLines  # noqa: PLC0415 (slow to import)

    shown, past = LogLines(), client.events(run)
    for line in shown.take(past.items):
        console.print(line, soft_wrap=True)
    for update in client.follow(run, since=past.cursor) if follow else ():
        for line in shown.take(update.items):
            console.print(line, soft_wrap=True)


def _print_worker_log(
    client: Client,
    run: str,
    console: Console,
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


def _print_text(console: Console, lines: tuple[str, ...]) -> None:
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
