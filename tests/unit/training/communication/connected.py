"""Workers as threads of one process, joined by real connections."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from tests.waiting import LIMIT_S
from yunlu.core.secure_link import SecureLink
from yunlu.training.communication.transport import Transport, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def make_wires(hosts: Sequence[str], *, patience_s: float = LIMIT_S) -> list[Transport]:
    """One for each host, connected with all the others."""
    store = dist.HashStore()
    size = len(hosts)

    def join(rank: int) -> Transport:
        return connect(
            store, rank, size, hosts[rank], secret=b"test", within_s=LIMIT_S, patience_s=patience_s
        )

    return in_threads(join, size)


def make_link_pair() -> tuple[SecureLink, SecureLink]:
    """Both ends of a connection, proved to each other."""
    near, far = socket.socketpair()
    links = SecureLink(near, b"test", is_server=True), SecureLink(far, b"test", is_server=False)
    in_threads(lambda number: links[number].handshake(), 2)
    return links


def in_threads(function: Callable[[int], T], size: int) -> list[T]:
    """``function(rank)`` in a thread for each rank; what each returned, or the first failure."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))


def close_all(transports: Sequence[Transport]) -> None:
    """Hang up everywhere."""
    for transport in transports:
        transport.close()
