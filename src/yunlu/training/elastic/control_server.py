"""The supervisor's side of the wire: who is connected, what they say, and that they know the token."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.runs.worker_group import MAX_FRAME_BYTES, WRONG_TOKEN, FrameError, Unpacker
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
"""Who does not read what it is told is as good as gone."""


@dataclass(eq=False)
class ControlConnection:
    """One connection."""

    connection: socket.socket
    opened_at: float
    unpacker: Unpacker
    hello: WorkerHello | NodeHello | ClientHello | None = None
    pending: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


class ControlServer:
    """All connections, and the door."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._links: set[ControlConnection] = set()
        self._door = socket.create_server((host, 0), backlog=256)
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Where the door is."""
        return self._door.getsockname()[1]

    def add_wake(self, woken: socket.socket) -> None:
        """Come back from waiting when this becomes readable."""
        self._selector.register(woken, selectors.EVENT_READ)

    def poll(
        self,
        wait_s: float,
        *,
        on_message: Callable[[ControlConnection, Message], None],
        on_lost: Callable[[ControlConnection], None],
    ) -> None:
        """Wait for anything to come, and pass it on."""
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._door:
                self._accept()
            elif isinstance(key.data, ControlConnection):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data, on_message)
            else:
                _drain(key.fileobj)
        now = time.monotonic()
        for link in list(self._links):
            if link.hello is None and now - link.opened_at > _HELLO_S:
                self.close(link)
            if link.is_closed:
                self._links.discard(link)
                if link.hello is not None:
                    on_lost(link)

    def send(self, link: ControlConnection | None, message: Value) -> None:
        """Say something; a dead link is noticed elsewhere."""
        if link is None or link.is_closed:
            return
        link.pending += frame(message)
        self._flush(link)

    def close(self, link: ControlConnection) -> None:
        """Hang up."""
        if not link.is_closed:
            link.is_closed = True
            self._selector.unregister(link.connection)
            link.connection.close()

    def flush(self, within_s: float) -> None:
        """Get everything out before the end."""
        deadline = time.monotonic() + within_s
        while any(link.pending for link in self._links if not link.is_closed):
            if time.monotonic() > deadline:
                return
            for link in self._links:
                if link.pending and not link.is_closed:
                    self._flush(link)
            time.sleep(0.01)

    def close_all(self) -> None:
        """Shut the door and hang up."""
        for link in list(self._links):
            self.close(link)
        self._links.clear()
        self._door.close()
        self._selector.close()

    def abandon(self) -> None:
        """In a forked process: let go of what the parent goes on with, and change nothing of it."""
        for link in self._links:
            link.connection.close()
        self._door.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = ControlConnection(connection, time.monotonic(), Unpacker(HELLO_BYTES))
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _read(
        self, link: ControlConnection, on_message: Callable[[ControlConnection, Message], None]
    ) -> None:
        try:
            data = link.connection.recv(1 << 18)
            if not data:
                self.close(link)
                return
            for found in link.unpacker.feed(data):
                message = read_message(found)
                if link.hello is None:
                    self._welcome(link, message)
                on_message(link, message)
                if link.is_closed:
                    return
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self.close(link)

    def _welcome(self, link: ControlConnection, message: Message) -> None:
        if not isinstance(message, WorkerHello | NodeHello | ClientHello):
            raise FrameError("the first word is not a greeting")
        if not is_same_token(message.token, self._token):
            self.send(link, Reply(is_accepted=False, text=WRONG_TOKEN))
            raise FrameError(WRONG_TOKEN)
        link.hello = message
        link.unpacker.limit_bytes = MAX_FRAME_BYTES

    def _flush(self, link: ControlConnection) -> None:
        if link.is_closed:
            return
        try:
            while link.pending:
                del link.pending[: link.connection.send(link.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self.close(link)
            return
        if len(link.pending) > _BACKLOG_BYTES:
            self.close(link)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.pending else 0)
        self._selector.modify(link.connection, events, link)


def _drain(woken: object) -> None:
    assert isinstance(woken, socket.socket)
    try:
        woken.recv(4096)
    except BlockingIOError:
        return
