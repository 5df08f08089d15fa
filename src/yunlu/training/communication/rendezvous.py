"""Rendezvous of workers: exchange addresses through a store and connect, authenticated by token."""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from yunlu.training.communication.transport_session import MAGIC, VERSION, LinkLostError

if TYPE_CHECKING:
    from collections.abc import Callable

_HELLO = struct.Struct("<2sBxI32s")
_MAX_PENDING = 64
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    host: str
    port: int
    token: bytes


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

    sock: socket.socket
    received: bytes = b""


def connect_all(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    name: str,
    within_s: float,
    check: Callable[[], object] | None = None,
) -> tuple[tuple[str, ...], dict[int, socket.socket]]:
    """Address of every worker, and a connection to each peer."""
    deadline = _Deadline(time.monotonic() + within_s, check)
    token = secrets.token_bytes(32)
    links: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        ExitStack() as undo,
        socket.create_server((host, 0), family=family, backlog=size + _MAX_PENDING) as listener,
    ):
        undo.callback(_close_all, links)
        own = _PeerAddress(host, listener.getsockname()[1], token)
        store.set(f"{name}/{rank}", f"{own.port} {token.hex()} {host}")
        # The own address is known: a late worker must blame a missing peer, not itself.
        addresses = [
            own if peer == rank else _read_address(store, f"{name}/{peer}", peer, deadline)
            for peer in range(size)
        ]
        for peer in range(rank):
            links[peer] = _connect(addresses[peer], rank, deadline, peer)
        _accept_peers(listener, links, range(rank + 1, size), token, deadline)
        for sock in links.values():
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return tuple(address.host for address in addresses), links


def _close_all(links: dict[int, socket.socket]) -> None:
    for sock in links.values():
        sock.close()


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
    port, token, host = bytes(store.get(key)).decode().split(" ")
    return _PeerAddress(host, int(port), bytes.fromhex(token))


def _connect(address: _PeerAddress, rank: int, deadline: _Deadline, peer: int) -> socket.socket:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=deadline.left_s(peer))
    except OSError as error:
        raise LinkLostError(peer, str(error)) from error
    try:
        sock.sendall(_HELLO.pack(MAGIC, VERSION, rank, address.token))
    except OSError as error:
        sock.close()
        raise LinkLostError(peer, str(error)) from error
    return sock


def _accept_peers(
    listener: socket.socket,
    links: dict[int, socket.socket],
    peers: range,
    token: bytes,
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
                    _accept(listener, poll, calls)
                elif _is_received(call):
                    poll.unregister(descriptor)
                    del calls[descriptor]
                    _admit(call, token, links, missing)
    finally:
        for call in calls.values():
            call.sock.close()


def _accept(listener: socket.socket, poll: select.poll, calls: dict[int, _IncomingCall]) -> None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return  # closed meanwhile
    sock.setblocking(False)
    if len(calls) >= _MAX_PENDING:
        # Drop the oldest silent connection: peers send their hello at once.
        oldest = next(iter(calls))
        poll.unregister(oldest)
        calls.pop(oldest).sock.close()
    calls[sock.fileno()] = _IncomingCall(sock)
    poll.register(sock, select.POLLIN)


def _is_received(call: _IncomingCall) -> bool:
    """Whether the hello is complete or the connection closed."""
    try:
        more = call.sock.recv(_HELLO.size - len(call.received))
    except BlockingIOError:
        return False
    except OSError:
        return True
    call.received += more
    return not more or len(call.received) == _HELLO.size


def _admit(
    call: _IncomingCall, token: bytes, links: dict[int, socket.socket], missing: list[int]
) -> None:
    if len(call.received) == _HELLO.size:
        magic, version, peer, given_token = _HELLO.unpack(call.received)
        is_known = (magic, version) == (MAGIC, VERSION) and hmac.compare_digest(given_token, token)
        if is_known and peer in missing and peer not in links:
            links[peer] = call.sock
            return
    call.sock.close()  # unauthenticated; the peer may still connect
