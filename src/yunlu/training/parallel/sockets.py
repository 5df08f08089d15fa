"""Sockets of process groups: enumeration, shutdown, detection of connection errors, closed listeners.

Gloo accepts whoever connects. While a group forms, its workers must be able to connect, and so is everybody
on this machine. Once it is formed, nobody needs to: the kernel then drops new connections, and those of other
users are shut. If one of them took the place of a worker, the group fails before it has computed anything,
and forms again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch.distributed as dist

from yunlu.core.errors import YunluError
from yunlu.core.secure_link import is_loopback
from yunlu.hardware.accelerators import COLLECTIVE_LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Collection


_MESSAGES = (
    "gloo",
    "c10d",
    *COLLECTIVE_LIBRARIES,
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


_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
"""Missing in Python before 3.12."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: return 0, the number of bytes of a packet to keep."""


def close_listeners(before: Collection[Socket], *, keep: Collection[int] = ()) -> None:
    """Close what gloo has opened since: to new connections, and to those of other users.

    Listeners stay open files, since gloo ends the process if one is not there any more.

    Args:
        before: Sockets that were open before the groups formed.
        keep: Descriptors of listeners that are not gloo's.
    """
    if not sys.platform.startswith("linux"):
        return
    since = [item for item in open_sockets() - set(before) if item.descriptor not in keep]
    ports = {port for item in since if (port := _close_listener(item.descriptor)) is not None}
    for item in since:
        if _is_foreign(item.descriptor, ports):
            shut(item)


def is_own_connection(sock: socket.socket) -> bool:
    """Whether a local connection is of our own user: the kernel knows who holds its other end."""
    return _owner_of_other_end(sock) == os.getuid()


def _close_listener(descriptor: int) -> int | None:
    """Let the kernel drop new connections; returns the port, or None if this is no TCP listener."""
    with suppress(OSError):  # closed meanwhile
        sock = socket.socket(fileno=os.dup(descriptor))
        with sock:
            is_tcp = sock.family in {socket.AF_INET, socket.AF_INET6}
            if not is_tcp or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            instruction = ctypes.create_string_buffer(_DROP_ALL)
            program = struct.pack("HP", 1, ctypes.addressof(instruction))
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            return sock.getsockname()[1]
    return None


def _is_foreign(descriptor: int, ports: Collection[int]) -> bool:
    """Whether this is a connection to one of these ports by another user of this machine."""
    with suppress(OSError):  # closed meanwhile, or never connected
        sock = socket.socket(fileno=os.dup(descriptor))
        with sock:
            if sock.family != socket.AF_INET or sock.getsockname()[1] not in ports:
                return False
            if not is_loopback(sock.getpeername()[0]):
                return False
            return _owner_of_other_end(sock) not in {os.getuid(), None}
    return False


def _owner_of_other_end(sock: socket.socket) -> int | None:
    """User who holds the other end of a local connection; None if nobody does any more.

    Both addresses count: a port is used again for connections to other places. An end without an inode is
    closed, or closing, and the kernel names root for all of those.
    """
    ends = _kernel_name(sock.getpeername()), _kernel_name(sock.getsockname())
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == ends and fields[9] != "0":
            return int(fields[7])
    return None


def _kernel_name(address: tuple[str, int]) -> str:
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
