"""The door of a shard: connections of workers, one thread, nothing waits for a slow one."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from yunlu.runs.worker_group import reachable_address
from yunlu.training.communication.servers.address import ServerAddress, publish_address
from yunlu.training.communication.servers.frames import (
    CONTROL_BYTES,
    BadFrameError,
    FrameReader,
    pack,
)
from yunlu.training.communication.servers.messages import (
    HELLO_BYTES,
    ClaimTicket,
    CompleteTicket,
    PauseServer,
    Pull,
    Push,
    ResumeServer,
    ServerHello,
    ServerReply,
    StopServer,
    TakeTicket,
    dump_message,
    read_request,
)
from yunlu.training.communication.servers.rules import Ticket
from yunlu.training.communication.servers.server_link import enable_keepalive
from yunlu.training.communication.servers.weights import RefusedPushError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from typing_extensions import Buffer

    from yunlu.training.communication.servers.dispatcher import Dispatcher
    from yunlu.training.communication.servers.frames import Frame
    from yunlu.training.communication.servers.messages import Request
    from yunlu.training.communication.servers.store import Shard

log = logging.getLogger(__name__)
_GREETING_S = 10.0
_LOOK_S = 1.0
"""How often silence is looked for."""
_MOST_CONNECTIONS = 1024


class _ClientConnection:
    """One connection."""

    def __init__(self, link: socket.socket, now: float) -> None:
        self.link = link
        self.reader = FrameReader(control_bytes=HELLO_BYTES)
        self.outgoing: deque[memoryview] = deque()
        self.worker = ""
        """Empty until it has shown the token."""
        self.waiting: TakeTicket | PauseServer | None = None
        """What we owe it an answer to."""
        self.heard_at = now
        self.pulled: Tensor | None = None


class ShardServer:
    """Serves one shard until ``stop``.

    Args:
        shard: What it holds.
        host: The address to listen on.
        is_needed: Asked every second; when it says no, serving ends.
    """

    def __init__(
        self, shard: Shard, host: str, *, is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        self._shard = shard
        self._is_needed = is_needed
        self._callers: dict[socket.socket, _ClientConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._door = socket.create_server((host, 0), backlog=128)
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)
        self._bell, self._rope = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        port = self._door.getsockname()[1]
        publish_address(
            shard.directory,
            ServerAddress(host=reachable_address(host), port=port, token=shard.token),
        )

    def run(self) -> None:
        """Serve until told to stop; everything is on disk then."""
        looked_at = time.monotonic()
        try:
            while True:
                for key, events in self._selector.select(_LOOK_S):
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._door:
                        self._let_in()
                    elif isinstance(key.fileobj, socket.socket):
                        self._move(key.fileobj, events)
                self._serve_waiting()
                if time.monotonic() - looked_at >= _LOOK_S:
                    looked_at = time.monotonic()
                    if not self._is_needed():
                        return
                    self._look_for_silence(looked_at)
        finally:
            self._close()

    def stop(self) -> None:
        """End ``run``; from any thread, or a signal's handler."""
        try:
            self._rope.send(b"!")
        except OSError:
            return  # it has ended

    def _close(self) -> None:
        for link in list(self._callers):
            self._drop(link, "the server ends")
        self._selector.close()
        for each in (self._door, self._bell, self._rope):
            each.close()
        self._shard.close()

    def _let_in(self) -> None:
        try:
            link, _ = self._door.accept()
        except OSError:
            return  # it has gone again
        if len(self._callers) >= _MOST_CONNECTIONS:
            link.close()
            return
        link.setblocking(False)
        enable_keepalive(link)
        self._callers[link] = _ClientConnection(link, time.monotonic())
        self._selector.register(link, selectors.EVENT_READ)

    def _move(self, link: socket.socket, events: int) -> None:
        caller = self._callers.get(link)
        if caller is None:
            return  # dropped meanwhile
        try:
            if events & selectors.EVENT_WRITE:
                self._write(caller)
            if events & selectors.EVENT_READ:
                self._read(caller)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._drop(link, str(error) or "the connection ended")
        except BadFrameError as error:
            log.warning("refused what %s sent: %s", caller.worker or "a stranger", error)
            self._drop(link, str(error))

    def _read(self, caller: _ClientConnection) -> None:
        while caller.link in self._callers:
            frame = caller.reader.read(caller.link.recv_into)
            caller.heard_at = time.monotonic()
            if frame is not None:
                self._hear(caller, frame)

    def _write(self, caller: _ClientConnection) -> None:
        while caller.outgoing:
            count = caller.link.send(caller.outgoing[0])
            caller.heard_at = time.monotonic()
            if count == len(caller.outgoing[0]):
                caller.outgoing.popleft()
            else:
                caller.outgoing[0] = caller.outgoing[0][count:]
        self._selector.modify(caller.link, selectors.EVENT_READ)

    def _answer(self, caller: _ClientConnection, answer: ServerReply, body: Buffer = b"") -> None:
        caller.heard_at = time.monotonic()
        caller.outgoing.extend(pack(dump_message(answer), body))
        self._selector.modify(caller.link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _drop(self, link: socket.socket, reason: str) -> None:
        caller = self._callers.pop(link)
        self._selector.unregister(link)
        link.close()
        if caller.worker and not any(
            other.worker == caller.worker for other in self._callers.values()
        ):
            log.info("worker %s is gone: %s", caller.worker, reason)
            if self._shard.dispatcher is not None:
                self._shard.dispatcher.leave(caller.worker)

    def _hear(self, caller: _ClientConnection, frame: Frame) -> None:
        request = read_request(frame)
        if not caller.worker:
            self._greet(caller, request)
            return
        if caller.waiting is not None or caller.outgoing:
            raise BadFrameError("a request before the last one was answered")
        if isinstance(request, Push):
            self._take_gradient(caller, request, frame.body)
        elif len(frame.body):
            raise BadFrameError("bytes beside a request that has none")
        elif isinstance(request, Pull):
            version, published = self._shard.publish(request.version)
            caller.pulled = published if self._shard.rules.correction == "delay" else None
            if request.is_packed and self._shard.rules.pull_codec != "none":
                published = self._shard.pack(version, published)
            self._answer(caller, ServerReply(version=version), published.numpy().data)
        else:
            self._dispatch(caller, request, self._shard.dispatcher)

    def _greet(self, caller: _ClientConnection, request: Request) -> None:
        token = self._shard.token.encode()
        if not isinstance(request, ServerHello) or not hmac.compare_digest(
            request.token.encode(), token
        ):
            raise BadFrameError("a stranger, without the token")
        if request.index != self._shard.index:
            raise BadFrameError(f"meant for server {request.index}")
        for other in list(self._callers.values()):
            if other.worker == request.worker:
                # It has come back before we saw it go; its tickets stay its own.
                other.worker = ""
                self._drop(other.link, "it came back")
        caller.worker = request.worker
        caller.reader.control_bytes = CONTROL_BYTES
        caller.reader.body_bytes = self._shard.weights.body_bytes
        if self._shard.dispatcher is not None:
            self._shard.dispatcher.join(request.worker, request.held)
        welcome = ServerReply(
            rules=self._shard.rules, length=self._shard.length, version=self._shard.weights.version
        )
        self._answer(caller, welcome)

    def _take_gradient(self, caller: _ClientConnection, push: Push, body: memoryview) -> None:
        try:
            outcome = self._shard.push(push, body, caller.pulled)
        except RefusedPushError as error:
            self._answer(caller, ServerReply(error=str(error)))
            return
        self._answer(caller, ServerReply(version=self._shard.weights.version, outcome=outcome))

    def _dispatch(
        self, caller: _ClientConnection, request: Request, tickets: Dispatcher | None
    ) -> None:
        if tickets is None:
            raise BadFrameError("only the first server hands out tickets")
        match request:
            case TakeTicket():
                caller.waiting = request
            case PauseServer():
                if tickets.pause(caller.worker):
                    caller.waiting = request
                else:
                    self._answer(
                        caller, ServerReply(error="push the gradients of your tickets first")
                    )
            case ResumeServer():
                tickets.resume(caller.worker)
                self._answer(caller, ServerReply())
            case StopServer():
                tickets.is_stopping = True
                self._answer(caller, ServerReply())
            case ClaimTicket():
                counts = self._shard.claim(request.ticket)
                if not counts:
                    tickets.forget(caller.worker, request.ticket)
                self._answer(caller, ServerReply(outcome="taken" if counts else "late"))
            case CompleteTicket() if request.ticket.exists(self._shard.rules):
                self._shard.complete(caller.worker, request)
                self._answer(caller, ServerReply())
            case _:
                raise BadFrameError("a second greeting, or no such ticket")

    def _serve_waiting(self) -> None:
        """Answer whoever can be answered now."""
        tickets = self._shard.dispatcher
        if tickets is None:
            return
        for caller in [each for each in self._callers.values() if each.waiting is not None]:
            if isinstance(caller.waiting, PauseServer):
                if not tickets.is_drained() and tickets.can_drain():
                    continue
                self._answer(caller, ServerReply(is_drained=tickets.is_drained()))
            else:
                found = tickets.take(caller.worker)
                if found == "wait":
                    continue
                ticket = found if isinstance(found, Ticket) else None
                self._answer(caller, ServerReply(ticket=ticket))
            caller.waiting = None

    def _look_for_silence(self, now: float) -> None:
        for link, caller in list(self._callers.items()):
            limit_s = self._shard.rules.silence_s if caller.worker else _GREETING_S
            if caller.waiting is None and now - caller.heard_at > limit_s:
                self._drop(link, f"nothing came for {limit_s:.0f} s")
