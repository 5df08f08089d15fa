"""Messages between stages on accelerators: tensors go from device to device, headers through the hosts.

The host waits for no device: sends and receives are posted, and streams wait for them. No computation
waits for a send before the end of the step, so a schedule that ends with unlimited buffers ends here too.

At most one receive is posted ahead on each P2P group. A second one would wait behind it in a queue that the
driver may share with the stream that computes.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from yunlu.training.device import is_accelerator
from yunlu.training.parallel.stage_transport import (
    MessageKind,
    PendingReceive,
    StageTransport,
    kind_of_tag,
    make_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from yunlu.training.parallel.p2p_groups import P2PGroup, P2PGroups, P2PKind
    from yunlu.training.parallel.stage_transport import StageMessage

_P2P_KINDS: dict[MessageKind, P2PKind] = {
    MessageKind.ACTIVATION: "activation",
    MessageKind.GRADIENT: "gradient",
}


class P2PTransport(StageTransport):
    """One rank's end of the connections between devices."""

    def __init__(self, group: Any, rank: int, device: torch.device, p2p_groups: P2PGroups) -> None:
        super().__init__(group, rank, device)
        self._p2p_groups = p2p_groups
        self._inboxes: dict[tuple[P2PKind, int], _P2PReceives] = {}
        self._unfinished_sends: list[tuple[int, int]] = []
        p2p_groups.open(device)

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Start sending; no stream waits for another worker."""
        p2p_group = self._p2p_group(tensor, to, tag, is_incoming=False)
        if p2p_group is None:
            super().send(tensor, to, tag)
            return
        tensor = tensor.contiguous()
        self._sending.setdefault((to, tag), []).append((p2p_group.send(tensor), tensor))

    def expect(self, like: Tensor, source: int, tag: int) -> PendingReceive:
        """Receive a tensor with the type and shape of another, when it is its turn."""
        p2p_group = self._p2p_group(like, source, tag, is_incoming=True)
        if p2p_group is None:
            return super().expect(like, source, tag)
        make = partial(torch.empty, like.shape, dtype=like.dtype, device=self._device)
        if kind_of_tag(tag) is MessageKind.SHARED:
            buffer = make()
            return PendingReceive(buffer, p2p_group.receive(buffer))
        inbox = self._inboxes["gradient", source]
        inbox.set_buffer(tag, make)
        return _NextReceive(inbox, tag)

    def listen(
        self, messages: Sequence[StageMessage], gradients: Sequence[tuple[int, int]] = ()
    ) -> None:
        """As ``StageTransport.listen``; only headers are read in the thread."""
        self._receive_headers(messages, lambda _, header: header)
        self._inboxes = {}
        for message in messages:
            make = partial(self._make, message.tag)
            inbox = self._inbox("activation", message.source)
            inbox.add(message.tag, make, is_known=partial(self._has_answer, message.tag))
        for source, tag in gradients:
            self._inbox("gradient", source).add(tag)

    def post_next_receives(self) -> None:
        """Post the next receive of each P2P group whose shape is known."""
        for inbox in self._inboxes.values():
            inbox.post_next()

    def take(self, message: StageMessage) -> Tensor:
        """Wait for the header of a tensor, and let the stream wait for the tensor."""
        return self._inboxes["activation", message.source].take(message.tag)

    def release_last(self, to: int, tag: int) -> None:
        """Drop the tensors of such sends that have ended; nobody waits for others."""
        self._unfinished_sends.append((to, tag))
        for sent in list(self._unfinished_sends):
            if all(work.is_completed() for work, _ in self._sending.get(sent, ())):
                self._unfinished_sends.remove(sent)
                self.release(*sent)

    def forget(self) -> None:
        """Drop all state, also of messages that will never arrive."""
        super().forget()
        self._inboxes = {}
        self._unfinished_sends = []

    def _make(self, tag: int) -> Tensor:
        return make_buffer(self._take_answer(tag), self._device)

    def _inbox(self, kind: P2PKind, source: int) -> _P2PReceives:
        inbox = self._inboxes.get((kind, source))
        if inbox is None:
            inbox = self._inboxes[kind, source] = _P2PReceives(
                self._p2p_groups.incoming[kind, source]
            )
        return inbox

    def _p2p_group(
        self, tensor: Tensor, peer: int, tag: int, *, is_incoming: bool
    ) -> P2PGroup | None:
        if not is_accelerator(tensor.device):
            return None
        kind, p2p_groups = _P2P_KINDS.get(kind_of_tag(tag)), self._p2p_groups
        if kind is not None:
            return (p2p_groups.incoming if is_incoming else p2p_groups.outgoing)[kind, peer]
        return p2p_groups.find_incoming(peer) if is_incoming else p2p_groups.find_outgoing(peer)


class _P2PReceives:
    """The receives of one P2P group, in the order of the schedule, which is that of the sends."""

    def __init__(self, p2p_group: P2PGroup) -> None:
        self._p2p_group = p2p_group
        self._tags: deque[int] = deque()
        self._makers: dict[int, Callable[[], Tensor]] = {}
        self._is_known: dict[int, Callable[[], bool]] = {}
        self._posted: PendingReceive | None = None

    def add(
        self,
        tag: int,
        make: Callable[[], Tensor] | None = None,
        *,
        is_known: Callable[[], bool] | None = None,
    ) -> None:
        """Add a message behind the others; ``make``, which may wait until ``is_known``, makes its buffer."""
        self._tags.append(tag)
        if make is not None:
            self._makers[tag] = make
        if is_known is not None:
            self._is_known[tag] = is_known

    def set_buffer(self, tag: int, make: Callable[[], Tensor]) -> None:
        """From now on a buffer for this message can be made."""
        self._makers[tag] = make
        self.post_next()

    def post_next(self) -> None:
        """Post the next receive, unless one is posted, or its shape is not known yet."""
        if self._posted is not None or not self._tags or self._tags[0] not in self._makers:
            return
        is_known = self._is_known.get(self._tags[0])
        if is_known is None or is_known():
            self._post()

    def take(self, tag: int) -> Tensor:
        """The next message: the current stream waits for it."""
        assert self._tags[0] == tag, "messages are waited for in the order of the schedule"
        if self._posted is None:
            self._post()
        assert self._posted is not None
        received = self._posted.get()
        self._posted = None
        self._tags.popleft()
        self.post_next()
        return received

    def _post(self) -> None:
        buffer = self._makers.pop(self._tags[0])()
        self._posted = PendingReceive(buffer, self._p2p_group.receive(buffer))


class _NextReceive(PendingReceive):
    """A receive that is posted when it is its turn."""

    def __init__(self, inbox: _P2PReceives, tag: int) -> None:
        self._inbox, self._tag = inbox, tag

    def get(self) -> Tensor:
        """Let the stream wait for the tensor."""
        return self._inbox.take(self._tag)
