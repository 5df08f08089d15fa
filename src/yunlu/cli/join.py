"""``yunlu join``: lend this machine's devices to a run that trains elsewhere."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (the command line is read from it)
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.core.errors import StoreError
from yunlu.render.terminal.page import make_console


def join(
    address: str,
    /,
    *,
    devices: int = 1,
    token_file: Annotated[Path | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Take part in a run until it ends, or until this process is asked to leave (SIGTERM, Ctrl-C).

    The run's directory must be on a file system that both machines share.

    Args:
        address: HOST:PORT of the run's supervisor; its worker_group.json has it.
        devices: Number of workers to lend.
        token_file: File with the run's token, which its worker_group.json has. Not an argument: others can
            see those of a command.
        name: Name of the node in the run. Default: host and process id.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StoreError(f"{address!r} is not an address", hint="write HOST:PORT")
    if devices < 1:
        raise StoreError(f"{devices} devices are none to lend", hint="give one or more")
    token = "" if token_file is None else _read_token(token_file)
    if not token:
        raise StoreError("the run's token is missing", hint="give --token-file")
    client = default_client()
    target = client.find_group(host, int(port), token, name=name)
    line = Text.assemble((target.node, "bold"), f" lends {devices} to {target.run}")
    make_console().print(line)
    return client.join(target, devices=devices)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"the token cannot be read from {path}: {error}", hint="check --token-file"
        ) from error
