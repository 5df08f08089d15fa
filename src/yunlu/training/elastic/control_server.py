"""Server end of the control connections: accept, authenticate by token, send and receive messages."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.runs.worker_group import MAX_FRAME_BYTES, WRONG_TOKEN, FrameDecoder, FrameError
from yunlu.training.elastic.messages import (
    HELLO_BYTES,
    ClientHello,
    Message,
    NodeHello,
    Reply,
    WorkerHello,
    frame,
    is_same_token,
    read_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.core.value import Value

_HELLO_S = 10.0
_BACKLOG_BYTES = 16 << 20
"""A peer that lets this much pile up unread is disconnected."""


@dataclass(eq=False)
class ControlConnection:
    """One accepted connection."""

    sock: socket.socket
    opened_at: float
    unpacker: FrameDecoder
    hello: WorkerHello | NodeHello | ClientHello | None = None
    pending: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


class ControlServer:
    """Listening socket and all accepted connections."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._connections: set[ControlConnection] = set()
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Listening port."""
        return self._listener.getsockname()[1]

    def add_wake(self, woken: socket.socket) -> None:
        """Wake ``poll`` when this socket becomes readable."""
        self._selector.register(woken, selectors.EVENT_READ)

    def poll(
        self,
        wait_s: float,
        *,
        on_message: Callable[[ControlConnection, Message], None],
        on_lost: Callable[[ControlConnection], None],
    ) -> None:
        """Wait for messages and closed connections, and call the handlers."""
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, ControlConnection):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data, on_message)
            else:
                _drain(key.fileobj)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.hello is None and now - connection.opened_at > _HELLO_S:
                self.close(connection)
            if connection.is_closed:
                self._connections.discard(connection)
                if connection.hello is not None:
                    on_lost(connection)

    def send(self, connection: ControlConnection | None, message: Value) -> None:
        """Send a message; a closed connection is reported by ``poll``."""
        if connection is None or connection.is_closed:
            return
        connection.pending += frame(message)
        self._flush(connection)

    def close(self, connection: ControlConnection) -> None:
        """Close one connection."""
        if not connection.is_closed:
            connection.is_closed = True
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def flush(self, within_s: float) -> None:
        """Send what is pending, within a time limit."""
        deadline = time.monotonic() + within_s
        while any(
            connection.pending for connection in self._connections if not connection.is_closed
        ):
            if time.monotonic() > deadline:
                return
            for connection in self._connections:
                if connection.pending and not connection.is_closed:
                    self._flush(connection)
            time.sleep(0.01)

    def close_all(self) -> None:
        """Close the listening socket and all connections."""
        for connection in list(self._connections):
            self.close(connection)
        self._connections.clear()
        self._listener.close()
        self._selector.close()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors without touching the parent's state."""
        for connection in self._connections:
            connection.sock.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ControlConnection(sock, time.monotonic(), FrameDecoder(HELLO_BYTES))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(
        self,
        connection: ControlConnection,
        on_message: Callable[[ControlConnection, Message], None],
    ) -> None:
        try:
            chunk = connection.sock.recv(1 << 18)
            if not chunk:
                self.close(connection)
                return
            for data in connection.unpacker.feed(chunk):
                message = read_message(data)
                if connection.hello is None:
                    self._authenticate(connection, message)
                on_message(connection, message)
                if connection.is_closed:
                    return
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self.close(connection)

    def _authenticate(self, connection: ControlConnection, message: Message) -> None:
        if not isinstance(message, WorkerHello | NodeHello | ClientHello):
            raise FrameError("the first message is not a hello")
        if not is_same_token(message.token, self._token):
            self.send(connection, Reply(is_accepted=False, text=WRONG_TOKEN))
            raise FrameError(WRONG_TOKEN)
        connection.hello = message
        connection.unpacker.limit_bytes = MAX_FRAME_BYTES

    def _flush(self, connection: ControlConnection) -> None:
        if connection.is_closed:
            return
        try:
            while connection.pending:
                del connection.pending[: connection.sock.send(connection.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self.close(connection)
            return
        if len(connection.pending) > _BACKLOG_BYTES:
            self.close(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
        self._selector.modify(connection.sock, events, connection)


def _drain(woken: object) -> None:
    assert isinstance(woken, socket.socket)
    try:
        woken.recv(4096)
    except BlockingIOError:
        return
