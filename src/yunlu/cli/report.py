"""``yunlu report RUN``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.client.connect import default_client
from yunlu.core.errors import StoreError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import print_json_text

if TYPE_CHECKING:
    from yunlu.jobs.report_model import ReportPage


def report(
    run: str = "last",
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    html: Path | None = None,
    open_: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Write the report of a run: terminal, JSON, one HTML page.

    Args:
        run: The run: its id, a unique prefix of it, "last", or its directory.
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
        from yunlu.render.terminal.page import TerminalConsole  # noqa: PLC0415 (slow to import)
        from yunlu.render.terminal.report_summary import print_summary  # noqa: PLC0415

        print_summary(written, TerminalConsole())
    if open_:
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
