"""The sockets of process groups: which there are, how to end them, and the errors of lost ones."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from yunlu.core.errors import YunluError

_WORDS = ("gloo", "connection", "socket", "broken pipe", "nccl", "tcpstore", "store")


def open_sockets() -> set[int]:
    """Descriptors of all sockets of this process."""
    found: set[int] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed while we looked
            if str(entry.readlink()).startswith("socket:"):
                found.add(int(entry.name))
    return found


def shut(descriptor: int) -> None:
    """End a connection: whoever waits on it gets an error at once. Not of one that listens."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def tells_of_loss(error: BaseException) -> bool:
    """Whether an error only says that others are lost, and is no fault of this worker's own."""
    if isinstance(error, YunluError) or not isinstance(error, (RuntimeError, OSError)):
        return False
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _WORDS)
