"""The sockets that torch opens: where a generation meets, and how to end a wait that nothing else ends."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECT_S = 5.0
"""torch tries again and again to reach a store; nothing but this ends it."""


def open_store(host: str, port: int, *, is_host: bool) -> TCPStore:
    """The store at which a generation meets: its own, or the way to it."""
    span = timedelta(seconds=_CONNECT_S)
    return TCPStore(host, port, None, is_master=is_host, timeout=span, wait_for_workers=False)


def open_sockets() -> set[int]:
    """Descriptors of all sockets of this process."""
    found: set[int] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                found.add(int(entry.name))
    return found


def cut_since(before: set[int], *, keep: Sequence[socket.socket]) -> None:
    """End every connection opened since: whoever waits on one gets an error at once."""
    for descriptor in open_sockets() - before - {each.fileno() for each in keep}:
        _shut(descriptor)


def _shut(descriptor: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def interface_of(host: str) -> str | None:
    """The network interface with this address: the one on which others reach us."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None
