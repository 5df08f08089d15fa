"""Transport: connections between the workers of a generation, for messages of known length.

gloo passes messages too, but its waits cannot be interrupted, its small messages take milliseconds,
and it does not count bytes. Here every wait ends: with the message, with the connection, with
``abort``, or after a time limit without progress.

A message has a header and a body; its receiver knows its length, or its limit. Anything else is refused,
as is a wrong checksum. No input is ever executed or unpickled. Workers exchange addresses through a store
and prove the secret to each other: whoever answers at a false address cannot.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch.distributed as dist

from yunlu.core.framing import (
    HEADER_BYTES,
    FrameError,
    FrameReader,
    Header,
    encode_body,
    receive_frame,
    send_frame,
)
from yunlu.core.secure_link import HANDSHAKE_S, SecureLink, derive_secret, drop_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Data = Buffer | NDArray[Any]
    """Contiguous memory. NumPy arrays are buffers, but type checkers know this only from Python 3.12 on."""

_TAGS = 1 << 32
_POLL_S = 1.0
_VIEWS_AT_ONCE = 64


class LinkLostError(dist.DistNetworkError):
    """A connection ended, or was silent for too long."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"Lost worker {peer}: {reason}.")
        self.peer = peer


class RefusedMessageError(LinkLostError):
    """An unexpected message was received: the connection cannot be used any more."""


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received on a transport."""

    sent_bytes: int = 0
    """Including headers, without TCP overhead."""
    received_bytes: int = 0
    messages: int = 0
    """Messages sent."""


class SessionTransport(Protocol):
    """What a session needs of a transport."""

    traffic: Traffic
    patience_s: float

    @property
    def links(self) -> Mapping[int, SecureLink]:
        """Connection to each other worker."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether every wait is to end."""
        ...


@dataclass(slots=True)
class IncomingMessage:
    """A message to be received."""

    body: memoryview | None
    """Buffer; None until its length is known."""
    limit_bytes: int
    then: Callable[[], object] | None


class _Inbox:
    """Expected messages of one worker, by channel, and the one being received."""

    def __init__(self, tag: int) -> None:
        self.channels: dict[int, deque[IncomingMessage]] = {}
        self._reader = FrameReader(control_bytes=0, allocate=self._place)
        self._tag, self._channel = tag, 0

    def add(self, channel: int, message: IncomingMessage) -> None:
        """Expect a message."""
        queue = self.channels.get(channel)
        if queue is None:
            queue = self.channels[channel] = deque()
        queue.append(message)

    def receive_buffers(self) -> list[memoryview]:
        """Buffers to receive into: header and body in one call, if the body is certain."""
        if len(self.channels) == 1:
            (queue,) = self.channels.values()
            if queue[0].body:
                return self._reader.buffers(queue[0].body)
        return self._reader.buffers()

    def advance(self, count: int) -> IncomingMessage | None:
        """So many bytes were received; returns the message if complete."""
        if self._reader.advance(count) is None:
            return None
        queue = self.channels[self._channel]
        message = queue.popleft()
        if not queue:
            del self.channels[self._channel]
        return message

    def _place(self, header: Header) -> memoryview:
        if header.tag != self._tag or header.channel not in self.channels:
            raise FrameError(f"received message {header.tag}, expected {self._tag}")
        self._channel = header.channel
        message, length = self.channels[header.channel][0], header.body_bytes
        if message.body is None:
            if length > message.limit_bytes:
                raise FrameError(f"received {length} bytes, the limit is {message.limit_bytes}")
            message.body = memoryview(bytearray(length))
        elif length != len(message.body):
            raise FrameError(f"received {length} bytes, expected {len(message.body)}")
        return message.body


