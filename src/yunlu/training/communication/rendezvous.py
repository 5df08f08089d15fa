"""Rendezvous of workers: exchange addresses through a store, connect, prove the secret to each other.

The store is told addresses only: whoever answers at a false one cannot prove the secret.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from yunlu.core.framing import FrameReader, receive_frame, send_frame
from yunlu.core.secure_link import SecureLink, derive_secret
from yunlu.training.communication.transport_session import LinkLostError

if TYPE_CHECKING:
    from collections.abc import Callable

_HELLO_BYTES = 64
_MAX_PENDING = 64
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Deadline for peers, and a check that may raise earlier."""

    deadline: float
    check: Callable[[], object] | None

    def left_s(self, peer: int) -> float:
        """Time left for this peer."""
        if self.check is not None:
            self.check()
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise LinkLostError(peer, "it did not connect in time")
        return left_s

    def poll_s(self, peer: int) -> float:
        """Time to wait before checking again."""
        return min(self.left_s(peer), _POLL_S)


@dataclass(slots=True)
class _IncomingCall:
    """A connection that has not sent its complete hello."""

    link: SecureLink
    reader: FrameReader = field(default_factory=lambda: FrameReader(control_bytes=_HELLO_BYTES))
    rank: object = None
    """Rank that it says it has."""


def connect_all(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    name: str,
    secret: bytes,
    within_s: float,
    check: Callable[[], object] | None = None,
) -> tuple[tuple[str, ...], dict[int, SecureLink]]:
    """Address of every worker, and a connection to each peer."""
    deadline = _Deadline(time.monotonic() + within_s, check)
    secret = derive_secret(secret, "transport", name)
    links: dict[int, SecureLink] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        ExitStack() as undo,
        socket.create_server((host, 0), family=family, backlog=size + _MAX_PENDING) as listener,
    ):
        undo.callback(_close_all, links)
        own = _PeerAddress(host, listener.getsockname()[1])
        store.set(f"{name}/{rank}", f"{own.port} {host}")
        # The own address is known: a late worker must blame a missing peer, not itself.
        addresses = [
            own if peer == rank else _read_address(store, f"{name}/{peer}", peer, deadline)
            for peer in range(size)
        ]
        for peer in range(rank):
            links[peer] = _connect(addresses[peer], secret, rank, deadline, peer)
        _accept_peers(listener, links, range(rank + 1, size), secret, deadline)
        for link in links.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return tuple(address.host for address in addresses), links


def _close_all(links: dict[int, SecureLink]) -> None:
    for link in links.values():
        link.close()


def _read_address(store: Any, key: str, peer: int, deadline: _Deadline) -> _PeerAddress:
    while True:
        # A store counts milliseconds, and zero means forever.
        timeout = timedelta(seconds=max(deadline.poll_s(peer), 0.001))
        try:
            store.wait([key], timeout)
        except dist.DistNetworkError as error:
            raise LinkLostError(peer, "the store closed") from error
        except RuntimeError:
            continue  # not set yet
        break
    port, host = bytes(store.get(key)).decode().split(" ")
    return _PeerAddress(host, int(port))


def _connect(
    address: _PeerAddress, secret: bytes, rank: int, deadline: _Deadline, peer: int
) -> SecureLink:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=deadline.left_s(peer))
    except OSError as error:
        raise LinkLostError(peer, str(error)) from error
    try:
        link = SecureLink(sock, secret, is_server=False)
        while not link.is_authenticated:
            link.settimeout(deadline.poll_s(peer))
            with suppress(TimeoutError):  # the peer still connects to others
                link.handshake()
        link.settimeout(deadline.left_s(peer))
        send_frame(link, {"rank": rank})
    except OSError as error:
        sock.close()
        raise LinkLostError(peer, str(error)) from error
    except BaseException:
        sock.close()
        raise
    return link


def _accept_peers(
    listener: socket.socket,
    links: dict[int, SecureLink],
    peers: range,
    secret: bytes,
    deadline: _Deadline,
) -> None:
    """Accept the expected peers; a connection that sends nothing does not block others."""
    calls: dict[int, _IncomingCall] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    listener.setblocking(False)
    try:
        while missing := [peer for peer in peers if peer not in links]:
            for descriptor, _ in poll.poll(deadline.poll_s(missing[0]) * 1000):
                call = calls.get(descriptor)
                if call is None:
                    _accept(listener, secret, poll, calls)
                elif _is_received(call):
                    poll.unregister(descriptor)
                    del calls[descriptor]
                    _admit(call, links, missing)
                else:
                    writes = select.POLLOUT if call.link.wants_write else 0
                    poll.modify(descriptor, select.POLLIN | writes)
    finally:
        for call in calls.values():
            call.link.close()


def _accept(
    listener: socket.socket, secret: bytes, poll: select.poll, calls: dict[int, _IncomingCall]
) -> None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return  # closed meanwhile
    sock.setblocking(False)
    if len(calls) >= _MAX_PENDING:
        # Drop the oldest silent connection: peers send their hello at once.
        oldest = next(iter(calls))
        poll.unregister(oldest)
        calls.pop(oldest).link.close()
    calls[sock.fileno()] = _IncomingCall(SecureLink(sock, secret, is_server=True))
    poll.register(sock, select.POLLIN)


def _is_received(call: _IncomingCall) -> bool:
    """Whether the hello is complete or the connection ended."""
    try:
        call.rank = receive_frame(call.link, call.reader).control.get("rank")
    except BlockingIOError:
        return False
    except Exception:  # noqa: BLE001 (whatever a stranger sends ends only its connection)
        return True
    return True


def _admit(call: _IncomingCall, links: dict[int, SecureLink], missing: list[int]) -> None:
    if type(call.rank) is int and call.rank in missing and call.rank not in links:
        links[call.rank] = call.link
    else:
        call.link.close()  # unauthenticated; the peer may still connect
