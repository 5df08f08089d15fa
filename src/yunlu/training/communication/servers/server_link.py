"""A worker's connection to one server: it comes back by itself when the server does."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunlu.core.errors import TrainingError
from yunlu.training.communication.servers.address import read_address
from yunlu.training.communication.servers.frames import BadFrameError, FrameReader, pack
from yunlu.training.communication.servers.messages import ServerHello, dump_message, read_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from typing_extensions import Buffer

    from yunlu.core.value import Value
    from yunlu.training.communication.servers.frames import Frame
    from yunlu.training.communication.servers.messages import ServerReply
    from yunlu.training.communication.servers.rules import Ticket
    from yunlu.training.communication.transport_session import Traffic

_TRY_S = (0.01, 0.5)
"""Between two attempts to reach a server, at first and later."""
_CONNECT_S = 5.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNHEARD_MS = 25_000
"""How long the other machine may leave unacknowledged what was sent: as long as what keeps alive takes."""
_LOST = (OSError, EOFError, BadFrameError)
_T = TypeVar("_T")


class ServerLostError(TrainingError):
    """A server did not come back in time."""


def enable_keepalive(link: socket.socket) -> None:
    """Send at once, and notice in half a minute that the other machine is gone without a word."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that was put, or is to be."""

    request: Value
    body: Buffer
    times: int = 0


class ReceivedReply(NamedTuple):
    """What came of it."""

    answer: ServerReply
    beside: memoryview
    is_again: bool
    """Whether it was put more than once: the server may have heard it before."""


class ServerLink:
    """Puts requests to one server.

    Every request may be put twice with the effect of once, so one whose answer was lost is put again.

    Args:
        directory: Of all servers: where their addresses are.
        index: Which of them.
        worker: Our name.
        held: The tickets we have.
        traffic: Counts what goes over it.
        patience_s: How long a server may stay away.
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
        self._link: socket.socket | None = None
        self._reader = FrameReader()
        self._asked: PendingRequest | None = None
        self._is_aborted = False
        self._body_bytes = 0
        self.connections = 0
        """Made so far: whether something happened over a single one."""

    def welcome(self) -> ServerReply:
        """What the server says of itself."""
        return self._until_done(self._connect)[0]

    def expect(self, body_bytes: int) -> None:
        """How long what comes beside an answer may be."""
        self._reader.body_bytes = self._body_bytes = body_bytes

    def ask(self, request: Value, *, waits: bool = False) -> ServerReply:
        """Put a request; ``waits``: the server may take any time to answer, while it is there."""
        return self.finish(self.begin(request), waits=waits).answer

    def begin(self, request: Value, body: Buffer = b"") -> PendingRequest:
        """Put a request, and do not wait for the answer."""
        asked = PendingRequest(request, body)
        try:
            self._send(asked)
        except _LOST as error:
            self._hang_up(error)
        return asked

    def finish(self, asked: PendingRequest, *, waits: bool = False) -> ReceivedReply:
        """Wait for the answer; the request is put again if need be."""
        timeout_s = None if waits else self._patience_s

        def attempt() -> tuple[ServerReply, memoryview]:
            if self._asked is not asked:
                self._send(asked)
            frame = self._receive(timeout_s)
            return read_reply(frame), frame.body

        (answer, beside), is_again = self._until_done(attempt)
        self._asked = None
        if answer.error:
            raise TrainingError(
                f"Server {self._index} refused what worker {self._worker} asked: {answer.error}."
            )
        return ReceivedReply(answer, beside, is_again=is_again or asked.times > 1)

    def abort(self) -> None:
        """End every wait, now and later; from any thread."""
        self._is_aborted = True
        link = self._link
        if link is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended already

    def close(self) -> None:
        """Hang up."""
        self._is_aborted = True
        if self._link is not None:
            self._link.close()
            self._link = None

    def _until_done(self, attempt: Callable[[], _T]) -> tuple[_T, bool]:
        deadline, pause_s = 0.0, _TRY_S[0]
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
                    hint="It goes on from its directory when it is started again: resume the run.",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _TRY_S[1])

    def _connect(self) -> ServerReply:
        if self._is_aborted:
            raise EOFError
        address = read_address(self._directory, self._index)
        link = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        try:
            enable_keepalive(link)
            self._link, self._reader = link, FrameReader(body_bytes=self._body_bytes)
            hello = ServerHello(
                token=address.token,
                index=self._index,
                worker=self._worker,
                held=tuple(self._held()),
            )
            self._put(hello, b"")
            answer = read_reply(self._receive(_CONNECT_S))
        except BaseException:
            self._link = None
            link.close()
            raise
        self.connections += 1
        return answer

    def _send(self, asked: PendingRequest) -> None:
        if self._link is None:
            self._connect()
        asked.times += 1
        self._put(asked.request, asked.body)
        self._asked = asked

    def _put(self, request: Value, body: Buffer) -> None:
        assert self._link is not None
        self._link.settimeout(self._patience_s)
        for piece in pack(dump_message(request), body):
            self._link.sendall(piece)
            self.traffic.sent_bytes += len(piece)
        self.traffic.messages += 1

    def _receive(self, timeout_s: float | None) -> Frame:
        if self._link is None:
            raise EOFError
        self._link.settimeout(timeout_s)
        while (frame := self._reader.read(self._fill)) is None:
            pass
        return frame

    def _fill(self, place: memoryview) -> int:
        assert self._link is not None
        count = self._link.recv_into(place)
        self.traffic.received_bytes += count
        return count

    def _hang_up(self, error: Exception) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._asked = None
        if self._is_aborted:
            raise ServerLostError("The exchange with the servers was given up.") from error