class TransportSession:
    """Concurrent messages; those from one worker to another keep their order within a channel.

    Operations start inside the ``with`` block and are complete when it ends. After a failure
    the connections it used are shut, possibly within messages, so that the waiting peers
    fail at once and pass the failure on.
    """

    def __init__(self, transport: SessionTransport, tag: int) -> None:
        self._transport = transport
        self._tag = tag % _TAGS
        self._outgoing: dict[int, deque[memoryview]] = {}
        self._incoming: dict[int, _Inbox] = {}
        self._used: set[int] = set()
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._peers: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._run()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._shut_used_sockets()

    def send(self, peer: int, data: Data, *, channel: int = 0) -> None:
        """Send a message; the memory must not change until it has arrived."""
        body = view_bytes(data)
        traffic = self._transport.traffic
        traffic.messages += 1
        traffic.sent_bytes += HEADER_BYTES + len(body)
        self._used.add(peer)
        queue = self._outgoing.get(peer)
        if queue is None:
            queue = self._outgoing[peer] = deque()
        is_first = not queue
        queue.extend(encode_body(body, channel=channel, tag=self._tag))
        if is_first:
            self._push(peer, queue)

    def receive(
        self,
        peer: int,
        into: Data,
        then: Callable[[], object] | None = None,
        *,
        channel: int = 0,
    ) -> None:
        """Receive a message into ``into``, then call ``then``."""
        self._expect(peer, channel, IncomingMessage(view_bytes(into), 0, then))

    def receive_some(self, peer: int, limit_bytes: int) -> IncomingMessage:
        """Receive a message of at most so many bytes; its body is set afterwards."""
        message = IncomingMessage(None, limit_bytes, None)
        self._expect(peer, 0, message)
        return message

    def _expect(self, peer: int, channel: int, message: IncomingMessage) -> None:
        self._used.add(peer)
        inbox = self._incoming.get(peer)
        if inbox is None:
            inbox = self._incoming[peer] = _Inbox(self._tag)
        inbox.add(channel, message)
        self._watch(peer, select.POLLIN, is_wanted=True)

    def _run(self) -> None:
        deadline = time.monotonic() + self._transport.patience_s
        while self._watched:
            if self._pull_pending():
                deadline = time.monotonic() + self._transport.patience_s
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                reason = f"no progress for {self._transport.patience_s:.3g} s"
                raise LinkLostError(min(self._watched), reason)
            ready = self._poll.poll(min(left_s, _POLL_S) * 1000)
            if self._transport.is_aborted:
                raise LinkLostError(min(self._watched), "the exchange was aborted")
            for descriptor, events in ready:
                self._move(self._peers[descriptor], events)
            if ready:
                deadline = time.monotonic() + self._transport.patience_s

    def _pull_pending(self) -> bool:
        """Take what links have received already: their sockets need not become readable again."""
        is_any = False
        for peer, events in list(self._watched.items()):
            if events & select.POLLIN and self._is_pending(peer):
                self._pull(peer, self._incoming[peer])
                is_any = True
        return is_any

    def _is_pending(self, peer: int) -> bool:
        try:
            return self._transport.links[peer].pending
        except OSError as error:
            raise self._lost(peer, error) from error

    def _move(self, peer: int, events: int) -> None:
        has_ended = events & ~(select.POLLIN | select.POLLOUT)
        watched = self._watched.get(peer, 0)
        if watched & select.POLLIN and (has_ended or events & select.POLLIN):
            self._pull(peer, self._incoming[peer])
        if watched & select.POLLOUT and (has_ended or events & select.POLLOUT):
            self._push(peer, self._outgoing[peer])

    def _push(self, peer: int, queue: deque[memoryview]) -> None:
        try:
            views = (
                queue
                if len(queue) <= _VIEWS_AT_ONCE
                else [queue[number] for number in range(_VIEWS_AT_ONCE)]
            )
            sent = self._transport.links[peer].sendmsg(views)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._lost(peer, error) from error
        drop_sent(queue, sent)
        self._watch(peer, select.POLLOUT, is_wanted=bool(queue))

    def _pull(self, peer: int, inbox: _Inbox) -> None:
        try:
            count = self._transport.links[peer].recvmsg_into(inbox.receive_buffers())[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(peer, error) from error
        if count == 0:
            raise self._lost(peer, None)
        try:
            message = inbox.advance(count)
        except FrameError as error:
            raise RefusedMessageError(peer, str(error)) from error
        if message is None:
            return
        assert message.body is not None
        self._transport.traffic.received_bytes += HEADER_BYTES + len(message.body)
        if not inbox.channels:
            self._watch(peer, select.POLLIN, is_wanted=False)
        if message.then is not None:
            message.then()

    def _watch(self, peer: int, event: int, *, is_wanted: bool) -> None:
        before = self._watched.get(peer, 0)
        after = before | event if is_wanted else before & ~event
        if after == before:
            return
        descriptor = self._transport.links[peer].fileno()
        if after:
            self._watched[peer] = after
            self._peers[descriptor] = peer
            self._poll.register(descriptor, after)
        else:
            # Stop polling: an idle connection that ends would wake the loop forever.
            del self._watched[peer]
            self._poll.unregister(descriptor)

    def _shut_used_sockets(self) -> None:
        for peer in self._used:
            shut_link(self._transport.links[peer])

    def _lost(self, peer: int, error: OSError | None) -> LinkLostError:
        if self._transport.is_aborted:
            return LinkLostError(peer, "the exchange was aborted")
        return LinkLostError(peer, "the connection ended" if error is None else str(error))


def shut_link(link: SecureLink) -> None:
    """Shut a connection at once; from any thread."""
    try:
        link.shutdown()
    except OSError:
        return  # already closed


def view_bytes(data: Data) -> memoryview:
    """The memory as bytes."""
    view = memoryview(cast("Buffer", data))
    if view.ndim == 1 and view.format == "B":
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


_RENDEZVOUS_S = 30.0
_PATIENCE_S = 600.0


class Transport:
    """Connections to all other workers; used by one thread at a time, except for ``abort``.

    After an error the connections in use are closed; the others are unaffected.

    Args:
        rank: Of this worker.
        hosts: Address of each worker, by rank; workers with equal addresses share a machine.
        links: Non-blocking socket to each other worker.
        patience_s: Time without progress after which peers are lost.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        links: Mapping[int, SecureLink],
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.rank, self.hosts = rank, hosts
        self.patience_s = patience_s
        self.traffic = Traffic()
        self.links = dict(links)
        self.is_aborted = False

    @property
    def size(self) -> int:
        """Number of workers, including this one."""
        return len(self.hosts)

    def session(self, *, tag: int = 0) -> TransportSession:
        """Open a session of concurrent messages; see ``TransportSession``."""
        return TransportSession(self, tag)

    def send(self, peer: int, data: Data, *, tag: int = 0) -> None:
        """Send one message, and wait until it is handed to the system."""
        self.exchange({peer: data}, {}, tag=tag)

    def receive(self, peer: int, into: Data, *, tag: int = 0) -> None:
        """Receive a message into ``into``."""
        self.exchange({}, {peer: into}, tag=tag)

    def receive_some(self, peer: int, *, limit_bytes: int) -> bytearray:
        """Receive a message of at most so many bytes."""
        return self.gather({}, [peer], limit_bytes=limit_bytes)[peer]

    def exchange(
        self, outgoing: Mapping[int, Data], incoming: Mapping[int, Data], *, tag: int = 0
    ) -> None:
        """Send and receive concurrently, at most one message to and from each other worker.

        Args:
            outgoing: Data for each peer; unchanged until this returns.
            incoming: Buffer for each peer; filled exactly.
            tag: Number of the exchange; peers must use the same.
        """
        with self.session(tag=tag) as session:
            for peer, data in outgoing.items():
                session.send(peer, data)
            for peer, into in incoming.items():
                session.receive(peer, into)

    def gather(
        self,
        outgoing: Mapping[int, Data],
        sources: Iterable[int],
        *,
        limit_bytes: int,
        tag: int = 0,
    ) -> dict[int, bytearray]:
        """Send, and receive messages of unknown length."""
        with self.session(tag=tag) as session:
            for peer, data in outgoing.items():
                session.send(peer, data)
            arrivals = {peer: session.receive_some(peer, limit_bytes) for peer in sources}
        return {
            peer: cast("bytearray", arrival.body.obj)
            for peer, arrival in arrivals.items()
            if arrival.body is not None
        }

    def control_congestion(self, name: str) -> bool:
        """Set the TCP congestion control of all connections; returns whether the system has it.

        BBR estimates a rate per connection, and connections that share a slow link do not fill it:
        ``direct`` over 4 hosts at 100 Mbit/s took 1.2 times as long as with Reno. Over fast links that
        drop packets it is the other way round, so choose it only after measuring.
        """
        if sys.platform != "linux":
            return False
        try:
            for link in self.links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
        return True

    def abort(self) -> None:
        """Abort all current and later waits; from any thread."""
        self.is_aborted = True
        for link in self.links.values():
            shut_link(link)

    def close(self) -> None:
        """Close the connections; called by the thread that uses them, or after it."""
        self.is_aborted = True
        for link in self.links.values():
            link.close()


def connect(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    name: str = "transport",
    secret: bytes,
    within_s: float = _RENDEZVOUS_S,
    patience_s: float = _PATIENCE_S,
    check: Callable[[], object] | None = None,
) -> Transport:
    """Connect to all other workers through the store; called by all of them.

    Args:
        store: A torch store.
        rank: Of this worker.
        size: Number of workers.
        host: Address at which peers reach this worker.
        name: Of this transport: unique in the store, and for its connections.
        secret: Of these workers: they prove it to each other.
        within_s: Time limit for peers to connect.
        patience_s: See ``Transport``.
        check: Called while waiting for peers; may raise to end the wait.
    """
    hosts, links = connect_all(
        store, rank, size, host, name=name, secret=secret, within_s=within_s, check=check
    )
    return Transport(rank, hosts, links, patience_s=patience_s)


_HELLO_BYTES = 64
_MAX_PENDING = 64
_CONNECT_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    host: str
    port: int


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
        return min(self.left_s(peer), _CONNECT_POLL_S)


@dataclass(slots=True)
class _IncomingCall:
    """A connection that has not sent its complete hello."""

    link: SecureLink
    until: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)
    """When it is closed if it has not sent it by then."""
    reader: FrameReader = field(default_factory=lambda: FrameReader(control_bytes=_HELLO_BYTES))
    rank: object = None
    """Rank that it says it has."""


def connect_all(
    store: Any,
    rank: int,
    size: int,
    host: str,
    *,
    name: str,
    secret: bytes,
    within_s: float,
    check: Callable[[], object] | None = None,
) -> tuple[tuple[str, ...], dict[int, SecureLink]]:
    """Address of every worker, and a connection to each peer."""
    deadline = _Deadline(time.monotonic() + within_s, check)
    secret = derive_secret(secret, "transport", name)
    links: dict[int, SecureLink] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        ExitStack() as undo,
        socket.create_server((host, 0), family=family, backlog=size + _MAX_PENDING) as listener,
    ):
        undo.callback(_close_all, links)
        own = _PeerAddress(host, listener.getsockname()[1])
        store.set(f"{name}/{rank}", f"{own.port} {host}")
        # The own address is known: a late worker must blame a missing peer, not itself.
        addresses = [
            own if peer == rank else _read_address(store, f"{name}/{peer}", peer, deadline)
            for peer in range(size)
        ]
        for peer in range(rank):
            links[peer] = _connect(addresses[peer], secret, rank, deadline, peer)
        _accept_peers(listener, links, range(rank + 1, size), secret, deadline)
        for link in links.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        undo.pop_all()
    return tuple(address.host for address in addresses), links


def _close_all(links: dict[int, SecureLink]) -> None:
    for link in links.values():
        link.close()


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
    port, host = bytes(store.get(key)).decode().split(" ")
    return _PeerAddress(host, int(port))


def _connect(
    address: _PeerAddress, secret: bytes, rank: int, deadline: _Deadline, peer: int
) -> SecureLink:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=deadline.left_s(peer))
    except OSError as error:
        raise LinkLostError(peer, str(error)) from error
    try:
        link = SecureLink(sock, secret, is_server=False)
        while not link.is_authenticated:
            link.settimeout(deadline.poll_s(peer))
            with suppress(TimeoutError):  # the peer still connects to others
                link.handshake()
        link.settimeout(deadline.left_s(peer))
        send_frame(link, {"rank": rank})
    except OSError as error:
        sock.close()
        raise LinkLostError(peer, str(error)) from error
    except BaseException:
        sock.close()
        raise
    return link


def _accept_peers(
    listener: socket.socket,
    links: dict[int, SecureLink],
    peers: range,
    secret: bytes,
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
                    _accept(listener, secret, poll, calls)
                elif _is_received(call):
                    poll.unregister(descriptor)
                    del calls[descriptor]
                    _admit(call, links, missing)
                else:
                    writes = select.POLLOUT if call.link.wants_write else 0
                    poll.modify(descriptor, select.POLLIN | writes)
            _drop_silent(poll, calls)
    finally:
        for call in calls.values():
            call.link.close()


def _accept(
    listener: socket.socket, secret: bytes, poll: select.poll, calls: dict[int, _IncomingCall]
) -> None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return  # closed meanwhile
    sock.setblocking(False)
    if len(calls) >= _MAX_PENDING:
        # Drop the oldest silent connection: peers send their hello at once.
        _drop(next(iter(calls)), poll, calls)
    calls[sock.fileno()] = _IncomingCall(SecureLink(sock, secret, is_server=True))
    poll.register(sock, select.POLLIN)


def _drop_silent(poll: select.poll, calls: dict[int, _IncomingCall]) -> None:
    now = time.monotonic()
    for descriptor in [number for number, call in calls.items() if now >= call.until]:
        _drop(descriptor, poll, calls)


def _drop(descriptor: int, poll: select.poll, calls: dict[int, _IncomingCall]) -> None:
    poll.unregister(descriptor)
    calls.pop(descriptor).link.close()


def _is_received(call: _IncomingCall) -> bool:
    """Whether the hello is complete or the connection ended."""
    try:
        call.rank = receive_frame(call.link, call.reader).control.get("rank")
    except BlockingIOError:
        return False
    except Exception:  # noqa: BLE001 (whatever a stranger sends ends only its connection)
        return True
    return True


def _admit(call: _IncomingCall, links: dict[int, SecureLink], missing: list[int]) -> None:
    if type(call.rank) is int and call.rank in missing and call.rank not in links:
        links[call.rank] = call.link
    else:
        call.link.close()  # unauthenticated; the peer may still connect
