"""Point-to-point transport between the ranks of a pipeline: tensors of any shape, matched by tags.

Receives are posted as early as possible; those of unknown shape by a thread that reads their header.
gloo's own thread spins while another holds the connection's lock, and posting a receive takes that lock:
on a busy machine a late receive cost up to 3.9 ms of CPU, an early one 0.1.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
_AXES = 8


class StageMessage(NamedTuple):
    """An expected tensor with a header before it."""

    source: int
    header_tag: int
    tag: int


class PendingReceive:
    """A pending receive."""

    def __init__(self, buffer: Tensor, work: Any) -> None:
        self._buffer, self._work = buffer, work

    def get(self) -> Tensor:
        """Wait for the tensor."""
        self._work.wait()
        return self._buffer


class LocalReceive(PendingReceive):
    """A tensor sent from this rank to itself."""

    def __init__(self, sent: dict[int, Tensor], tag: int) -> None:
        self._sent, self._tag = sent, tag

    def get(self) -> Tensor:
        """The tensor; it was sent before."""
        return self._sent.pop(self._tag)


class StageTransport:
    """One rank's end of the connections. Unusable after an error: form a new world."""

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device
        # Tensors must live until they are sent.
        self._sending: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}
        self._local: dict[int, Tensor] = {}
        self._slots: dict[int, SimpleQueue[Any]] = {}

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Start sending; never blocks."""
        if to == self._rank:
            self._local[tag] = tensor.clone()
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
        self._sending.setdefault((to, tag), []).append((work, tensor))

    def expect(self, buffer: Tensor, source: int, tag: int) -> PendingReceive:
        """Start receiving a tensor of known shape."""
        if source == self._rank:
            return LocalReceive(self._local, tag)
        return PendingReceive(
            buffer, dist.irecv(buffer, group=self._group, group_src=source, tag=tag)
        )

    def listen(self, messages: Sequence[StageMessage]) -> None:
        """Start receiving tensors of any shape; ``take`` returns them."""
        messages = [message for message in messages if message.source != self._rank]
        if not messages:
            return
        headers = [
            self.expect(empty_header(), message.source, message.header_tag) for message in messages
        ]
        self._slots = {message.tag: SimpleQueue() for message in messages}
        # Ends by itself: with the last message, or with the connections.
        Thread(
            target=_listen,
            args=(self._group, self._device, messages, headers, self._slots),
            name="yunlu-pipeline",
            daemon=True,
        ).start()

    def take(self, message: StageMessage) -> Tensor:
        """Wait for a tensor passed to ``listen``."""
        if message.source == self._rank:
            return self._local.pop(message.tag)
        received = self._slots.pop(message.tag).get()
        if isinstance(received, BaseException):
            raise received
        return received.get()

    def share(self, tensor: Tensor | None, *, source: int) -> Tensor:
        """Broadcast one rank's tensor."""
        if self._group is None:
            assert tensor is not None
            return tensor
        header = empty_header() if tensor is None else write_header(tensor)
        dist.broadcast(header, group=self._group, group_src=source)
        buffer = (
            _make_buffer(header, self._device) if tensor is None else tensor.detach().contiguous()
        )
        dist.broadcast(buffer, group=self._group, group_src=source)
        return buffer

    def release(self, to: int, tag: int) -> None:
        """Complete the sends to a rank with a tag, and drop their tensors."""
        for work, _ in self._sending.pop((to, tag), ()):
            work.wait()

    def wait_sent(self) -> None:
        """Wait for all sends."""
        for to, tag in list(self._sending):
            self.release(to, tag)

    def forget(self) -> None:
        """Drop all state, also of messages that will never arrive."""
        self._sending.clear()
        self._local.clear()
        self._slots = {}


def empty_header() -> Tensor:
    """Buffer for a header."""
    return torch.empty(_AXES + 2, dtype=torch.int64)


def write_header(tensor: Tensor) -> Tensor:
    """Type and shape of a tensor, as a tensor of fixed shape."""
    shape = list(tensor.shape)
    padding = [0] * (_AXES - len(shape))
    return torch.tensor([_DTYPES.index(tensor.dtype), len(shape), *shape, *padding])


def _make_buffer(header: Tensor, device: torch.device) -> Tensor:
    kind, axes, *shape = header.tolist()
    return torch.empty(shape[:axes], dtype=_DTYPES[kind], device=device)


def _listen(
    group: Any,
    device: torch.device,
    messages: Sequence[StageMessage],
    headers: Sequence[PendingReceive],
    slots: Mapping[int, SimpleQueue[Any]],
) -> None:
    queues = [slots[message.tag] for message in messages]
    try:
        for message, header, queue in zip(messages, headers, queues, strict=True):
            buffer = _make_buffer(header.get(), device)
            work = dist.irecv(buffer, group=group, group_src=message.source, tag=message.tag)
            queue.put(PendingReceive(buffer, work))
    except Exception as error:  # noqa: BLE001 - passed to the waiting thread
        for queue in queues:
            queue.put(error)
