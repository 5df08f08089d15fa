"""Address file of a server, in its directory, readable by its owner only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from yunlu.core.value import Value
from yunlu.training.communication.servers.store import shard_directory

if TYPE_CHECKING:
    from pathlib import Path


class ServerAddress(Value):
    """Address and token of a server."""

    host: str
    port: int
    token: str


def publish_address(directory: Path, address: ServerAddress) -> None:
    """Publish the address of this directory's server."""
    temporary = directory / f".address.{os.getpid()}.part"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(address.model_dump_json())
    temporary.replace(directory / "address.json")


def read_address(directory: Path, index: int) -> ServerAddress:
    """Address of a server; ``OSError`` while it is down."""
    return ServerAddress.model_validate_json(
        (shard_directory(directory, index) / "address.json").read_text()
    )
