"""The sockets that torch opens: where a generation meets, and how to end a wait that nothing else ends."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
from torch._C._distributed_c10d import TCPStore

from yunlu.training.parallel.sockets import Socket, open_sockets, shut

if TYPE_CHECKING:
    from collections.abc import Collection

_CONNECT_S = 5.0
"""torch tries again and again to reach a store; nothing but this ends it."""


def open_store(host: str, port: int, *, is_host: bool) -> TCPStore:
    """The store at which a generation meets: its own, or the way to it."""
    span = timedelta(seconds=_CONNECT_S)
    return TCPStore(host, port, None, is_master=is_host, timeout=span, wait_for_workers=False)


def cut_since(before: set[Socket], *, keep: Collection[int]) -> None:
    """End every connection opened since: whoever waits on one gets an error at once."""
    for each in open_sockets() - before:
        if each.descriptor not in keep:
            shut(each)


def interface_of(host: str) -> str | None:
    """The network interface with this address: the one on which others reach us."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None
