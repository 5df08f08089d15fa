"""``yunlu report RUN``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from yunlu.client.connect import default_client
from yunlu.core.errors import StoreError
from yunlu.core.files import write_atomically


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
    path = Path(run).expanduser()
    is_directory = (path / "job.json").is_file() or (path / "events.jsonl").is_file()
    written = default_client().report(str(path.absolute()) if is_directory else run)
    page = Path(written.path) / "report.html"
    if html is not None:
        _copy_page(page, html.expanduser())
    if json_:
        print(written.model_dump_json())
    else:
        from rich.console import Console  # noqa: PLC0415 (slow to import)

        from yunlu.render.terminal.report_summary import print_summary  # noqa: PLC0415

        print_summary(written, Console(highlight=False))
    if open_:
        webbrowser.open(page.absolute().as_uri())


def _copy_page(page: Path, target: Path) -> None:
    try:
        write_atomically(target, page.read_bytes())
    except OSError as error:
        raise StoreError(
            f"The page cannot be written to {target}: {error.strerror or error}.",
            hint=f"It lies in {page}.",
        ) from error
