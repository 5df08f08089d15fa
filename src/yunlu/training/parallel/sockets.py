"""The sockets of process groups: which there are, how to end them, and the errors of lost ones."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from yunlu.core.errors import YunluError

_WORDS = (
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
    """One socket: its descriptor may be another's a moment later, its inode is not."""

    descriptor: int
    inode: int


def open_sockets() -> set[Socket]:
    """All sockets of this process."""
    found: set[Socket] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed while we looked
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(Socket(int(entry.name), status.st_ino))
    return found


def shut(wanted: Socket) -> None:
    """End a connection: whoever waits on it gets an error at once. Not of one that listens."""
    with suppress(OSError):  # closed by its owner
        duplicate = os.dup(wanted.descriptor)
        try:
            if os.fstat(duplicate).st_ino == wanted.inode:
                _shut_down(duplicate)
        finally:
            os.close(duplicate)


def _shut_down(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def tells_of_loss(error: BaseException) -> bool:
    """Whether an error only says that others are lost, and is no fault of this worker's own."""
    # An OSError is of a disk, or of somebody's own connection: torch's errors are none.
    if isinstance(error, YunluError) or not isinstance(error, RuntimeError):
        return False
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _WORDS)
