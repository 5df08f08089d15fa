"""Pipeline execution: this rank's stages, and the messages to the stages of other ranks.

Micro-batches may differ in number and shape: a small header precedes each activation. Gradients need no
header: their receiver has sent the activation they belong to.

Receives are posted as early as possible; those of unknown shape by a thread that reads their header.
gloo's own thread spins while another holds the connection's lock, and posting a receive takes that lock:
on a busy machine a late receive cost up to 3.9 ms of CPU, an early one 0.1.

Tensors of an accelerator go through the host. Its libraries know no tags, and a pair of workers makes its
sends and receives there in the order in which they were posted: a receive posted early would hold up the
sends behind it, for which the other end may be waiting.

After an error the state of the connections is unknown: build a new world and a new pipeline.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from yunlu.core.errors import ModelError
from yunlu.training.device import CPU, is_accelerator, use_device
from yunlu.training.parallel.pipeline_schedules import actions
from yunlu.training.tasks.task import logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.planning.layouts import Layout
    from yunlu.training.parallel.pipeline_schedules import Action
    from yunlu.training.single_worker import Backward, ForwardContext, LossOf
    from yunlu.training.tasks.task import Batch


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

    def expect(self, buffer: Tensor, source: int, tag: int) -> PendingReceive:
        """Start receiving a tensor of known shape."""
        if source == self._rank:
            return LocalReceive(self._local, tag)
        return _receive(buffer, self._group, source, tag)

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


def _receive(buffer: Tensor, group: Any, source: int, tag: int) -> PendingReceive:
    landing = buffer
    if is_accelerator(buffer.device):
        landing = torch.empty_like(buffer, device=CPU)
    work = dist.irecv(landing, group=group, group_src=source, tag=tag)
    return PendingReceive(buffer, work, landing=landing)


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
        use_device(device)  # a thread begins with the first one
        for message, header, queue in zip(messages, headers, queues, strict=True):
            buffer = _make_buffer(header.get(), device)
            queue.put(_receive(buffer, group, message.source, message.tag))
    except Exception as error:  # noqa: BLE001 - passed to the waiting thread
        for queue in queues:
            queue.put(error)


_HEADER, _HIDDEN, _GRADIENT, _SHARED = range(4)


class Pipeline:
    """Runs the stages of this rank, in the order of the pipeline schedule."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        group: Any,
        layout: Layout,
        rank_in_pp: int,
        shared: Mapping[str, Sequence[int]],
    ) -> None:
        """``shared``: weights held by several stages (``shared_names``)."""
        self.stages = dict(sorted(stages.items()))
        self.layout, self.rank, self.ranks = layout, rank_in_pp, layout.pp
        self.view: nn.Module = _View(self)
        weights = [weight for stage in stages.values() for weight in stage.parameters()]
        self._device = weights[0].device if weights else torch.device("cpu")
        self._transport = StageTransport(group, rank_in_pp, self._device)
        self._last = layout.stages - 1
        self._exit = _Exit(self.stages[self._last]) if self._last in self.stages else None
        self._shared = _shared_weights(self.stages, shared, self.ranks, rank_in_pp)
        self._is_matched = False
        self._pending_gradient: tuple[int, int] | None = None

    def use_transport(self, transport: StageTransport) -> None:
        """Exchange tensors by other means: a rehearsal sends none."""
        self._transport = transport

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: LossOf,
        backward: Backward,
        *,
        before_last: Callable[[int], None] | None = None,
        context: ForwardContext = nullcontext,
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of the losses computed here.

        Args:
            micros: On the device of the stages; the same on every rank of this pipeline.
            loss_of: Loss of a micro-batch, computed on the rank of the last stage.
            backward: Runs the backward pass of such a loss.
            before_last: Called with a stage before its last backward pass.
            context: Context of each forward pass: autocast.
        """
        total = torch.zeros((), device=self._device)
        self._pending_gradient = None
        activations: dict[tuple[int, int], _Activation] = {}
        left = Counter(dict.fromkeys(self.stages, len(micros)))
        order = self._order(len(micros))
        try:
            self._transport.listen(
                [self._message(*where) for kind, *where in order if kind == "forward" and where[0]]
            )
            for kind, stage, micro in order:
                if kind == "forward":
                    with context():
                        activation = self._forward(stage, micro, micros[micro], loss_of)
                    activations[stage, micro] = activation
                    if stage == self._last:
                        total += activation.output.detach()
                    continue
                left[stage] -= 1
                if before_last is not None and not left[stage]:
                    before_last(stage)
                self._backward(stage, micro, activations.pop((stage, micro)), backward)
            self._transport.wait_sent()
        finally:
            self._transport.forget()
        return total

    def forward(self, inputs: tuple[Tensor, ...] | dict[str, Tensor]) -> Tensor:
        """The logits of the last stage, on every rank; all ranks call this with the same inputs."""
        scores: Tensor | None = None
        try:
            self._transport.listen([self._message(number, 0) for number in self.stages if number])
            with torch.no_grad():
                for number, stage in self.stages.items():
                    hidden = self._transport.take(self._message(number, 0)) if number else None
                    output = stage(inputs, hidden)
                    if number == self._last:
                        scores = logits_of(output)
                    else:
                        self._send(number + 1, 0, output)
                logits = self._transport.share(scores, source=self._last % self.ranks)
            self._transport.wait_sent()
        finally:
            self._transport.forget()
        return logits

    @torch.no_grad()
    def sum_shared_gradients(self) -> None:
        """Sum the gradients of weights held by several stages, on all of them.

        A weight that no stage used gets no gradient: the optimiser would decay it otherwise.
        """
        try:
            for shared in self._shared:
                if not shared.weight.requires_grad:
                    continue
                is_used = shared.weight.grad is not None
                if shared.weight.grad is None:
                    shared.weight.grad = torch.zeros_like(shared.weight)
                mine = _local(shared.weight.grad)
                if not self._is_matched:
                    self._match(shared, mine)
                # The hosts know it: no device is waited for.
                flags = self._swap(torch.tensor([is_used]), shared.peers, shared.flag_tag)
                parts = self._swap(mine, shared.peers, shared.tag)
                # In the same order on all ranks, so that copies of a weight stay bit-equal.
                first, *others = (parts[rank].get() for rank in sorted(parts))
                mine.copy_(first)
                for part in others:
                    mine.add_(part)
                if not any(bool(flag.get()) for flag in flags.values()):
                    shared.weight.grad = None
            self._is_matched = True
            self._transport.wait_sent()
        finally:
            self._transport.forget()

    def _swap(self, mine: Tensor, peers: Sequence[int], tag: int) -> dict[int, PendingReceive]:
        """Exchange a tensor with these ranks; pending receives by rank, this rank included."""
        outgoing = mine.clone()
        for peer in (self.rank, *peers):
            self._transport.send(outgoing, peer, tag)
        return {
            peer: self._transport.expect(torch.empty_like(mine), peer, tag)
            for peer in (self.rank, *peers)
        }

    def _order(self, micros: int) -> list[Action]:
        return actions(
            self.layout.schedule,
            rank=self.rank,
            ranks=self.ranks,
            stages_per_rank=self.layout.stages_per_rank,
            micros=micros,
        )

    def _forward(
        self, stage: int, micro: int, batch: Batch, loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> _Activation:
        received = self._transport.take(self._message(stage, micro)) if stage else None
        if received is not None and received.is_floating_point():
            received.requires_grad_()
        if stage == self._last:
            assert self._exit is not None
            return _Activation(
                received=received, output=loss_of(self._exit.at(batch, received), batch)
            )
        output = self.stages[stage](batch.inputs, received)
        self._send(stage + 1, micro, output)
        # Receive posted early, so that the sender of the gradient never waits for this rank.
        buffer = torch.empty_like(output, memory_format=torch.contiguous_format).detach()
        peer, tag = self._peer(stage + 1), self._tag(_GRADIENT, stage + 1, micro)
        return _Activation(
            received=received, output=output, wait=self._transport.expect(buffer, peer, tag)
        )

    def _backward(
        self, stage: int, micro: int, activation: _Activation, backward: Callable[[Tensor], None]
    ) -> None:
        if activation.wait is None:
            backward(activation.output)
        else:
            gradient = activation.wait.get()
            for part in (_HEADER, _HIDDEN):
                self._transport.release(self._peer(stage + 1), self._tag(part, stage + 1, micro))
            if activation.output.requires_grad:
                torch.autograd.backward([activation.output], [gradient])
        if stage and activation.received is not None:
            received = activation.received
            input_gradient = torch.zeros_like(received) if received.grad is None else received.grad
            peer, tag = self._peer(stage - 1), self._tag(_GRADIENT, stage, micro)
            if self._pending_gradient is not None:
                self._transport.release(*self._pending_gradient)
            self._transport.send(input_gradient, peer, tag)
            self._pending_gradient = peer, tag

    def _send(self, stage: int, micro: int, hidden: Tensor) -> None:
        if not isinstance(hidden, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - any model's
            raise TypeError(f"stage {stage - 1} gave {type(hidden).__name__}, not a tensor")
        peer = self._peer(stage)
        self._transport.send(write_header(hidden), peer, self._tag(_HEADER, stage, micro))
        self._transport.send(hidden.detach(), peer, self._tag(_HIDDEN, stage, micro))

    def _message(self, stage: int, micro: int) -> StageMessage:
        return StageMessage(
            source=self._peer(stage - 1),
            header_tag=self._tag(_HEADER, stage, micro),
            tag=self._tag(_HIDDEN, stage, micro),
        )

    def _match(self, shared: _Shared, mine: Tensor) -> None:
        """Refuse shards of different shape before they are summed."""
        for peer in shared.peers:
            self._transport.send(write_header(mine), peer, shared.tag)
        for peer in shared.peers:
            theirs = self._transport.expect(empty_header(), peer, shared.tag).get()
            if not torch.equal(theirs, write_header(mine)):
                raise ModelError(
                    f"{shared.name} is sharded differently on the stages that hold it.",
                    hint="use untied weights, or a layout without tp or fsdp beside pp",
                )

    def _peer(self, stage: int) -> int:
        return stage % self.ranks

    def _tag(self, kind: int, stage: int, micro: int) -> int:
        return _tag(kind, micro * self.layout.stages + stage)


@dataclass(slots=True, kw_only=True)
class _Activation:
    """Input and output of a stage for the backward pass of a micro-batch."""

    received: Tensor | None
    output: Tensor
    wait: PendingReceive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    name: str
    weight: Tensor
    peers: tuple[int, ...]
    tag: int
    flag_tag: int


class _Exit(nn.Module):
    """The last stage with the interface of the full model, for the task's loss."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self._inputs: Any = None
        self._hidden: Tensor | None = None

    def at(self, batch: Batch, hidden: Tensor | None) -> nn.Module:
        self._inputs, self._hidden = batch.inputs, hidden
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.stage(self._inputs, self._hidden)


class _View(nn.Module):
    """The pipeline as a model, for evaluation: every rank calls it and gets the logits."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.stages = nn.ModuleList(pipeline.stages.values())
        self._run = pipeline.forward

    def forward(self, *placed: Tensor, **named: Tensor) -> Tensor:
        return self._run(named or placed)


def _tag(kind: int, number: int) -> int:
    return 4 * number + kind


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared_weights(
    stages: Mapping[int, nn.Module],
    shared: Mapping[str, Sequence[int]],
    ranks: int,
    rank: int,
) -> list[_Shared]:
    """Weights shared with other ranks, in the same order on all ranks."""
    held = {
        name: weight
        for stage in stages.values()
        for name, weight in stage.named_parameters()
        if name in shared
    }
    weights: list[_Shared] = []
    for number, name in enumerate(sorted(shared)):
        peers = tuple(sorted({stage % ranks for stage in shared[name]} - {rank}))
        if peers and name in held:
            weights.append(
                _Shared(
                    name=name,
                    weight=held[name],
                    peers=peers,
                    tag=_tag(_SHARED, 2 * number),
                    flag_tag=_tag(_SHARED, 2 * number + 1),
                )
            )
    return weights
