"""Messages between workers, any number at a time, each a header and bytes.

Who receives knows how long a message must be, or how long it may be; anything else is refused, as is a
wrong checksum. Nothing that comes in is ever run or unpickled.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch.distributed as dist
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Data = Buffer | NDArray[Any]
    """Contiguous memory. NumPy's arrays are buffers, but say so to type checkers from Python 3.12 on."""

MAGIC, VERSION = b"YW", 1
_HEADER = struct.Struct("<2sBBIQQ")
_CHANNEL_AT = 3
_TAGS = 1 << 32
_LOOK_S = 1.0
_VIEWS_AT_ONCE = 64


class LinkLostError(dist.DistNetworkError):
    """A connection ended, or nothing came over it for too long."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"Lost worker {peer}: {reason}.")
        self.peer = peer


class RefusedMessageError(LinkLostError):
    """Something came that was not what was to come: the connection is of no more use."""


@dataclass(slots=True)
class Traffic:
    """What went over a wire since it was made."""

    sent_bytes: int = 0
    """Headers included; not what TCP adds."""
    received_bytes: int = 0
    messages: int = 0
    """Sent ones."""


class SessionTransport(Protocol):
    """What a flow needs of a wire."""

    traffic: Traffic
    patience_s: float

    @property
    def links(self) -> Mapping[int, socket.socket]:
        """The connection to each other worker."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether every wait is to end."""
        ...


@dataclass(slots=True)
class IncomingMessage:
    """A message that is to come."""

    body: memoryview | None
    """Where it goes; none until its length is known."""
    limit_bytes: int
    then: Callable[[], object] | None


class _Inbox:
    """What is to come from one worker, by channel, and how far the message at hand has come."""

    def __init__(self) -> None:
        self.channels: dict[int, deque[IncomingMessage]] = {}
        self.header = memoryview(bytearray(_HEADER.size))
        self.filled = 0
        self.current: IncomingMessage | None = None
        self.checksum = 0

    def add(self, channel: int, arrival: IncomingMessage) -> None:
        """Expect one more."""
        queue = self.channels.get(channel)
        if queue is None:
            queue = self.channels[channel] = deque()
        queue.append(arrival)

    def places(self) -> list[memoryview]:
        """Where what comes next goes: header and body in one call, if there is no doubt which body."""
        if self.filled >= _HEADER.size:
            assert self.current is not None
            assert self.current.body is not None
            return [self.current.body[self.filled - _HEADER.size :]]
        header = self.header[self.filled :]
        if len(self.channels) == 1:
            (queue,) = self.channels.values()
            if queue[0].body:
                return [header, queue[0].body]
        return [header]

    def take(self) -> IncomingMessage:
        """The message at hand, which is whole."""
        queue = self.channels[self.header[_CHANNEL_AT]]
        arrival = queue.popleft()
        if not queue:
            del self.channels[self.header[_CHANNEL_AT]]
        self.filled, self.current = 0, None
        return arrival


