"""Control connections, both ends: the supervisor's server, and the client that reconnects and restarts a dead supervisor."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.core.framing import FrameError, FrameReader
from yunlu.core.processes import SignalPipe, start_process
from yunlu.core.secure_link import HANDSHAKE_S, SecureLink, connect_link, drop_sent
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import WORKER_LOG, Claim, require_local
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import WorkerGroup, control_secret, read_worker_group
from yunlu.training.elastic.messages import (
    ClientHello,
    Message,
    NodeHello,
    WorkerHello,
    frame,
    read_message,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from yunlu.core.value import Value
    from yunlu.runs.run_store import RunStore

_MAX_UNAUTHENTICATED = 64
"""Limit of connections that have not proved the token; the oldest is closed for a new one."""
_BACKLOG_BYTES = 16 << 20
"""A peer that lets this much pile up unread is disconnected."""


@dataclass(eq=False)
class ControlConnection:
    """One accepted connection."""

    link: SecureLink
    opened_at: float
    reader: FrameReader = field(default_factory=FrameReader)
    hello: WorkerHello | NodeHello | ClientHello | None = None
    pending: deque[memoryview] = field(default_factory=deque[memoryview])
    is_closed: bool = False


class ControlServer:
    """Listening socket and all accepted connections."""

    def __init__(self, host: str, token: str) -> None:
        self.host, self.token = host, token
        self._secret = control_secret(token)
        self._selector = selectors.DefaultSelector()
        self._connections: set[ControlConnection] = set()
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Listening port."""
        return self._listener.getsockname()[1]

    def add_wake(self, signals: SignalPipe) -> None:
        """Wake ``poll`` when a signal comes."""
        self._selector.register(signals, selectors.EVENT_READ, signals)

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
                self._serve(key.data, events, on_message)
            elif isinstance(key.data, SignalPipe):
                key.data.take()
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.hello is None and now - connection.opened_at > HANDSHAKE_S:
                self.close(connection)
            if connection.is_closed:
                self._connections.discard(connection)
                if connection.hello is not None:
                    on_lost(connection)

    def send(self, connection: ControlConnection | None, message: Value) -> None:
        """Send a message; a closed connection is reported by ``poll``."""
        if connection is None or connection.is_closed:
            return
        connection.pending.append(memoryview(frame(message)))
        self._flush(connection)

    def close(self, connection: ControlConnection) -> None:
        """Close one connection."""
        if not connection.is_closed:
            connection.is_closed = True
            self._selector.unregister(connection.link)
            connection.link.close()

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
            connection.link.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        unauthenticated = [
            c for c in self._connections if not c.link.is_authenticated and not c.is_closed
        ]
        if len(unauthenticated) >= _MAX_UNAUTHENTICATED:
            self.close(min(unauthenticated, key=lambda connection: connection.opened_at))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = SecureLink(sock, self._secret, is_server=True)
        connection = ControlConnection(link, time.monotonic())
        self._connections.add(connection)
        self._selector.register(link, selectors.EVENT_READ, connection)

    def _serve(
        self,
        connection: ControlConnection,
        events: int,
        on_message: Callable[[ControlConnection, Message], None],
    ) -> None:
        if not connection.link.is_authenticated:
            try:
                connection.link.handshake()
            except BlockingIOError:
                self._watch(connection)
                return
            except Exception:  # noqa: BLE001 (whatever a stranger sends ends only its own connection)
                self.close(connection)
                return
            self._watch(connection)
        elif events & selectors.EVENT_WRITE:
            self._flush(connection)
        self._read(connection, on_message)

    def _read(
        self,
        connection: ControlConnection,
        on_message: Callable[[ControlConnection, Message], None],
    ) -> None:
        try:
            while not connection.is_closed:
                received = connection.reader.read(connection.link.recv_into)
                if received is None:
                    continue
                message = read_message(received.control)
                if connection.hello is None:
                    if not isinstance(message, WorkerHello | NodeHello | ClientHello):
                        raise FrameError("the first message is not a hello")
                    connection.hello = message
                on_message(connection, message)
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError):
            self.close(connection)

    def _flush(self, connection: ControlConnection) -> None:
        if connection.is_closed:
            return
        try:
            while connection.pending:
                drop_sent(connection.pending, connection.link.sendmsg(connection.pending))
        except BlockingIOError:
            pass
        except OSError:
            self.close(connection)
            return
        if sum(map(len, connection.pending)) > _BACKLOG_BYTES:
            self.close(connection)
            return
        self._watch(connection)

    def _watch(self, connection: ControlConnection) -> None:
        is_writing = bool(connection.pending) or connection.link.wants_write
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)
        self._selector.modify(connection.link, events, connection)


