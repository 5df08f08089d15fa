"""Listeners of gloo, closed to other users of this machine: gloo itself accepts whoever connects.

While a group forms, its workers must be able to connect, and so is everybody on this machine. Once it is
formed, nobody needs to: the kernel then drops new connections, and those of other users are shut. If one of
them took the place of a worker, the group fails before it has computed anything, and forms again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.addresses import is_loopback
from yunlu.training.parallel.sockets import Socket, open_sockets, shut

if TYPE_CHECKING:
    from collections.abc import Collection

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
    return _owner_of(sock.getpeername()) == os.getuid()


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
            peer = sock.getpeername()
            return is_loopback(peer[0]) and _owner_of(peer) not in {os.getuid(), None}
    return False


def _owner_of(address: tuple[str, int]) -> int | None:
    """User who holds the local end of a connection with this address; None if it is closed."""
    host, port = address
    name = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1] == name:
            return int(fields[7])
    return None
