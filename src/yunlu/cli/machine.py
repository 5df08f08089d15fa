"""``yunlu doctor`` and ``probe``: what this machine has, what it lacks, and how fast it is."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.client import default_client
from yunlu.core.errors import YunluError
from yunlu.render.terminal.page import make_console, print_value


def doctor(*, json_: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """Show what this machine has and what is missing.

    Exits with 0 if it can train, with 1 if not.

    Args:
        json_: Print the findings as JSON.
    """
    client = default_client()
    if json_:
        findings = client.doctor()
        print_value(findings, indent=2)
    else:
        from yunlu.render.terminal.machine_page import doctor_page  # noqa: PLC0415 (slow to import)

        console = make_console()
        with console.status("measuring this machine ..."):
            findings = client.doctor()
        console.print(doctor_page(findings))
    return 0 if findings.can_train else 1


def probe(
    *,
    show: bool = False,
    afresh: bool = False,
    forget: bool = False,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Measure this machine in under a minute: arithmetic, memory, links, disk, start.

    Figures that are stored for this machine, torch and number of threads are shown, not measured again.

    Args:
        show: Show stored figures and the calibration from runs; measure nothing.
        afresh: Measure again, even where figures are stored.
        forget: Drop the measurements of deleted runs from the calibration.
        all_: With --forget: drop the whole calibration and every probe.
        json_: Print the figures as JSON.
    """
    if all_ and not forget:
        raise YunluError("--all says what to forget", hint="yunlu probe --forget --all")
    client, console = default_client(), make_console()
    if forget:
        dropped = client.forget(all_=all_)
        if json_:
            print_value(dropped)
        else:
            runs = f"run{'s' if dropped.forgotten != 1 else ''}"
            what = f"{runs} and every probe" if all_ else f"deleted {runs}"
            console.print(f" {dropped.forgotten} {what} forgotten")
        return 0
    from yunlu.render.terminal.machine_page import probe_page, probe_progress  # noqa: PLC0415
    from yunlu.render.terminal.page import TerminalConsole  # noqa: PLC0415 (slow to import)

    # Standard output carries the answer alone: it may go to a file or a pipe.
    with probe_progress(TerminalConsole(stderr=True)) as on_progress:
        result = client.probe(show=show, afresh=afresh, on_progress=on_progress)
    if json_:
        print_value(result, indent=2)
    else:
        console.print(probe_page(result))
    return 0
