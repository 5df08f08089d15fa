"""Sockets that torch opens: the rendezvous store, and how to interrupt a wait on the others."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
from torch._C._distributed_c10d import TCPStore

from yunlu.training.parallel.sockets import Socket, open_sockets, shut

if TYPE_CHECKING:
    from collections.abc import Collection

_CONNECT_S = 5.0
"""torch retries the connection to a store; only this limit ends it."""


def open_store(host: str, port: int, *, is_host: bool) -> TCPStore:
    """Host the store of a generation, or connect to it."""
    span = timedelta(seconds=_CONNECT_S)
    return TCPStore(host, port, None, is_master=is_host, timeout=span, wait_for_workers=False)


def shut_since(before: set[Socket], *, keep: Collection[int]) -> None:
    """Shut every socket opened since: a thread that waits on one gets an error at once."""
    for sock in open_sockets() - before:
        if sock.descriptor not in keep:
            shut(sock)


def interface_of(host: str) -> str | None:
    """Network interface with this address, on which peers reach this process."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None
