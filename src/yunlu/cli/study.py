"""``yunlu study``: results of searches, and what to do with them."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import error_of_code
from yunlu.render.terminal.page import make_console, print_json, print_lines

_FEW = 20

study = App(
    name="study",
    help="Show studies: list, show, report, best; stop one that runs.",
    group_commands=Group("Commands"),
)


@study.default
@study.command(name="list")
def list_all(*, json: bool = False) -> int:
    """List studies, newest first.

    Args:
        json: Print one JSON line for each study.
    """
    listed = default_client().studies()
    if json:
        from yunlu.render.study_report import dump_study  # noqa: PLC0415 (slow to import)

        for view in listed.studies:
            print_json({**dump_study(view), "trials": len(view.trials)})
        return 0
    from yunlu.render.terminal.study_tables import print_block, studies_table  # noqa: PLC0415

    console = make_console()
    if listed.studies:
        print_block(console, studies_table(listed.studies, now=time.time()))
    elif not listed.damaged:
        print_lines(console, Text(f"no studies in {listed.home}; start one: yunlu tune JOB"))
    for message in listed.damaged:
        print_lines(console, Text(f" {message}", style="yellow"))
    return 0


@study.command
def show(name: str = "last", /, *, all: bool = False, json: bool = False) -> int:
    """Show a study: its trials, the best first, and its progress.

    Args:
        name: Its name, or: last.
        all: Every trial, not only the best.
        json: Print everything as one JSON document.
    """
    view = default_client().study(name)
    if json:
        from yunlu.render.study_report import dump_study  # noqa: PLC0415 (slow to import)

        print_json(dump_study(view))
        return 0
    from yunlu.render.terminal import study_tables  # noqa: PLC0415 (slow to import)

    console = make_console()
    rows = None if all else _FEW
    page = study_tables.study_page(view, now=time.time(), width=console.width, rows=rows)
    study_tables.print_block(console, page)
    for line in study_tables.failure_lines(view):
        study_tables.print_block(console, line)
    if view.state == "stopped":
        way = f"yunlu tune --resume {view.name}"
        if view.is_external:
            way = f"yunlu.Study(name={view.name!r}), in the program that tells of its trials"
        print_lines(console, Text(f" resume with: {way}", style="yellow"))
    return 0


@study.command
def best(name: str = "last", /, *, json: bool = False) -> int:
    """Print the best setting, the command that trains with it, and the path of its model.

    Args:
        name: The study's name, or: last.
        json: Print it as one JSON object.
    """
    view = default_client().study(name)
    if view.best is None:
        raise error_of_code(
            "study",
            f"no trial of {view.name} has a value yet",
            hint=f"yunlu study show {view.name}",
        )
    if json:
        from yunlu.render.study_report import dump_best  # noqa: PLC0415 (slow to import)

        print_json(dump_best(view))
        return 0
    from yunlu.render.terminal.study_tables import answer_block, print_block  # noqa: PLC0415

    print_block(make_console(), answer_block(view, now=time.time()))
    return 0


@study.command
def report(
    name: str = "last",
    /,
    *,
    html: Annotated[Path | None, Parameter(show_default=False)] = None,
    open_: Annotated[bool, Parameter(name="--open")] = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Write the report of a study: one HTML page with all its figures.

    Args:
        name: Its name, or: last.
        html: Write the page here instead of into the study's directory.
        open_: Open the page in the browser.
        json_: Print the path of the page as JSON.
    """
    page = None if html is None else html.expanduser()
    result = default_client().report_study(name, page=page)
    if json_:
        print_json({"study": result.view.name, "report": result.report})
    else:
        print_lines(make_console(), Text(f" report      {result.report}"), hang=13)
    if open_ and result.report is not None:
        webbrowser.open(Path(result.report).absolute().as_uri())
    return 0


@study.command
def stop(name: str = "last", /) -> int:
    """Ask a running study to stop: its trials save and hold, and it can continue later.

    Args:
        name: Its name, or: last.
    """
    console = make_console()
    with console.status(Text(f"stopping {name}: its trials save and hold")):
        stopped = default_client().stop_study(name)
    if not stopped.was_running:
        print_lines(console, Text(f" {stopped.name} is not running: no process runs it"))
        for run in stopped.active_runs:
            print_lines(console, Text(f" its trial still runs: yunlu stop {run}", style="yellow"))
        return 0
    again = f"yunlu tune --resume {stopped.name} resumes it"
    print_lines(console, Text.assemble((" ■ stopped", "yellow"), f"  {stopped.name}; {again}"))
    return 0