SUPERVISOR = (sys.executable, "-m", "yunlu.training.elastic.supervisor")
GIVE_UP_S = 60.0
"""A worker without a supervisor for this long exits, so that no orphan remains."""
_SEND_S = 5.0
_QUIET_S = 30.0
_RETRY_S = 0.1
_RESTART_S = 5.0


class ControlLostError(Exception):
    """The control connection is closed."""


class ControlClient:
    """One connection at a time to the current supervisor of the run."""

    def __init__(self, run: RunStore, *, quiet_s: float = _QUIET_S) -> None:
        self.run = run
        self._quiet_s = quiet_s
        self.group: WorkerGroup | None = None
        self.connection: SecureLink | None = None
        self.lost_at = time.monotonic()
        self._reader = FrameReader()
        self._received_at = 0.0
        self._connect_tried_at = 0.0
        self._restarted_at = 0.0
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._state_read_at = 0.0
        self._was_over = False

    @property
    def is_up(self) -> bool:
        """Whether the client is connected."""
        return self.connection is not None

    @property
    def local_host(self) -> str:
        """Local address of the connection to the supervisor; peers can reach this process there."""
        return self.connection.getsockname()[0] if self.connection else "127.0.0.1"

    def connect(self, hello: Value) -> bool:
        """Try to connect, at most every tenth of a second; both ends prove the current token."""
        now = time.monotonic()
        if now - self._connect_tried_at < _RETRY_S:
            return False
        self._connect_tried_at = now
        group = read_worker_group(self.run)
        if group is None:
            return False
        try:
            connection = connect_link(
                (group.host, group.port), control_secret(group.token), timeout_s=HANDSHAKE_S
            )
            connection.settimeout(_SEND_S)
            connection.sendall(frame(hello))
        except OSError:
            return False
        self.group, self.connection = group, connection
        self._reader, self._received_at = FrameReader(), time.monotonic()
        return True

    def send(self, message: Value) -> None:
        """Send a message; ``ControlLostError`` if the connection is closed."""
        if self.connection is None:
            raise ControlLostError
        try:
            self.connection.sendall(frame(message))
        except OSError as error:
            raise ControlLostError from error

    def receive(self) -> list[Message]:
        """Messages received; called when the connection is readable."""
        if self.connection is None:
            raise ControlLostError
        try:
            messages: list[Message] = []
            is_pending = True
            while is_pending:
                received = self._reader.read(self.connection.recv_into)
                self._received_at = time.monotonic()
                messages += [] if received is None else [read_message(received.control)]
                is_pending = self.connection.pending
            return messages
        except (OSError, EOFError, FrameError) as error:
            raise ControlLostError from error

    def check_quiet(self) -> None:
        """Raise if the supervisor has sent nothing for too long."""
        if self.connection is not None and time.monotonic() - self._received_at > self._quiet_s:
            raise ControlLostError

    def drop(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.lost_at = time.monotonic()

    def restart_supervisor(self, *, after_s: float) -> None:
        """Start a supervisor if there is none: after a delay, on the same machine, while the run is active."""
        now = time.monotonic()
        if now - self.lost_at < after_s or now - self._restarted_at < _RESTART_S:
            return
        if self._supervisor is not None and self._supervisor.poll() is None:
            return  # it still starts: on a busy machine more of them would only delay each other
        self._restarted_at = now
        if self.is_over() or self.run.is_claimed(Claim.WORKER):
            return
        with require_local(self.run).open_text_log(WORKER_LOG) as log:
            command = [*SUPERVISOR, self.run.address, "--adopt"]
            self._supervisor = start_process(command, log=log, own_session=True)

    def is_over(self) -> bool:
        """Whether the run has ended or is stopping: then no supervisor is started. Read at most once a second."""
        now = time.monotonic()
        if now - self._state_read_at < 1:
            return self._was_over
        self._state_read_at = now
        self._was_over = run_is_over(self.run)
        return self._was_over


def run_is_over(run: RunStore) -> bool:
    """Whether the run has ended or is stopping."""
    state = read_view(run).state
    return state is RunState.STOPPING or not state.is_active
