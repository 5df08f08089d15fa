"""``yunlu join``: lend this machine's devices to a run that trains elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path  # noqa: TC003 (the command line is read from it)
from typing import Annotated

from cyclopts import Parameter

from yunlu.cli.page import make_console
from yunlu.core.crew import read_crew
from yunlu.core.errors import StoreError
from yunlu.pool.crew import find_run, run_node


def join(
    address: str,
    /,
    *,
    devices: int = 1,
    token: Annotated[str | None, Parameter(show_default=False)] = None,
    token_file: Annotated[Path | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Take part in a run until it ends, or until this is told to go (SIGTERM, Ctrl-C).

    The run's directory must lie on a file system that both machines share.

    Args:
        address: HOST:PORT of the run's supervisor; its crew.json has it.
        devices: How many workers to lend.
        token: The run's token; its crew.json has it.
        token_file: A file with the token: others can see the arguments of a command.
        name: What the node is called in the run; else host and process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(f"{address!r} is not an address", hint="write HOST:PORT")
    if token_file is not None:
        token = token_file.read_text().strip()
    if not token:
        raise StoreError("the run's token is missing", hint="give --token-file or --token")
    run_dir = find_run(host, int(port), token)
    if read_crew(run_dir) is None:
        raise StoreError(
            f"{run_dir.path}, where the run lies, cannot be read on this machine",
            hint="share it between the machines, at the same path and for the same user",
        )
    called = name or f"{socket.gethostname()}-{os.getpid()}"
    make_console().print(f"[bold]{called}[/] lends {devices} to {run_dir.id}")
    return run_node(run_dir, name=called, devices=devices)
