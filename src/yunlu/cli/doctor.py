"""``yunlu doctor``: what this machine has, what it lacks, and the command that installs it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import print_value


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
        from yunlu.render.terminal.machine_page import doctor_page  # noqa: PLC0415
        from yunlu.render.terminal.page import TerminalConsole  # noqa: PLC0415 (slow to import)

        console = TerminalConsole()
        with console.status("measuring this machine ..."):
            findings = client.doctor()
        console.print(doctor_page(findings))
    return 0 if findings.can_train else 1
