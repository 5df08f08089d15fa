"""Connection of a worker to one server; reconnects when the server restarts."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunlu.core.errors import TrainingError
from yunlu.core.framing import FrameError, FrameReader, send_frame
from yunlu.core.secure_link import connect_link, derive_secret
from yunlu.training.communication.servers.messages import (
    REQUEST_BYTES,
    ServerHello,
    dump_message,
    read_reply,
)
from yunlu.training.communication.servers.store import read_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from typing_extensions import Buffer

    from yunlu.core.framing import Frame
    from yunlu.core.secure_link import SecureLink
    from yunlu.core.value import Value
    from yunlu.training.communication.servers.messages import ServerReply
    from yunlu.training.communication.servers.rules import Ticket
    from yunlu.training.communication.transport import Traffic

_RETRY_S = (0.01, 0.5)
"""Delay between two attempts to connect, at first and later."""
_CONNECT_S = 5.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 25_000
"""Limit for unacknowledged data, as long as keep-alive takes."""
_LOST = (OSError, EOFError, FrameError)
_T = TypeVar("_T")


class ServerLostError(TrainingError):
    """A server did not come back in time."""


def enable_keepalive(link: SecureLink) -> None:
    """Disable Nagle's algorithm, and detect a dead peer in half a minute."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, sent or to be sent."""

    request: Value
    body: Buffer
    attempts: int = 0


class ReceivedReply(NamedTuple):
    """Reply to a request."""

    reply: ServerReply
    beside: memoryview
    is_repeated: bool
    """Whether the request was sent more than once: the server may have received it before."""


class ServerLink:
    """Sends requests to one server.

    Requests are idempotent: one whose reply was lost is sent again.

    Args:
        directory: Of all servers, with their addresses.
        index: Index of the server.
        worker: Name of this worker.
        held: Tickets this worker holds.
        traffic: Counts bytes.
        patience_s: Time that a server may be down.
    """

    def __init__(
        self,
        directory: Path,
        index: int,
        worker: str,
        held: Callable[[], Iterable[Ticket]],
        traffic: Traffic,
        *,
        patience_s: float,
    ) -> None:
        self._directory, self._index, self._worker, self._held = directory, index, worker, held
        self.traffic, self._patience_s = traffic, patience_s
        self._link: SecureLink | None = None
        self._reader = FrameReader()
        self._pending: PendingRequest | None = None
        self._is_aborted = False
        self._body_bytes = 0
        self.connections = 0
        """Connections made so far."""

    def welcome(self) -> ServerReply:
        """Hello reply of the server."""
        return self._until_done(self._connect)[0]

    def expect(self, body_bytes: int) -> None:
        """Size limit of what follows a reply."""
        self._reader.body_bytes = self._body_bytes = body_bytes

    def call(self, request: Value, *, waits: bool = False) -> ServerReply:
        """Send a request and wait for its reply; ``waits``: without a time limit while the server is up."""
        return self.receive(self.send(request), waits=waits).reply

    def send(self, request: Value, body: Buffer = b"") -> PendingRequest:
        """Send a request without waiting for the reply."""
        pending = PendingRequest(request, body)
        try:
            self._send(pending)
        except _LOST as error:
            self._hang_up(error)
        return pending

    def receive(self, pending: PendingRequest, *, waits: bool = False) -> ReceivedReply:
        """Wait for the reply; the request is repeated if needed."""
        timeout_s = None if waits else self._patience_s

        def attempt() -> tuple[ServerReply, memoryview]:
            if self._pending is not pending:
                self._send(pending)
            frame = self._receive(timeout_s)
            return read_reply(frame), frame.body

        (reply, beside), is_repeated = self._until_done(attempt)
        self._pending = None
        if reply.error:
            raise TrainingError(
                f"Server {self._index} rejected the request of worker {self._worker}: {reply.error}."
            )
        return ReceivedReply(reply, beside, is_repeated=is_repeated or pending.attempts > 1)

    def abort(self) -> None:
        """Abort all current and later waits; from any thread."""
        self._is_aborted = True
        link = self._link
        if link is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # already closed

    def close(self) -> None:
        """Close the connection."""
        self._is_aborted = True
        if self._link is not None:
            self._link.close()
            self._link = None

    def _until_done(self, attempt: Callable[[], _T]) -> tuple[_T, bool]:
        deadline, pause_s = 0.0, _RETRY_S[0]
        while True:
            try:
                return attempt(), deadline > 0
            except _LOST as error:
                self._hang_up(error)
            now = time.monotonic()
            deadline = deadline or now + self._patience_s
            if now > deadline:
                raise ServerLostError(
                    f"Server {self._index} of the weights has been away for"
                    f" {self._patience_s:.0f} s.",
                    hint="Resume the run: the server continues from its directory.",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S[1])

    def _connect(self) -> ServerReply:
        if self._is_aborted:
            raise EOFError
        address = read_address(self._directory, self._index)
        link = connect_link(
            (address.host, address.port),
            derive_secret(address.token.encode(), "shard"),
            timeout_s=_CONNECT_S,
        )
        try:
            enable_keepalive(link)
            self._link = link
            self._reader = FrameReader(control_bytes=REQUEST_BYTES, body_bytes=self._body_bytes)
            hello = ServerHello(
                index=self._index,
                worker=self._worker,
                held=tuple(self._held()),
            )
            self._put(hello, b"")
            reply = read_reply(self._receive(_CONNECT_S))
        except BaseException:
            self._link = None
            link.close()
            raise
        self.connections += 1
        return reply

    def _send(self, pending: PendingRequest) -> None:
        if self._link is None:
            self._connect()
        pending.attempts += 1
        self._put(pending.request, pending.body)
        self._pending = pending

    def _put(self, request: Value, body: Buffer) -> None:
        assert self._link is not None
        self._link.settimeout(self._patience_s)
        self.traffic.sent_bytes += send_frame(self._link, dump_message(request), body)
        self.traffic.messages += 1

    def _receive(self, timeout_s: float | None) -> Frame:
        if self._link is None:
            raise EOFError
        self._link.settimeout(timeout_s)
        while (frame := self._reader.read(self._fill)) is None:
            pass
        return frame

    def _fill(self, buffer: memoryview) -> int:
        assert self._link is not None
        count = self._link.recv_into(buffer)
        self.traffic.received_bytes += count
        return count

    def _hang_up(self, error: Exception) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._pending = None
        if self._is_aborted:
            raise ServerLostError("The exchange with the servers was aborted.") from error
