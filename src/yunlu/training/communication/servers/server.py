"""Server of a shard: connections of workers, one thread, non-blocking.

``python -m yunlu.training.communication.servers.server DIRECTORY INDEX`` runs it.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from yunlu.core.framing import FrameError, FrameReader, encode_frame
from yunlu.core.secrets import make_process_private
from yunlu.core.secure_link import HANDSHAKE_S, SecureLink, bind_address, derive_secret, drop_sent
from yunlu.training.communication.servers.messages import (
    HELLO_BYTES,
    REQUEST_BYTES,
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
from yunlu.training.communication.servers.store import (
    ServerAddress,
    Shard,
    publish_address,
    shard_directory,
)
from yunlu.training.communication.servers.weights import RefusedPushError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from typing_extensions import Buffer

    from yunlu.core.framing import Frame
    from yunlu.training.communication.servers.dispatcher import Dispatcher
    from yunlu.training.communication.servers.messages import Request


log = logging.getLogger(__name__)
_SILENCE_CHECK_S = 1.0
"""Interval of the check for silent clients."""
_MAX_CONNECTIONS = 1024
_MAX_UNAUTHENTICATED = 64
"""Limit of connections that have not proved the secret; the oldest is closed for a new one."""


class _ClientConnection:
    """Connection of a worker."""

    def __init__(self, link: SecureLink, now: float) -> None:
        self.link = link
        self.reader = FrameReader(control_bytes=HELLO_BYTES)
        self.outgoing: deque[memoryview] = deque()
        self.worker = ""
        """Empty until it is authenticated."""
        self.waiting: TakeTicket | PauseServer | None = None
        """Request that waits for a reply."""
        self.received_at = now
        self.pulled: Tensor | None = None


class ShardServer:
    """Serves one shard until ``stop``.

    Args:
        shard: Its state.
        host: Address to listen on.
        is_needed: Called every second; serving ends once it is false.
    """

    def __init__(
        self, shard: Shard, host: str, *, is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        self._shard = shard
        self._is_needed = is_needed
        self._secret = derive_secret(shard.token.encode(), "shard")
        self._clients: dict[SecureLink, _ClientConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        port = self._listener.getsockname()[1]
        publish_address(
            shard.directory,
            ServerAddress(host=host, port=port, token=shard.token),
        )

    def run(self) -> None:
        """Serve until stopped; everything is on disk then."""
        looked_at = time.monotonic()
        try:
            while True:
                for key, events in self._selector.select(_SILENCE_CHECK_S):
                    if key.fileobj is self._wake_reader:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, SecureLink):
                        self._move(key.fileobj, events)
                self._serve_waiting()
                if time.monotonic() - looked_at >= _SILENCE_CHECK_S:
                    looked_at = time.monotonic()
                    if not self._is_needed():
                        return
                    self._drop_silent_clients(looked_at)
        finally:
            self._close()

    def stop(self) -> None:
        """End ``run``; from any thread or signal handler."""
        try:
            self._wake_writer.send(b"!")
        except OSError:
            return  # already ended

    def _close(self) -> None:
        for link in list(self._clients):
            self._disconnect(link, "the server stops")
        self._selector.close()
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()
        self._shard.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # closed again
        unauthenticated = [link for link in self._clients if not link.is_authenticated]
        if len(unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._disconnect(unauthenticated[0], "too many unauthenticated connections")
        if len(self._clients) >= _MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        link = SecureLink(sock, self._secret, is_server=True)
        enable_keepalive(link)
        self._clients[link] = _ClientConnection(link, time.monotonic())
        self._selector.register(link, selectors.EVENT_READ)

    def _move(self, link: SecureLink, events: int) -> None:
        client = self._clients.get(link)
        if client is None:
            return  # disconnected meanwhile
        if not link.is_authenticated and not self._handshake(link):
            return
        try:
            if events & selectors.EVENT_WRITE and client.outgoing:
                self._write(client)
            self._read(client)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._disconnect(link, str(error) or "the connection closed")
        except FrameError as error:
            log.warning(
                "rejected data of %s: %s", client.worker or "an unauthenticated client", error
            )
            self._disconnect(link, str(error))

    def _handshake(self, link: SecureLink) -> bool:
        """Whether the client has proved the secret."""
        try:
            link.handshake()
        except BlockingIOError:
            events = selectors.EVENT_WRITE if link.wants_write else selectors.EVENT_READ
            self._selector.modify(link, events)
            return False
        except Exception as error:  # noqa: BLE001 (whatever a stranger sends ends only its connection)
            log.debug(
                "refused an unauthenticated client: %s", error
            )  # a stranger must not fill the log
            self._disconnect(link, "unauthenticated")
            return False
        self._selector.modify(link, selectors.EVENT_READ)
        return True

    def _read(self, client: _ClientConnection) -> None:
        while client.link in self._clients:
            frame = client.reader.read(client.link.recv_into)
            client.received_at = time.monotonic()
            if frame is not None:
                self._handle(client, frame)

    def _write(self, client: _ClientConnection) -> None:
        while client.outgoing:
            drop_sent(client.outgoing, client.link.sendmsg(client.outgoing))
            client.received_at = time.monotonic()
        self._selector.modify(client.link, selectors.EVENT_READ)

    def _reply(self, client: _ClientConnection, answer: ServerReply, body: Buffer = b"") -> None:
        client.received_at = time.monotonic()
        client.outgoing.extend(encode_frame(dump_message(answer), body))
        self._selector.modify(client.link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _disconnect(self, link: SecureLink, reason: str) -> None:
        client = self._clients.pop(link)
        self._selector.unregister(link)
        link.close()
        if client.worker and not any(
            other.worker == client.worker for other in self._clients.values()
        ):
            log.info("worker %s disconnected: %s", client.worker, reason)
            if self._shard.dispatcher is not None:
                self._shard.dispatcher.leave(client.worker)

    def _handle(self, client: _ClientConnection, frame: Frame) -> None:
        request = read_request(frame)
        if not client.worker:
            self._greet(client, request)
            return
        if client.waiting is not None or client.outgoing:
            raise FrameError("a request before the reply to the last one")
        if isinstance(request, Push):
            self._take_gradient(client, request, frame.body)
        elif len(frame.body):
            raise FrameError("unexpected bytes after a request")
        elif isinstance(request, Pull):
            version, published = self._shard.publish(request.version)
            client.pulled = published if self._shard.rules.correction == "delay" else None
            if request.is_packed and self._shard.rules.pull_codec != "none":
                published = self._shard.pack(version, published)
            self._reply(client, ServerReply(version=version), published.numpy().data)
        else:
            self._dispatch(client, request, self._shard.dispatcher)

    def _greet(self, client: _ClientConnection, request: Request) -> None:
        if not isinstance(request, ServerHello):
            raise FrameError("the first request is not a hello")
        if request.index != self._shard.index:
            raise FrameError(f"request for server {request.index}")
        for other in list(self._clients.values()):
            if other.worker == request.worker:
                # Reconnected before the loss was noticed; it keeps its tickets.
                other.worker = ""
                self._disconnect(other.link, "it reconnected")
        client.worker = request.worker
        client.reader.control_bytes = REQUEST_BYTES
        client.reader.body_bytes = self._shard.weights.body_bytes
        if self._shard.dispatcher is not None:
            self._shard.dispatcher.join(request.worker, request.held)
        welcome = ServerReply(
            rules=self._shard.rules, length=self._shard.length, version=self._shard.weights.version
        )
        self._reply(client, welcome)

    def _take_gradient(self, client: _ClientConnection, push: Push, body: memoryview) -> None:
        try:
            outcome = self._shard.push(push, body, client.pulled)
        except RefusedPushError as error:
            self._reply(client, ServerReply(error=str(error)))
            return
        self._reply(client, ServerReply(version=self._shard.weights.version, outcome=outcome))

    def _dispatch(
        self, client: _ClientConnection, request: Request, tickets: Dispatcher | None
    ) -> None:
        if tickets is None:
            raise FrameError("only the first server hands out tickets")
        match request:
            case TakeTicket():
                client.waiting = request
            case PauseServer():
                if tickets.pause(client.worker):
                    client.waiting = request
                else:
                    self._reply(
                        client, ServerReply(error="push the gradients of your tickets first")
                    )
            case ResumeServer():
                tickets.resume(client.worker)
                self._reply(client, ServerReply())
            case StopServer():
                tickets.is_stopping = True
                self._reply(client, ServerReply())
            case ClaimTicket():
                counts = self._shard.claim(request.ticket)
                if not counts:
                    tickets.forget(client.worker, request.ticket)
                self._reply(client, ServerReply(outcome="taken" if counts else "late"))
            case CompleteTicket() if request.ticket.exists(self._shard.rules):
                self._shard.complete(client.worker, request)
                self._reply(client, ServerReply())
            case _:
                raise FrameError("unexpected hello, or unknown ticket")

    def _serve_waiting(self) -> None:
        """Reply to all clients whose requests can be answered now."""
        tickets = self._shard.dispatcher
        if tickets is None:
            return
        for client in [client for client in self._clients.values() if client.waiting is not None]:
            if isinstance(client.waiting, PauseServer):
                if not tickets.is_drained() and tickets.can_drain():
                    continue
                self._reply(client, ServerReply(is_drained=tickets.is_drained()))
            else:
                taken = tickets.take(client.worker)
                if taken == "wait":
                    continue
                ticket = taken if isinstance(taken, Ticket) else None
                self._reply(client, ServerReply(ticket=ticket))
            client.waiting = None

    def _drop_silent_clients(self, now: float) -> None:
        for link, client in list(self._clients.items()):
            limit_s = self._shard.rules.silence_s if client.worker else HANDSHAKE_S
            if client.waiting is None and now - client.received_at > limit_s:
                self._disconnect(link, f"silent for {limit_s:.0f} s")


def serve(directory: Path, index: int, host: str, *, with_parent: bool = False) -> None:
    """Serve one shard of a directory made by ``prepare``, until SIGTERM or SIGINT.

    Args:
        directory: Of all servers.
        index: Index of this server.
        host: Address to listen on.
        with_parent: End with the parent process.
    """
    parent = os.getppid()
    server = ShardServer(
        Shard(shard_directory(directory, index)),
        host,
        is_needed=lambda: not with_parent or os.getppid() == parent,
    )

    def end(*_: object) -> None:
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run()


def main() -> int:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(description="Serve a part of a model's weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("index", type=int)
    parser.add_argument("--host", default=bind_address())
    parser.add_argument("--with-parent", action="store_true")
    given = parser.parse_args()
    make_process_private()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # it shares a machine with workers; updates are bound by memory
    serve(given.directory, given.index, given.host, with_parent=given.with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