class TransportSession:
    """Messages that follow from one another; those from one worker to another keep their order in a channel.

    What is asked for inside a ``with`` starts there, and has come and gone when it ends. After a failure
    the connections it used are shut, in the middle of messages as they may be: who waits at their
    other ends learns of it at once, and passes it on.
    """

    def __init__(self, ends: SessionTransport, tag: int) -> None:
        self._ends = ends
        self._tag = tag % _TAGS
        self._leaving: dict[int, deque[memoryview]] = {}
        self._coming: dict[int, _Inbox] = {}
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
                self._hang_up()

    def send(self, peer: int, data: Data, *, channel: int = 0) -> None:
        """Send a message, from memory that stays as it is until it must have arrived."""
        body = view_bytes(data)
        header = _HEADER.pack(MAGIC, VERSION, channel, self._tag, len(body), _checksum(body))
        traffic = self._ends.traffic
        traffic.messages += 1
        traffic.sent_bytes += len(header) + len(body)
        self._used.add(peer)
        queue = self._leaving.get(peer)
        if queue is None:
            queue = self._leaving[peer] = deque()
        is_first = not queue
        queue.append(memoryview(header))
        if len(body):
            queue.append(body)
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
        """Receive a message that fills ``into``; ``then`` is called when it has."""
        self._expect(peer, channel, IncomingMessage(view_bytes(into), 0, then))

    def receive_some(self, peer: int, limit_bytes: int) -> IncomingMessage:
        """Receive a message of at most so many bytes: it has a body afterwards."""
        arrival = IncomingMessage(None, limit_bytes, None)
        self._expect(peer, 0, arrival)
        return arrival

    def _expect(self, peer: int, channel: int, arrival: IncomingMessage) -> None:
        self._used.add(peer)
        inbox = self._coming.get(peer)
        if inbox is None:
            inbox = self._coming[peer] = _Inbox()
        inbox.add(channel, arrival)
        self._watch(peer, select.POLLIN, is_wanted=True)

    def _run(self) -> None:
        until = time.monotonic() + self._ends.patience_s
        while self._watched:
            left_s = until - time.monotonic()
            if left_s <= 0:
                reason = f"nothing moved for {self._ends.patience_s:.3g} s"
                raise LinkLostError(min(self._watched), reason)
            ready = self._poll.poll(min(left_s, _LOOK_S) * 1000)
            if self._ends.is_aborted:
                raise LinkLostError(min(self._watched), "the exchange was given up")
            for descriptor, events in ready:
                self._move(self._peers[descriptor], events)
            if ready:
                until = time.monotonic() + self._ends.patience_s

    def _move(self, peer: int, events: int) -> None:
        has_ended = events & ~(select.POLLIN | select.POLLOUT)
        watched = self._watched.get(peer, 0)
        if watched & select.POLLIN and (has_ended or events & select.POLLIN):
            self._pull(peer, self._coming[peer])
        if watched & select.POLLOUT and (has_ended or events & select.POLLOUT):
            self._push(peer, self._leaving[peer])

    def _push(self, peer: int, queue: deque[memoryview]) -> None:
        try:
            views = (
                queue
                if len(queue) <= _VIEWS_AT_ONCE
                else [queue[number] for number in range(_VIEWS_AT_ONCE)]
            )
            sent = self._ends.links[peer].sendmsg(views)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._lost(peer, error) from error
        while queue and sent >= len(queue[0]):
            sent -= len(queue.popleft())
        if sent:
            queue[0] = queue[0][sent:]
        self._watch(peer, select.POLLOUT, is_wanted=bool(queue))

    def _pull(self, peer: int, inbox: _Inbox) -> None:
        try:
            count = self._ends.links[peer].recvmsg_into(inbox.places())[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(peer, error) from error
        if count == 0:
            raise self._lost(peer, None)
        inbox.filled += count
        if inbox.filled < _HEADER.size:
            return
        if inbox.current is None:
            inbox.current = self._open(peer, inbox)
        body = inbox.current.body
        assert body is not None
        if inbox.filled < _HEADER.size + len(body):
            return
        if _checksum(body) != inbox.checksum:
            raise RefusedMessageError(peer, "a message came damaged")
        self._ends.traffic.received_bytes += inbox.filled
        arrival = inbox.take()
        if not inbox.channels:
            self._watch(peer, select.POLLIN, is_wanted=False)
        if arrival.then is not None:
            arrival.then()

    def _open(self, peer: int, inbox: _Inbox) -> IncomingMessage:
        magic, version, channel, tag, length, inbox.checksum = _HEADER.unpack(inbox.header)
        if (magic, version) != (MAGIC, VERSION):
            raise RefusedMessageError(peer, "what came is no message of Yunlu's")
        if tag != self._tag or channel not in inbox.channels:
            raise RefusedMessageError(peer, f"message {tag} came in place of message {self._tag}")
        arrival = inbox.channels[channel][0]
        if arrival.body is None:
            if length > arrival.limit_bytes:
                raise RefusedMessageError(
                    peer, f"a message of {length} bytes came, {arrival.limit_bytes} may"
                )
            arrival.body = memoryview(bytearray(length))
        elif length != len(arrival.body):
            raise RefusedMessageError(
                peer, f"a message of {length} bytes came, not of {len(arrival.body)}"
            )
        return arrival

    def _watch(self, peer: int, event: int, *, is_wanted: bool) -> None:
        before = self._watched.get(peer, 0)
        after = before | event if is_wanted else before & ~event
        if after == before:
            return
        descriptor = self._ends.links[peer].fileno()
        if after:
            self._watched[peer] = after
            self._peers[descriptor] = peer
            self._poll.register(descriptor, after)
        else:
            # A connection that nothing is awaited of may end, and would wake us for ever.
            del self._watched[peer]
            self._poll.unregister(descriptor)

    def _hang_up(self) -> None:
        for peer in self._used:
            shut_socket(self._ends.links[peer])

    def _lost(self, peer: int, error: OSError | None) -> LinkLostError:
        if self._ends.is_aborted:
            return LinkLostError(peer, "the exchange was given up")
        return LinkLostError(peer, "the connection ended" if error is None else str(error))


def shut_socket(link: socket.socket) -> None:
    """End a connection at once; from any thread."""
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def view_bytes(data: Data) -> memoryview:
    """The same memory as bytes."""
    view = memoryview(cast("Buffer", data))
    if view.ndim == 1 and view.format == "B":
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _checksum(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)
