"""Sockets of process groups: enumeration, shutdown, and detection of connection errors."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch.distributed as dist

from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Collection

_MESSAGES = (
    "gloo",
    "c10d",
    "nccl",
    "tcpstore",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
)


class Socket(NamedTuple):
    """One socket; the descriptor may be reused, the inode identifies it."""

    descriptor: int
    inode: int


def open_sockets() -> set[Socket]:
    """All sockets of this process."""
    sockets: set[Socket] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add(Socket(int(entry.name), status.st_ino))
    return sockets


def shut(target: Socket) -> None:
    """Shut down a connection, so that waiters fail immediately; not listening sockets."""
    with suppress(OSError):  # closed by its owner
        duplicate = os.dup(target.descriptor)
        try:
            if os.fstat(duplicate).st_ino == target.inode:
                _shut_down(duplicate)
        finally:
            os.close(duplicate)


def shut_since(before: set[Socket], *, keep: Collection[int]) -> None:
    """Shut every socket opened since: a thread that waits on one gets an error at once."""
    for sock in open_sockets() - before:
        if sock.descriptor not in keep:
            shut(sock)


def _shut_down(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def interface_of(host: str) -> str | None:
    """Network interface with this address, on which peers reach this process."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


def is_connection_error(error: BaseException) -> bool:
    """Whether an error means lost workers, not a fault of this worker."""
    # An OSError comes from a disk or from user code: torch raises none.
    if isinstance(error, YunluError) or not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return isinstance(error, dist.DistError) or any(phrase in message for phrase in _MESSAGES)
