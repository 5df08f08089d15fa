"""``yunlu ps``: the runs, newest first."""

from __future__ import annotations

import time

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import indented, make_console, print_note, print_value

_FEW = 20


def ps(
    *,
    all: bool = False,
    json: bool = False,
) -> int:
    """List runs, newest first.

    Args:
        all: Also the older ones.
        json: Print one JSON line for each run.
    """
    listed = default_client().ps(most=None if all else _FEW)
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
        console.print(f"no runs in {listed.home}; start one: yunlu train JOB")
    if listed.older:
        console.print(f" {listed.older} older: yunlu ps --all", style="dim")
    for run in listed.runs:
        if run.caution:
            console.print(f" {run.id}: {run.caution}", style="yellow", soft_wrap=True)
    for name, problem in listed.problems.items():
        console.print(f" {name} cannot be read: {problem}", style="red", soft_wrap=True)
    return 0
