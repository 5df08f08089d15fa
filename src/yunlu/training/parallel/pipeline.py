"""The pipeline at work: this rank's stages, and what passes between them and the other ranks'.

Micro-batches may be of any number and shape, each different: a small header goes ahead of what a
stage sends on. Gradients need none; whoever waits for one has sent the tensor it belongs to.

After an error nothing is known of what the others have sent: a new world, and a new pipeline.
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
from yunlu.training.parallel.pipeline_schedules import actions
from yunlu.training.parallel.pipeline_transport import (
    StageMessage,
    StageTransport,
    empty_header,
    write_header,
)
from yunlu.training.tasks.task import logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from yunlu.planning.layout import Layout
    from yunlu.training.parallel.pipeline_schedules import Action
    from yunlu.training.parallel.pipeline_transport import PendingReceive
    from yunlu.training.tasks.task import Batch

_HEADER, _HIDDEN, _GRADIENT, _SHARED = range(4)


class Pipeline:
    """Runs the stages of this rank in step with the others of its pipeline."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        group: Any,
        layout: Layout,
        rank_in_pp: int,
        shared: Mapping[str, Sequence[int]],
    ) -> None:
        """``shared`` names the weights that live on several stages (``shared_names``)."""
        self.stages = dict(sorted(stages.items()))
        self.layout, self.rank, self.ranks = layout, rank_in_pp, layout.pp
        self.view: nn.Module = _View(self)
        weights = [weight for stage in stages.values() for weight in stage.parameters()]
        self._device = weights[0].device if weights else torch.device("cpu")
        self._wire = StageTransport(group, rank_in_pp, self._device)
        self._last = layout.stages - 1
        self._exit = _Exit(self.stages[self._last]) if self._last in self.stages else None
        self._shared = _shared_weights(self.stages, shared, self.ranks, rank_in_pp)
        self._is_matched = False
        self._gradient_on_way: tuple[int, int] | None = None

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        before_last: Callable[[int], None] | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of the losses computed here.

        Args:
            micros: On the device of the stages; the same on every rank of this pipeline.
            loss_of: The loss of a micro-batch, computed where the last stage is.
            backward: Begins the backward of such a loss.
            before_last: Called with a stage just before its last backward.
            context: Around each forward of a stage: autocast.
        """
        total = torch.zeros((), device=self._device)
        self._gradient_on_way = None
        kept: dict[tuple[int, int], _Kept] = {}
        left = Counter(dict.fromkeys(self.stages, len(micros)))
        order = self._order(len(micros))
        try:
            self._wire.listen(
                [self._letter(*where) for kind, *where in order if kind == "forward" and where[0]]
            )
            for kind, stage, micro in order:
                if kind == "forward":
                    with context():
                        found = self._forward(stage, micro, micros[micro], loss_of)
                    kept[stage, micro] = found
                    if stage == self._last:
                        total += found.made.detach()
                    continue
                left[stage] -= 1
                if before_last is not None and not left[stage]:
                    before_last(stage)
                self._backward(stage, micro, kept.pop((stage, micro)), backward)
            self._wire.settle()
        finally:
            self._wire.forget()
        return total

    def forward(self, inputs: tuple[Tensor, ...] | dict[str, Tensor]) -> Tensor:
        """The scores that the last stage gives, on every rank; all call this with the same inputs."""
        scores: Tensor | None = None
        try:
            self._wire.listen([self._letter(number, 0) for number in self.stages if number])
            with torch.no_grad():
                for number, stage in self.stages.items():
                    hidden = self._wire.take(self._letter(number, 0)) if number else None
                    made = stage(inputs, hidden)
                    if number == self._last:
                        scores = logits_of(made)
                    else:
                        self._send(number + 1, 0, made)
                found = self._wire.share(scores, source=self._last % self.ranks)
            self._wire.settle()
        finally:
            self._wire.forget()
        return found

    @torch.no_grad()
    def sum_shared_gradients(self) -> None:
        """Give each weight that lives on several stages the sum of its gradients, everywhere.

        One that no stage used has no gradient afterwards: an optimiser would decay it otherwise.
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
                flags = self._swap(
                    torch.tensor([is_used], device=self._device), shared.peers, shared.flag_tag
                )
                parts = self._swap(mine, shared.peers, shared.tag)
                # In one order on all, so that copies of a weight stay equal to the bit.
                first, *others = (parts[rank].get() for rank in sorted(parts))
                mine.copy_(first)
                for part in others:
                    mine.add_(part)
                if not any(bool(flag.get()) for flag in flags.values()):
                    shared.weight.grad = None
            self._is_matched = True
            self._wire.settle()
        finally:
            self._wire.forget()

    def _swap(self, mine: Tensor, peers: Sequence[int], tag: int) -> dict[int, PendingReceive]:
        """What each of these ranks has of the same thing, ours among them; not waited for yet."""
        kept = mine.clone()
        for peer in (self.rank, *peers):
            self._wire.send(kept, peer, tag)
        return {
            peer: self._wire.expect(torch.empty_like(mine), peer, tag)
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
    ) -> _Kept:
        given = self._wire.take(self._letter(stage, micro)) if stage else None
        if given is not None and given.is_floating_point():
            given.requires_grad_()
        if stage == self._last:
            assert self._exit is not None
            return _Kept(given=given, made=loss_of(self._exit.at(batch, given), batch))
        made = self.stages[stage](batch.inputs, given)
        self._send(stage + 1, micro, made)
        # Asked for before it can be sent, so that whoever sends a gradient never waits for us.
        room = torch.empty_like(made, memory_format=torch.contiguous_format).detach()
        peer, tag = self._peer(stage + 1), self._tag(_GRADIENT, stage + 1, micro)
        return _Kept(given=given, made=made, wait=self._wire.expect(room, peer, tag))

    def _backward(
        self, stage: int, micro: int, kept: _Kept, backward: Callable[[Tensor], None]
    ) -> None:
        if kept.wait is None:
            backward(kept.made)
        else:
            gradient = kept.wait.get()
            for part in (_HEADER, _HIDDEN):
                self._wire.release(self._peer(stage + 1), self._tag(part, stage + 1, micro))
            if kept.made.requires_grad:
                torch.autograd.backward([kept.made], [gradient])
        if stage and kept.given is not None:
            given = kept.given
            found = torch.zeros_like(given) if given.grad is None else given.grad
            peer, tag = self._peer(stage - 1), self._tag(_GRADIENT, stage, micro)
            if self._gradient_on_way is not None:
                self._wire.release(*self._gradient_on_way)
            self._wire.send(found, peer, tag)
            self._gradient_on_way = peer, tag

    def _send(self, stage: int, micro: int, hidden: Tensor) -> None:
        if not isinstance(hidden, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - any model's
            raise TypeError(f"stage {stage - 1} gave {type(hidden).__name__}, not a tensor")
        peer = self._peer(stage)
        self._wire.send(write_header(hidden), peer, self._tag(_HEADER, stage, micro))
        self._wire.send(hidden.detach(), peer, self._tag(_HIDDEN, stage, micro))

    def _letter(self, stage: int, micro: int) -> StageMessage:
        return StageMessage(
            source=self._peer(stage - 1),
            header_tag=self._tag(_HEADER, stage, micro),
            tag=self._tag(_HIDDEN, stage, micro),
        )

    def _match(self, shared: _Shared, mine: Tensor) -> None:
        """Refuse shards of different shape before they are mixed up."""
        for peer in shared.peers:
            self._wire.send(write_header(mine), peer, shared.tag)
        for peer in shared.peers:
            theirs = self._wire.expect(empty_header(), peer, shared.tag).get()
            if not torch.equal(theirs, write_header(mine)):
                raise ModelError(
                    f"{shared.name} is cut differently on the stages it lives on.",
                    hint="use untied weights, or a layout without tp or fsdp beside pp",
                )

    def _peer(self, stage: int) -> int:
        return stage % self.ranks

    def _tag(self, kind: int, stage: int, micro: int) -> int:
        return _tag(kind, micro * self.layout.stages + stage)


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What the backward of a micro-batch needs."""

    given: Tensor | None
    made: Tensor
    wait: PendingReceive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    name: str
    weight: Tensor
    peers: tuple[int, ...]
    tag: int
    flag_tag: int


class _Exit(nn.Module):
    """The last stage in the place of the whole model: a task calls it as it always does."""

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
    """The pipeline as the model it is, for evaluation: every rank calls it and gets the scores."""

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
    """In one order on all ranks; only those that other ranks hold too."""
    held = {
        name: weight
        for stage in stages.values()
        for name, weight in stage.named_parameters()
        if name in shared
    }
    found: list[_Shared] = []
    for number, name in enumerate(sorted(shared)):
        peers = tuple(sorted({stage % ranks for stage in shared[name]} - {rank}))
        if peers and name in held:
            found.append(
                _Shared(
                    name=name,
                    weight=held[name],
                    peers=peers,
                    tag=_tag(_SHARED, 2 * number),
                    flag_tag=_tag(_SHARED, 2 * number + 1),
                )
            )
    return found
