"""``yunlu report RUN``."""

import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from yunlu.core.errors import StoreError
from yunlu.core.files import write_atomically
from yunlu.jobs.lifecycle import find
from yunlu.render.run_report.write import write_report
from yunlu.render.terminal.report_summary import print_summary
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log, RunStore


def report(
    run: str = "last",
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    html: Path | None = None,
    open_: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Write the report of a run: terminal, JSON, one HTML page.

    Args:
        run: The run: its id, the beginning of it, "last", or its directory.
        json_: Print the report as JSON instead of the summary.
        html: Write the page here too, to send it to someone.
        open_: Open the page in the browser.
    """
    directory = _directory(run) or find(run)
    written = write_report(directory)
    if html is not None:
        _copy_page(directory, html.expanduser())
    if json_:
        print((directory.read(Document.REPORT) or b"").decode(), end="")
    else:
        print_summary(written, Console(highlight=False))
    if open_:
        webbrowser.open(Path(directory.location(Document.REPORT_PAGE)).absolute().as_uri())


def _directory(run: str) -> RunStore | None:
    """A path to a run's directory, wherever it lies; a bare word is a run of the store."""
    path = Path(run).expanduser()
    run = open_run(path.resolve())
    return run if run.has(Document.JOB) or run.has(Log.EVENTS) else None


def _copy_page(run: RunStore, target: Path) -> None:
    try:
        write_atomically(target, run.read(Document.REPORT_PAGE) or b"")
    except OSError as error:
        raise StoreError(
            f"The page cannot be written to {target}: {error.strerror or error}.",
            hint=f"It lies in {run.location(Document.REPORT_PAGE)}.",
        ) from error
