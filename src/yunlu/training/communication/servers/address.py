"""Where a server listens: a file beside what it holds, for its owner's eyes alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from yunlu.core.value import Value
from yunlu.training.communication.servers.store import shard_directory

if TYPE_CHECKING:
    from pathlib import Path


class ServerAddress(Value):
    """How to reach a server."""

    host: str
    port: int
    token: str


def publish_address(directory: Path, address: ServerAddress) -> None:
    """Say where the server of this directory listens from now on."""
    aside = directory / f".address.{os.getpid()}.part"
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(address.model_dump_json())
    aside.replace(directory / "address.json")


def read_address(directory: Path, index: int) -> ServerAddress:
    """Where a server listens; ``OSError`` while it does not."""
    return ServerAddress.model_validate_json(
        (shard_directory(directory, index) / "address.json").read_text()
    )
