"""Tensors between the ranks of a pipeline: of any shape, told apart by tags.

Everything is asked for as early as can be; what has a shape not known before, by a thread that reads
its header. gloo's own thread spins for as long as another holds the connection's lock, and asking
takes that lock: on a busy machine a message asked for late cost up to 3.9 ms of CPU, one asked for
before it came 0.1.
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
    """A tensor to come, with its header ahead of it."""

    source: int
    header_tag: int
    tag: int


class PendingReceive:
    """A tensor on its way here."""

    def __init__(self, room: Tensor, work: Any) -> None:
        self._room, self._work = room, work

    def get(self) -> Tensor:
        """The tensor, once it is there."""
        self._work.wait()
        return self._room


class LocalReceive(PendingReceive):
    """A tensor that stays on this rank."""

    def __init__(self, kept: dict[int, Tensor], tag: int) -> None:
        self._kept, self._tag = kept, tag

    def get(self) -> Tensor:
        """The tensor; sent before it is asked for."""
        return self._kept.pop(self._tag)


class StageTransport:
    """One rank's end of the connections. After an error it is of no more use: form a new world."""

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self._device = group, rank, device
        # A tensor must outlive its sending.
        self._sending: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}
        self._local: dict[int, Tensor] = {}
        self._slots: dict[int, SimpleQueue[Any]] = {}

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send; never waits."""
        if to == self._rank:
            self._local[tag] = tensor.clone()
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
        self._sending.setdefault((to, tag), []).append((work, tensor))

    def expect(self, room: Tensor, source: int, tag: int) -> PendingReceive:
        """Begin to receive a tensor of known shape."""
        if source == self._rank:
            return LocalReceive(self._local, tag)
        return PendingReceive(room, dist.irecv(room, group=self._group, group_src=source, tag=tag))

    def listen(self, letters: Sequence[StageMessage]) -> None:
        """Begin to receive tensors of any shape; ``take`` gives them."""
        letters = [letter for letter in letters if letter.source != self._rank]
        if not letters:
            return
        headers = [
            self.expect(empty_header(), letter.source, letter.header_tag) for letter in letters
        ]
        self._slots = {letter.tag: SimpleQueue() for letter in letters}
        # Ends by itself: with the last letter, or with the connections.
        Thread(
            target=_listen,
            args=(self._group, self._device, letters, headers, self._slots),
            name="yunlu-pipeline",
            daemon=True,
        ).start()

    def take(self, letter: StageMessage) -> Tensor:
        """A tensor that was listened for, once it is there."""
        if letter.source == self._rank:
            return self._local.pop(letter.tag)
        found = self._slots.pop(letter.tag).get()
        if isinstance(found, BaseException):
            raise found
        return found.get()

    def share(self, tensor: Tensor | None, *, source: int) -> Tensor:
        """One rank's tensor, on all."""
        if self._group is None:
            assert tensor is not None
            return tensor
        header = empty_header() if tensor is None else write_header(tensor)
        dist.broadcast(header, group=self._group, group_src=source)
        room = _room(header, self._device) if tensor is None else tensor.detach().contiguous()
        dist.broadcast(room, group=self._group, group_src=source)
        return room

    def release(self, to: int, tag: int) -> None:
        """Let go of what has surely arrived, or does so without anyone's doing."""
        for work, _ in self._sending.pop((to, tag), ()):
            work.wait()

    def settle(self) -> None:
        """Wait until everything sent has arrived."""
        for to, tag in list(self._sending):
            self.release(to, tag)

    def forget(self) -> None:
        """Let go of everything; after a fault, of what will never arrive."""
        self._sending.clear()
        self._local.clear()
        self._slots = {}


def empty_header() -> Tensor:
    """Room for a header."""
    return torch.empty(_AXES + 2, dtype=torch.int64)


def write_header(tensor: Tensor) -> Tensor:
    """Type and shape of a tensor, in a tensor that is always of one shape."""
    shape = list(tensor.shape)
    padding = [0] * (_AXES - len(shape))
    return torch.tensor([_DTYPES.index(tensor.dtype), len(shape), *shape, *padding])


def _room(header: Tensor, device: torch.device) -> Tensor:
    kind, axes, *shape = header.tolist()
    return torch.empty(shape[:axes], dtype=_DTYPES[kind], device=device)


def _listen(
    group: Any,
    device: torch.device,
    letters: Sequence[StageMessage],
    headers: Sequence[PendingReceive],
    slots: Mapping[int, SimpleQueue[Any]],
) -> None:
    queues = [slots[letter.tag] for letter in letters]
    try:
        for letter, header, queue in zip(letters, headers, queues, strict=True):
            room = _room(header.get(), device)
            work = dist.irecv(room, group=group, group_src=letter.source, tag=letter.tag)
            queue.put(PendingReceive(room, work))
    except Exception as error:  # noqa: BLE001 - told to whoever waits for a letter
        for queue in queues:
            queue.put(error)
