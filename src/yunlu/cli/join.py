"""``yunlu join``: lend this machine's devices to a run that trains elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path  # noqa: TC003 (the command line is read from it)
from typing import Annotated

from cyclopts import Parameter

from yunlu.core.errors import StoreError
from yunlu.executors.worker_group import find_run, run_node
from yunlu.render.terminal.page import make_console
from yunlu.runs.worker_group import LOCAL, read_crew


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
        address: HOST:PORT of the run's supervisor; its worker_group.json has it.
        devices: How many workers to lend.
        token: The run's token; its worker_group.json has it.
        token_file: A file with the token: others can see the arguments of a command.
        name: What the node is called in the run; else host and process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(f"{address!r} is not an address", hint="write HOST:PORT")
    if devices < 1:
        raise StoreError(f"{devices} devices are none to lend", hint="give one or more")
    if name == LOCAL:
        raise StoreError(
            f"{LOCAL!r} is the name of the run's own node", hint="give another --name, or none"
        )
    if token_file is not None:
        token = _read_token(token_file)
    if not token:
        raise StoreError("the run's token is missing", hint="give --token-file or --token")
    run = find_run(host, int(port), token)
    crew = read_crew(run)
    if crew is None:
        raise StoreError(
            f"{run.address}, where the run lies, cannot be read on this machine",
            hint="share it between the machines, at the same path and for the same user",
        )
    called = name or f"{socket.gethostname()}-{os.getpid()}"
    if called in crew.wanted:
        raise StoreError(
            f"{run.id} has a node called {called!r} already", hint="give another --name"
        )
    make_console().print(f"[bold]{called}[/] lends {devices} to {run.id}")
    return run_node(run, name=called, devices=devices)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"the token cannot be read from {path}: {error}", hint="check --token-file"
        ) from error
