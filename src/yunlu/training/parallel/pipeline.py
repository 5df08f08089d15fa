"""Pipeline execution: this rank's stages, and their order.

Micro-batches may differ in number and shape. Tensors between stages of different ranks are messages of a
transport (``stage_transport.py``).

After an error the state of the connections is unknown: build a new world and a new pipeline.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from yunlu.core.errors import ModelError
from yunlu.training.parallel.p2p_transport import P2PTransport
from yunlu.training.parallel.pipeline_schedules import actions
from yunlu.training.parallel.stage_transport import (
    MessageKind,
    PendingReceive,
    StageMessage,
    StageTransport,
    empty_header,
    tag_of,
    write_header,
)
from yunlu.training.tasks.task import logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.planning.layouts import Layout
    from yunlu.training.parallel.p2p_groups import P2PGroups
    from yunlu.training.parallel.pipeline_schedules import Action
    from yunlu.training.single_worker import Backward, ForwardContext, LossOf
    from yunlu.training.tasks.task import Batch


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
        p2p_groups: P2PGroups | None = None,
    ) -> None:
        """``shared``: weights held by several stages (``shared_names``); ``P2P groups``: between devices."""
        self.stages = dict(sorted(stages.items()))
        self.layout, self.rank, self.ranks = layout, rank_in_pp, layout.pp
        self.view: nn.Module = _View(self)
        weights = [weight for stage in stages.values() for weight in stage.parameters()]
        self._device = weights[0].device if weights else torch.device("cpu")
        self._transport = (
            StageTransport(group, rank_in_pp, self._device)
            if p2p_groups is None
            else P2PTransport(group, rank_in_pp, self._device, p2p_groups)
        )
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
                [self._message(*where) for kind, *where in order if kind == "forward" and where[0]],
                [
                    self._gradient(*where)
                    for kind, *where in order
                    if kind == "backward" and where[0] != self._last
                ],
            )
            for kind, stage, micro in order:
                self._transport.post_next_receives()
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
                # All of them: gloo reads nothing more from a worker once a receive from it was dropped.
                used = [bool(flag.get()) for flag in flags.values()]
                if not any(used):
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
        return {peer: self._transport.expect(mine, peer, tag) for peer in (self.rank, *peers)}

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
        wait = self._transport.expect(output, *self._gradient(stage, micro))
        return _Activation(received=received, output=output, wait=wait)

    def _backward(
        self, stage: int, micro: int, activation: _Activation, backward: Callable[[Tensor], None]
    ) -> None:
        if activation.wait is None:
            backward(activation.output)
        else:
            gradient = activation.wait.get()
            for part in (MessageKind.HEADER, MessageKind.ACTIVATION):
                self._transport.release(self._peer(stage + 1), self._tag(part, stage + 1, micro))
            if activation.output.requires_grad:
                torch.autograd.backward([activation.output], [gradient])
        if stage and activation.received is not None:
            received = activation.received
            input_gradient = torch.zeros_like(received) if received.grad is None else received.grad
            peer, tag = self._peer(stage - 1), self._tag(MessageKind.GRADIENT, stage, micro)
            if self._pending_gradient is not None:
                self._transport.release_last(*self._pending_gradient)
            self._transport.send(input_gradient, peer, tag)
            self._pending_gradient = peer, tag

    def _send(self, stage: int, micro: int, hidden: Tensor) -> None:
        if not isinstance(hidden, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - any model's
            raise TypeError(f"stage {stage - 1} gave {type(hidden).__name__}, not a tensor")
        peer = self._peer(stage)
        self._transport.send(
            write_header(hidden), peer, self._tag(MessageKind.HEADER, stage, micro)
        )
        self._transport.send(hidden.detach(), peer, self._tag(MessageKind.ACTIVATION, stage, micro))

    def _message(self, stage: int, micro: int) -> StageMessage:
        return StageMessage(
            source=self._peer(stage - 1),
            header_tag=self._tag(MessageKind.HEADER, stage, micro),
            tag=self._tag(MessageKind.ACTIVATION, stage, micro),
        )

    def _gradient(self, stage: int, micro: int) -> tuple[int, int]:
        """Source and tag of the gradient of a stage's output."""
        return self._peer(stage + 1), self._tag(MessageKind.GRADIENT, stage + 1, micro)

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

    def _tag(self, kind: MessageKind, stage: int, micro: int) -> int:
        return tag_of(kind, micro * self.layout.stages + stage)


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
                    tag=tag_of(MessageKind.SHARED, 2 * number),
                    flag_tag=tag_of(MessageKind.SHARED, 2 * number + 1),
                )
            )
    return weights
