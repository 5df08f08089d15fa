"""Transport: connections between the workers of a generation, for messages of known length.

gloo passes messages too, but its waits cannot be interrupted, its small messages take milliseconds,
and it does not count bytes. Here every wait ends: with the message, with the connection, with
``abort``, or after a time limit without progress.
"""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any, cast

from yunlu.training.communication.rendezvous import connect_all
from yunlu.training.communication.transport_session import (
    LinkLostError,
    RefusedMessageError,
    Traffic,
    TransportSession,
    shut_link,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from yunlu.core.secure_link import SecureLink
    from yunlu.training.communication.transport_session import Data

__all__ = ["LinkLostError", "RefusedMessageError", "Traffic", "Transport", "connect"]

_RENDEZVOUS_S = 30.0
_PATIENCE_S = 600.0


class Transport:
    """Connections to all other workers; used by one thread at a time, except for ``abort``.

    After an error the connections in use are closed; the others are unaffected.

    Args:
        rank: Of this worker.
        hosts: Address of each worker, by rank; workers with equal addresses share a machine.
        links: Non-blocking socket to each other worker.
        patience_s: Time without progress after which peers are lost.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        links: Mapping[int, SecureLink],
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.rank, self.hosts = rank, hosts
        self.patience_s = patience_s
        self.traffic = Traffic()
        self.links = dict(links)
        self.is_aborted = False

    @property
    def size(self) -> int:
        """Number of workers, including this one."""
        return len(self.hosts)

    def session(self, *, tag: int = 0) -> TransportSession:
        """Open a session of concurrent messages; see ``TransportSession``."""
        return TransportSession(self, tag)

    def send(self, peer: int, data: Data, *, tag: int = 0) -> None:
        """Send one message, and wait until it is handed to the system."""
        self.exchange({peer: data}, {}, tag=tag)

    def receive(self, peer: int, into: Data, *, tag: int = 0) -> None:
        """Receive a message into ``into``."""
        self.exchange({}, {peer: into}, tag=tag)

    def receive_some(self, peer: int, *, limit_bytes: int, tag: int = 0) -> bytearray:
        """Receive a message of at most so many bytes."""
        return self.gather({}, [peer], limit_bytes=limit_bytes, tag=tag)[peer]

    def exchange(
        self, outgoing: Mapping[int, Data], incoming: Mapping[int, Data], *, tag: int = 0
    ) -> None:
        """Send and receive concurrently, at most one message to and from each other worker.

        Args:
            outgoing: Data for each peer; unchanged until this returns.
            incoming: Buffer for each peer; filled exactly.
            tag: Number of the exchange; peers must use the same.
        """
        with self.session(tag=tag) as session:
            for peer, data in outgoing.items():
                session.send(peer, data)
            for peer, into in incoming.items():
                session.receive(peer, into)

    def gather(
        self,
        outgoing: Mapping[int, Data],
        sources: Iterable[int],
        *,
        limit_bytes: int,
        tag: int = 0,
    ) -> dict[int, bytearray]:
        """Send, and receive messages of unknown length."""
        with self.session(tag=tag) as session:
            for peer, data in outgoing.items():
                session.send(peer, data)
            arrivals = {peer: session.receive_some(peer, limit_bytes) for peer in sources}
        return {
            peer: cast("bytearray", arrival.body.obj)
            for peer, arrival in arrivals.items()
            if arrival.body is not None
        }

    def control_congestion(self, name: str) -> bool:
        """Set the TCP congestion control of all connections; returns whether the system has it.

        BBR estimates a rate per connection, and connections that share a slow link do not fill it:
        ``direct`` over 4 hosts at 100 Mbit/s took 1.2 times as long as with Reno. Over fast links that
        drop packets it is the other way round, so choose it only after measuring.
        """
        if sys.platform != "linux":
            return False
        try:
            for link in self.links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
        return True

    def abort(self) -> None:
        """Abort all current and later waits; from any thread."""
        self.is_aborted = True
        for link in self.links.values():
            shut_link(link)

    def close(self) -> None:
        """Close the connections; called by the thread that uses them, or after it."""
        self.is_aborted = True
        for link in self.links.values():
            link.close()


def connect(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    name: str = "transport",
    secret: bytes,
    within_s: float = _RENDEZVOUS_S,
    patience_s: float = _PATIENCE_S,
    check: Callable[[], object] | None = None,
) -> Transport:
    """Connect to all other workers through the store; called by all of them.

    Args:
        store: A torch store.
        rank: Of this worker.
        size: Number of workers.
        host: Address at which peers reach this worker.
        name: Of this transport: unique in the store, and for its connections.
        secret: Of these workers: they prove it to each other.
        within_s: Time limit for peers to connect.
        patience_s: See ``Transport``.
        check: Called while waiting for peers; may raise to end the wait.
    """
    hosts, links = connect_all(
        store, rank, size, host, name=name, secret=secret, within_s=within_s, check=check
    )
    return Transport(rank, hosts, links, patience_s=patience_s)
