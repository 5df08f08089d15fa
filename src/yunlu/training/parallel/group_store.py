"""Key-value store of a worker group, over authenticated connections.

Stands in for torch's TCPStore, which listens on all interfaces and lets anybody read, alter and
fill it. One worker hosts it; the others connect. Process groups use it like any other store.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from yunlu.core.framing import Frame, FrameError, FrameReader, receive_frame, send_frame
from yunlu.core.secure_link import (
    HANDSHAKE_S,
    LinkRefusedError,
    SecureLink,
    connect_link,
    derive_secret,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

_MAX_CONNECTIONS = 4096
_MAX_UNAUTHENTICATED = 64
_RETRY_S = 0.05
_VALUE_BYTES = 4 << 20


class StoreServer:
    """Hosts a store, with a thread for each connection.

    Args:
        host: Address to listen on.
        secret: Of the worker group: clients prove it.
        port: Port to listen on; 0 for any.
        other_hosts: Further addresses to listen on, at the same port.
    """

    def __init__(
        self, host: str, secret: bytes, *, port: int = 0, other_hosts: Sequence[str] = ()
    ) -> None:
        self._secret = derive_secret(secret, "store")
        self._listeners = [_listen(host, port)]
        self.host, self.port = host, self._listeners[0].getsockname()[1]
        self._listeners += [_listen(other, self.port) for other in other_hosts]
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._links: set[SecureLink] = set()
        self._unauthenticated: deque[SecureLink] = deque()
        self._is_closed = False
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="store", daemon=True
            ).start()

    def close(self) -> None:
        """Close the store and all connections."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            links = [*self._links]
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for link in links:
            _shut(link)

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(_RETRY_S)  # no descriptor left: some may be closed meanwhile
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(HANDSHAKE_S)
            link = SecureLink(sock, self._secret, is_server=True)
            with self._changed:
                if len(self._links) >= _MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._links.add(link)
                self._unauthenticated.append(link)
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    _shut(self._unauthenticated.popleft())
            threading.Thread(target=self._serve, args=(link,), name="store", daemon=True).start()

    def _serve(self, link: SecureLink) -> None:
        try:
            link.handshake()
            with self._changed, suppress(ValueError):
                self._unauthenticated.remove(link)
            link.settimeout(None)
            reader = FrameReader(body_bytes=_VALUE_BYTES)
            while not self._is_closed:
                send_frame(link, *self._answer(receive_frame(link, reader)))
        except Exception:  # noqa: BLE001 (one connection must not end the others)
            return
        finally:
            link.close()
            with self._changed:
                self._links.discard(link)
                with suppress(ValueError):
                    self._unauthenticated.remove(link)

    def _answer(self, frame: Frame) -> tuple[dict[str, Any], bytes]:
        request, value = frame.control, bytes(frame.body)
        operations: dict[str, Callable[[], dict[str, Any] | bytes]] = {
            "set": lambda: self._put(request["key"], value),
            "get": lambda: self._values[request["key"]],
            "wait": lambda: {"is_set": self._wait(request["keys"], request["timeout_s"])},
            "check": lambda: {"is_set": self._has(request["keys"])},
            "add": lambda: {"total": self._add(request["key"], request["amount"])},
            "compare_set": lambda: self._compare_set(
                request["key"], value[: request["size"]], value[request["size"] :]
            ),
            "delete": lambda: {"is_deleted": self._values.pop(request["key"], None) is not None},
            "count": lambda: {"count": len(self._values)},
        }
        with self._changed:
            answer = operations[request["op"]]()
        return ({}, answer) if isinstance(answer, bytes) else (answer, b"")

    def _put(self, key: str, value: bytes) -> dict[str, Any]:
        self._values[key] = value
        self._changed.notify_all()
        return {}

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, str(total).encode())
        return total

    def _compare_set(self, key: str, expected: bytes, wanted: bytes) -> bytes:
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, wanted)
            return wanted
        return expected if current is None else current

    def _wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        limit_s = min(max(timeout_s, 0), threading.TIMEOUT_MAX)
        self._changed.wait_for(lambda: self._is_closed or self._has(keys), limit_s)
        return self._has(keys)


class GroupStore(Store):
    """Client of a store; ``clone`` it for another thread, whose waits would block this one's calls.

    Args:
        address: Of the store.
        secret: Of the worker group.
        timeout: Limit of waits without a limit of their own, and for the store to be there.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, *, timeout: timedelta) -> None:
        super().__init__()
        self._address, self._secret, self._timeout = address, secret, timeout
        self._lock = threading.Lock()
        self._reader = FrameReader(body_bytes=_VALUE_BYTES)
        self._link = self._connect(time.monotonic() + timeout.total_seconds())

    def _connect(self, deadline: float) -> SecureLink:
        while True:
            try:
                secret = derive_secret(self._secret, "store")
                link = connect_link(self._address, secret, timeout_s=HANDSHAKE_S)
            except LinkRefusedError as error:
                raise dist.DistNetworkError(f"The store is not ours: {error}.") from error
            except OSError as error:  # not there yet
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(f"The store does not answer: {error}.") from error
                time.sleep(_RETRY_S)
            else:
                link.settimeout(None)
                return link

    def clone(self) -> GroupStore:
        """Another connection to the same store."""
        return GroupStore(self._address, self._secret, timeout=self._timeout)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit of waits without a limit of their own."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Limit of waits without a limit of their own."""
        return self._timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._call(_encode(value), op="set", key=key)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes(self._call(op="get", key=key).body)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        limit = timeout or self._timeout
        if not self._call(op="wait", keys=keys, timeout_s=limit.total_seconds()).control["is_set"]:
            raise dist.DistStoreError(f"wait timeout after {limit}, keys: {', '.join(keys)}")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return self._call(op="check", keys=keys).control["is_set"]

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._call(op="add", key=key, amount=value).control["total"]

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a value if the current one is as expected; returns the value then."""
        expected, wanted = _encode(expected_value), _encode(desired_value)
        size = len(expected)
        return bytes(self._call(expected + wanted, op="compare_set", key=key, size=size).body)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was set."""
        return self._call(op="delete", key=key).control["is_deleted"]

    def num_keys(self) -> int:
        """Number of keys."""
        return self._call(op="count").control["count"]

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (torch calls them by these names)

    def _call(self, value: bytes = b"", **request: Any) -> Frame:
        with self._lock:
            try:
                send_frame(self._link, request, value)
                return receive_frame(self._link, self._reader)
            except EOFError as error:
                raise dist.DistNetworkError("The connection to the store ended.") from error
            except (OSError, FrameError) as error:
                raise dist.DistNetworkError(
                    f"The connection to the store ended: {error}."
                ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _shut(link: SecureLink) -> None:
    with suppress(OSError):
        link.shutdown()
