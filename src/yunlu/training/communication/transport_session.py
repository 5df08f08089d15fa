"""Messages between workers, many at a time; each has a header and a body.

The receiver knows the length of a message, or its limit; anything else is refused, as is a
wrong checksum. No input is ever executed or unpickled.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch.distributed as dist

from yunlu.core.framing import (
    HEADER_BYTES,
    FrameError,
    FrameReader,
    Header,
    encode_body,
)
from yunlu.core.secure_link import drop_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from yunlu.core.secure_link import SecureLink

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
        self._reader = FrameReader(control_bytes=0, place=self._place)
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
