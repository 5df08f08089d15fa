"""``yunlu selftest``: what to run first on new hardware."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.client import default_client
from yunlu.core.errors import StoreError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import TerminalConsole, make_console, print_value

if TYPE_CHECKING:
    from yunlu.jobs.selftest import SelftestResult


def selftest(
    *,
    quick: bool = False,
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    checks: Annotated[tuple[str, ...], Parameter(name="--check")] = (),
    output: Annotated[Path | None, Parameter(show_default=False)] = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Train small jobs on this machine's devices: ten minutes at most.

    Losses as on the CPU, every layout that fits, low precisions, a killed worker, a resume; memory and speed
    beside the prediction. Exits with 1 if a check failed. All of it goes into one file to send with a report.

    Args:
        quick: About a minute: one worker, a resume, a killed worker.
        devices: Number of devices to use. Default: all accelerators, or two workers on the CPU.
        checks: Make this check, and what it is compared with; may be repeated.
        output: The file. Default: yunlu-selftest-DATE.json in this directory.
        json_: Print the result as JSON.
    """
    from yunlu.render.terminal.selftest_page import (  # noqa: PLC0415 (slow to import)
        selftest_page,
        selftest_progress,
    )

    with selftest_progress(TerminalConsole(stderr=True)) as on_progress:
        result = default_client().selftest(
            quick=quick, devices=devices, checks=checks, on_progress=on_progress
        )
    file = _save(result, output)
    if json_:
        print_value(result, indent=2)
    else:
        make_console().print(selftest_page(result, str(file)))
    return 0 if result.has_passed else 1


def _save(result: SelftestResult, output: Path | None) -> Path:
    stamp = datetime.fromtimestamp(result.at, UTC).strftime("%Y%m%d-%H%M%S")
    file = output or Path(f"yunlu-selftest-{stamp}.json")
    try:
        write_atomically(file, result.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise StoreError(
            f"the result cannot be written to {file}: {error.strerror or error}",
            hint="--output FILE names another place",
        ) from error
    return file
