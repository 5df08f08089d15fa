"""``yunlu study``: what searches have found so far, and what to do with it."""

import time
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from yunlu.core.errors import StoreError
from yunlu.render.study_report.dump import dump_best, dump_study
from yunlu.render.terminal.page import make_console, to_json
from yunlu.render.terminal.study_tables import (
    answer_block,
    failure_lines,
    print_block,
    studies_table,
    study_page,
)
from yunlu.tuning.study_dir import StudyError, find_study, list_studies, studies_home
from yunlu.tuning.values import TrialState
from yunlu.tuning.view import StudyView, look

_FEW = 20
_POLL_S = 0.1
_PATIENCE_S = 150.0
"""Longer than trials may take to save."""

study = App(
    name="study",
    help="Look at studies: list, show, report, best; stop one that runs.",
    group_commands=Group("Commands"),
)


@study.default
@study.command(name="list")
def list_all(*, json: bool = False) -> int:
    """List studies, newest first.

    Args:
        json: Print one JSON line for each study.
    """
    views, damages = _look_at_all()
    if json:
        for view in views:
            told = dump_study(view)
            print(to_json({**told, "trials": len(view.trials)}))
        return 0
    console = make_console()
    if views:
        print_block(console, studies_table(views, now=time.time()))
    elif not damages:
        console.print(f"no studies in {studies_home()}; start one: yunlu tune JOB")
    for damage in damages:
        console.print(f" {damage.message}", style="yellow", soft_wrap=True)
    return 0


def _look_at_all() -> tuple[list[StudyView], list[StudyError]]:
    """Those that can be read, and what is wrong with the others."""
    views, damages = list[StudyView](), list[StudyError]()
    for name in list_studies():
        try:
            views.append(look(name))
        except StudyError as error:
            damages.append(error)
    return views, damages


@study.command
def show(name: str = "last", /, *, all: bool = False, json: bool = False) -> int:
    """Show a study: its trials, the best first, and how far it is.

    Args:
        name: Its name, or: last.
        all: Every trial, not only the best.
        json: Print everything as one JSON document.
    """
    view = look(name)
    if json:
        print(to_json(dump_study(view)))
        return 0
    console = make_console()
    rows = None if all else _FEW
    print_block(console, study_page(view, now=time.time(), width=console.width, rows=rows))
    for line in failure_lines(view):
        print_block(console, line)
    if view.state == "stopped":
        way = f"yunlu tune --resume {view.name}"
        if view.is_told:
            way = f"yunlu.Study(name={view.name!r}), in the program that tells of its trials"
        console.print(f" go on with: {way}", style="yellow")
    return 0


@study.command
def best(name: str = "last", /, *, json: bool = False) -> int:
    """Print the best setting, the command that trains with it, and where its model lies.

    Args:
        name: The study's name, or: last.
        json: Print it as one JSON object.
    """
    view = look(name)
    if view.best is None:
        raise StudyError(
            f"no trial of {view.name} has a value yet", hint=f"yunlu study show {view.name}"
        )
    if json:
        print(to_json(dump_best(view)))
        return 0
    console = make_console()
    print_block(console, answer_block(view, now=time.time()))
    return 0


@study.command
def report(
    name: str = "last",
    /,
    *,
    html: Path | None = None,
    open_: Annotated[bool, Parameter(name="--open")] = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Write the report of a study: one HTML page with all its pictures.

    Args:
        name: Its name, or: last.
        html: Write the page here instead of into the study's directory.
        open_: Open the page in the browser.
        json_: Print where it lies as JSON.
    """
    view = look(name)
    page = _write(view, None if html is None else html.expanduser())
    if json_:
        print(to_json({"study": view.name, "report": str(page)}))
    else:
        make_console().print(f" report      {page}", soft_wrap=True)
    if open_:
        webbrowser.open(page.absolute().as_uri())
    return 0


@study.command
def stop(name: str = "last", /) -> int:
    """Ask a running study to rest: its trials save and hold, and it can go on later.

    Args:
        name: Its name, or: last.
    """
    directory = find_study(name)
    console = make_console()
    if not directory.is_conducted():
        console.print(f" {directory.name} rests already: nobody conducts it")
        busy = [each.run for each in look(directory.name).trials if _is_busy(each.state)]
        for run in busy:
            console.print(f" its trial still runs: yunlu stop {run}", style="yellow")
        return 0
    directory.request_stop()
    deadline = time.monotonic() + _PATIENCE_S
    with console.status(f"stopping {directory.name}: its trials save and hold"):
        while directory.is_conducted():
            if time.monotonic() > deadline:
                raise StudyError(
                    f"{directory.name} was asked to rest, but has not done so yet",
                    hint=f"yunlu study show {directory.name} tells what it waits for",
                )
            time.sleep(_POLL_S)
    again = f"yunlu tune --resume {directory.name} goes on"
    console.print(f" [yellow]■ stopped[/]  {directory.name}; {again}")
    return 0


def _write(view: StudyView, path: Path | None) -> Path:
    # Arrays are slow to import.
    from yunlu.render.study_report.page import write_report, write_run_reports  # noqa: PLC0415

    if path is not None and not path.absolute().parent.is_dir():
        raise StoreError(f"--html: there is no directory {path.absolute().parent}.")
    write_run_reports(view)
    return write_report(view, path)


def _is_busy(state: TrialState) -> bool:
    return state is TrialState.RUNNING
