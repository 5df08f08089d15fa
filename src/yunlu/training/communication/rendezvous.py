"""How workers find and call each other, and let no stranger in."""

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
_STRANGERS = 64
_GLANCE_S = 0.25


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    host: str
    port: int
    token: bytes


@dataclass(frozen=True, slots=True)
class _Deadline:
    """How long to wait for others, and what may end it sooner by raising."""

    deadline: float
    check: Callable[[], object] | None

    def left_s(self, peer: int) -> float:
        """How long we would still wait for this one."""
        if self.check is not None:
            self.check()
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise LinkLostError(peer, "it was not there in time")
        return left_s

    def glance_s(self, peer: int) -> float:
        """How long to wait before asking again."""
        return min(self.left_s(peer), _GLANCE_S)


@dataclass(slots=True)
class _IncomingCall:
    """Someone who has not yet said all of who they are."""

    link: socket.socket
    said: bytes = b""


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
    """The address of every worker, and a connection to each other one."""
    patience = _Deadline(time.monotonic() + within_s, check)
    token = secrets.token_bytes(32)
    links: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        ExitStack() as undo,
        socket.create_server((host, 0), family=family, backlog=size + _STRANGERS) as door,
    ):
        undo.callback(_hang_up, links)
        own = _PeerAddress(host, door.getsockname()[1], token)
        store.set(f"{name}/{rank}", f"{own.port} {token.hex()} {host}")
        # Our own address is known: however late we are, it is another one who is missing.
        known = [
            own if peer == rank else _read_address(store, f"{name}/{peer}", peer, patience)
            for peer in range(size)
        ]
        for peer in range(rank):
            links[peer] = _call(known[peer], rank, patience, peer)
        _answer(door, links, range(rank + 1, size), token, patience)
        for link in links.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return tuple(each.host for each in known), links


def _hang_up(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        link.close()


def _read_address(store: Any, key: str, peer: int, patience: _Deadline) -> _PeerAddress:
    while True:
        # A store counts milliseconds, and none at all means for ever.
        span = timedelta(seconds=max(patience.glance_s(peer), 0.001))
        try:
            store.wait([key], span)
        except dist.DistNetworkError as error:
            raise LinkLostError(peer, "the store is gone") from error
        except RuntimeError:
            continue  # not there yet
        break
    port, token, host = bytes(store.get(key)).decode().split(" ")
    return _PeerAddress(host, int(port), bytes.fromhex(token))


def _call(address: _PeerAddress, rank: int, patience: _Deadline, peer: int) -> socket.socket:
    try:
        link = socket.create_connection((address.host, address.port), timeout=patience.left_s(peer))
    except OSError as error:
        raise LinkLostError(peer, str(error)) from error
    try:
        link.sendall(_HELLO.pack(MAGIC, VERSION, rank, address.token))
    except OSError as error:
        link.close()
        raise LinkLostError(peer, str(error)) from error
    return link


def _answer(
    door: socket.socket,
    links: dict[int, socket.socket],
    peers: range,
    token: bytes,
    patience: _Deadline,
) -> None:
    """Let in whom we wait for. Whoever calls and says nothing keeps nobody else waiting."""
    callers: dict[int, _IncomingCall] = {}
    poll = select.poll()
    poll.register(door, select.POLLIN)
    door.setblocking(False)
    try:
        while missing := [peer for peer in peers if peer not in links]:
            for descriptor, _ in poll.poll(patience.glance_s(missing[0]) * 1000):
                caller = callers.get(descriptor)
                if caller is None:
                    _open_door(door, poll, callers)
                elif _listen(caller):
                    poll.unregister(descriptor)
                    del callers[descriptor]
                    _let_in(caller, token, links, missing)
    finally:
        for caller in callers.values():
            caller.link.close()


def _open_door(door: socket.socket, poll: select.poll, callers: dict[int, _IncomingCall]) -> None:
    try:
        link, _ = door.accept()
    except OSError:
        return  # they have hung up meanwhile
    link.setblocking(False)
    if len(callers) >= _STRANGERS:
        # The one who has been silent the longest: whom we wait for say at once who they are.
        oldest = next(iter(callers))
        poll.unregister(oldest)
        callers.pop(oldest).link.close()
    callers[link.fileno()] = _IncomingCall(link)
    poll.register(link, select.POLLIN)


def _listen(caller: _IncomingCall) -> bool:
    """Whether there is no more to hear."""
    try:
        more = caller.link.recv(_HELLO.size - len(caller.said))
    except BlockingIOError:
        return False
    except OSError:
        return True
    caller.said += more
    return not more or len(caller.said) == _HELLO.size


def _let_in(
    caller: _IncomingCall, token: bytes, links: dict[int, socket.socket], missing: list[int]
) -> None:
    if len(caller.said) == _HELLO.size:
        magic, version, peer, shown = _HELLO.unpack(caller.said)
        is_known = (magic, version) == (MAGIC, VERSION) and hmac.compare_digest(shown, token)
        if is_known and peer in missing and peer not in links:
            links[peer] = caller.link
            return
    caller.link.close()  # a stranger: whom we wait for may still come
