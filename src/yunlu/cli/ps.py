"""``yunlu ps``: the runs, newest first."""

from __future__ import annotations

import time

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import indented, make_console, print_value

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
        return 0
    console = make_console()
    if not listed.runs:
        console.print(f"no runs in {listed.home}; start one: yunlu train JOB")
        return 0
    from yunlu.render.terminal.run_table import run_table  # noqa: PLC0415 (slow to import)

    console.print(indented(run_table(listed.runs, now=time.time())))
    if listed.older:
        console.print(f" {listed.older} older: yunlu ps --all", style="dim")
    return 0
