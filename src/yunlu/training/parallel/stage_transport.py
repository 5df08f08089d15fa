"""Messages between the stages of a pipeline, through the hosts.

A small header precedes each activation: micro-batches may differ in number and shape. Gradients need no
header: their receiver has sent the activation they belong to.

Receives are posted as early as possible; those of unknown shape by a thread that reads their header.
gloo's own thread spins while another holds the connection's lock, and posting a receive takes that lock:
on a busy machine a late receive cost up to 3.9 ms of CPU, an early one 0.1.

Between devices the tensors themselves take P2P groups (``p2p_transport.py``).
"""

from __future__ import annotations

from enum import IntEnum
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from yunlu.training.device import CPU, is_accelerator, use_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class MessageKind(IntEnum):
    """What a message holds; part of its tag."""

    HEADER = 0
    ACTIVATION = 1
    GRADIENT = 2
    SHARED = 3


def tag_of(kind: MessageKind, number: int) -> int:
    """The tag of a message."""
    return len(MessageKind) * number + kind


def kind_of_tag(tag: int) -> MessageKind:
    """What a message with this tag holds."""
    return MessageKind(tag % len(MessageKind))


class StageMessage(NamedTuple):
    """An expected tensor with a header before it."""

    source: int
    header_tag: int
    tag: int


class PendingReceive:
    """A pending receive."""

    def __init__(self, buffer: Tensor, work: Any, *, landing: Tensor | None = None) -> None:
        self._buffer, self._work = buffer, work
        self._landing = buffer if landing is None else landing

    def get(self) -> Tensor:
        """Wait for the tensor."""
        self._work.wait()
        if self._landing is not self._buffer:
            self._buffer.copy_(self._landing)
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
        """Start sending; never waits for another worker."""
        if to == self._rank:
            self._local[tag] = tensor.clone()
            return
        tensor = tensor.cpu().contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
        self._sending.setdefault((to, tag), []).append((work, tensor))

    def expect(self, like: Tensor, source: int, tag: int) -> PendingReceive:
        """Start receiving a tensor with the type, shape and device of another."""
        if source == self._rank:
            return LocalReceive(self._local, tag)
        return self._receive(_empty_like(like), source, tag)

    def listen(
        self, messages: Sequence[StageMessage], gradients: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Start receiving tensors of any shape; ``take`` returns them.

        Args:
            messages: In the order in which they will be taken.
            gradients: Sources and tags of the gradients that will be expected, in the order in which
                they will be waited for.
        """
        del gradients  # tags tell them apart, in whatever order they come
        self._receive_headers(messages, self._post)

    def post_next_receives(self) -> None:
        """Between two actions: post what can be received next."""

    def take(self, message: StageMessage) -> Tensor:
        """Wait for a tensor passed to ``listen``."""
        if message.source == self._rank:
            return self._local.pop(message.tag)
        return self._take_answer(message.tag).get()

    def share(self, tensor: Tensor | None, *, source: int) -> Tensor:
        """Broadcast one rank's tensor."""
        if self._group is None:
            assert tensor is not None
            return tensor
        header = empty_header() if tensor is None else write_header(tensor)
        dist.broadcast(header, group=self._group, group_src=source)
        buffer = (
            make_buffer(header, self._device) if tensor is None else tensor.detach().contiguous()
        )
        dist.broadcast(buffer, group=self._group, group_src=source)
        return buffer

    def release(self, to: int, tag: int) -> None:
        """Complete the sends to a rank with a tag, and drop their tensors."""
        for work, _ in self._sending.pop((to, tag), ()):
            work.wait()

    def release_last(self, to: int, tag: int) -> None:
        """As ``release``, for a send whose receiver posts its receives early."""
        self.release(to, tag)

    def wait_sent(self) -> None:
        """Wait for all sends."""
        for to, tag in list(self._sending):
            self.release(to, tag)

    def forget(self) -> None:
        """Drop all state, also of messages that will never arrive."""
        self._sending.clear()
        self._local.clear()
        self._slots = {}

    def _receive(self, buffer: Tensor, source: int, tag: int) -> PendingReceive:
        landing = buffer
        if is_accelerator(buffer.device):
            landing = torch.empty_like(buffer, device=CPU)
        work = dist.irecv(landing, group=self._group, group_src=source, tag=tag)
        return PendingReceive(buffer, work, landing=landing)

    def _post(self, message: StageMessage, header: Tensor) -> PendingReceive:
        return self._receive(make_buffer(header, self._device), message.source, message.tag)

    def _receive_headers(
        self, messages: Sequence[StageMessage], answer: Callable[[StageMessage, Tensor], object]
    ) -> None:
        """Read the headers of messages in a thread; ``_take_answer`` returns its answers to them."""
        messages = [message for message in messages if message.source != self._rank]
        if not messages:
            return
        headers = [
            StageTransport.expect(self, empty_header(), message.source, message.header_tag)
            for message in messages
        ]
        queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in messages]
        self._slots = {message.tag: queue for message, queue in zip(messages, queues, strict=True)}

        def listen() -> None:
            try:
                use_device(self._device)  # a thread begins with the first one
                for message, header, queue in zip(messages, headers, queues, strict=True):
                    queue.put(answer(message, header.get()))
            except Exception as error:  # noqa: BLE001 - passed to the waiting thread
                for queue in queues:
                    queue.put(error)

        # Ends by itself: with the last message, or with the connections.
        Thread(target=listen, name="yunlu-pipeline", daemon=True).start()

    def _has_answer(self, tag: int) -> bool:
        return not self._slots[tag].empty()

    def _take_answer(self, tag: int) -> Any:
        answer = self._slots.pop(tag).get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def empty_header() -> Tensor:
    """Buffer for a header."""
    return torch.empty(_AXES + 2, dtype=torch.int64)


def write_header(tensor: Tensor) -> Tensor:
    """Type and shape of a tensor, as a tensor of fixed shape."""
    shape = list(tensor.shape)
    padding = [0] * (_AXES - len(shape))
    return torch.tensor([_DTYPES.index(tensor.dtype), len(shape), *shape, *padding])


def make_buffer(header: Tensor, device: torch.device) -> Tensor:
    """A tensor as the header says."""
    kind, axes, *shape = header.tolist()
    return torch.empty(shape[:axes], dtype=_DTYPES[kind], device=device)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
