"""A model laid over the workers of a world: what this one holds of it, and how a step runs there."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.training.communication.allreducer import TorchAllReducer
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.sync_batch_norm import remove_sync, synchronise_batch_norm, uncounted
from yunlu.training.parallel.tensor_slices import is_distributed, local_of
from yunlu.training.parallel.zero import OwnedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.parallel.fsdp import UsedWeights
    from yunlu.training.parallel.pipeline import Pipeline
    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch


class ParallelModel:
    """What one worker holds of a model, with the whole model's names.

    A model that is only replicated is taken as it is; to cut it up changes it for good, so every
    other layout needs a copy of its own (``blank_like``).
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        allreducer: AllReducer | None = None,
        *,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        """``summation`` adds up the gradients of replicas; torch's own where none is given."""
        layout = world.layout
        self.world, self._allreducer, self._bucket_bytes = world, allreducer, bucket_bytes
        self._is_partitioned = layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1
        self._whole = model
        self._stages: dict[int, nn.Module] = {0: model}
        self._shared: dict[str, list[int]] = {}
        if self._is_partitioned:
            # Slow to import, and replicas need none of it: a node that joins them is there sooner.
            from yunlu.training.parallel import parallelize  # noqa: PLC0415

            self._parallelize = parallelize
            self._stages, self._shared = parallelize.parallelize(model, world)
        self.parts = list(self._stages.values())
        self.weights = _trained(self.parts)
        self.leaves = [_leaf(weight) for weight in self.weights]
        self._cut_pairs = [
            (weight, leaf)
            for weight, leaf in zip(self.weights, self.leaves, strict=True)
            if weight is not leaf
        ]
        self.copies = self._count_copies()
        self.optimized = self.leaves
        self._owned: OwnedWeights | None = None
        self._used: list[UsedWeights] = []
        self._sums: dict[int, GradientAllReduce] = {}
        """By stage: each has its own last backward pass."""
        self._pipeline: Pipeline | None = None
        self.is_watched = False
        self._samples = 0
        self._connect()

    @property
    def is_partitioned(self) -> bool:
        """Whether a worker holds less than the whole model."""
        return self._is_partitioned

    @property
    def view(self) -> nn.Module:
        """The model to evaluate: all workers of a replica call it with the same inputs."""
        return self.parts[0] if self._pipeline is None else self._pipeline.view

    def step_context(self) -> AbstractContextManager[Any]:
        """Around forward and backward of a step."""
        if not self.world.layout.vocabulary:
            return nullcontext()
        return self._parallelize.sharded_loss(self._whole)

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
        *,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of this worker's losses."""
        self._samples = sum(micro.samples for micro in micros)
        for sums in self._sums.values():
            sums.is_watched = self.is_watched
        if self._pipeline is not None:
            for stage in self._stages.values():
                self._set_sync(stage, last=False)
            return self._pipeline.accumulate(
                micros, loss_of, backward, before_last=self._before_last, context=forward
            )
        model, total = self.parts[0], None
        for number, micro in enumerate(micros, start=1):
            if number == len(micros):
                self._before_last(0)
            else:
                self._set_sync(model, last=False)
            with nullcontext() if micro.counts else uncounted(), forward():
                loss = loss_of(model, micro)
            with nullcontext() if micro.counts else uncounted():
                backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def finish(self) -> None:
        """Wait until the gradients are those of all replicas, and lay them beside the leaves."""
        for sums in self._sums.values():
            sums.finish()
        for used in self._used:
            used.settle()
        if self._pipeline is not None:
            self._pipeline.sum_shared_gradients()
        for weight, leaf in self._cut_pairs:
            gradient = weight.grad
            leaf.grad = None if gradient is None else local_of(gradient)

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """See ``Arranged``: where whole gradients of replicas are added up, and exactly."""
        if not all(sums.is_exact for sums in self._sums.values()) or not self._sums:
            return ()
        layout = self.world.layout
        ours, summed = zip(*(sums.squares() for sums in self._sums.values()), strict=True)
        square, device = torch.stack(summed).sum() / layout.dp, summed[0].device
        # Workers that cut one model between them took the same samples.
        taken = self._samples**2 * layout.replicas / layout.world
        return torch.stack(ours).sum(), square, torch.tensor(taken, device=device).double()

    @property
    def exchange_s(self) -> float:
        """What adding up gradients took in the last step, hidden or not."""
        return sum(sums.exchange_s for sums in self._sums.values())

    def release_gathered(self) -> None:
        """Before weights are replaced: keep none that were gathered from others.

        After an evaluation FSDP2 still has the outermost ones, and would use them again.
        """
        if self.world.layout.fsdp > 1:
            for part in self.parts:
                self._parallelize.reshard(part)

    def publish(self) -> None:
        """After an update: bring what others updated here."""
        if self._owned is not None:
            self._owned.publish()

    def drop_gradients(self) -> None:
        """Forget the gradients, also of weights that the optimiser here does not know."""
        for weight, leaf in zip(self.weights, self.leaves, strict=True):
            weight.grad = leaf.grad = None

    def close(self) -> None:
        """Leave the weights without hooks."""
        for sums in self._sums.values():
            sums.close()
        self._sums.clear()
        for part in self.parts:
            remove_sync(part)

    def _connect(self) -> None:
        world, layout = self.world, self.world.layout
        if layout.replicas > 1:
            for part in self.parts:
                synchronise_batch_norm(part, world.adding("dp", "fsdp"))
        if layout.dp > 1 and layout.fsdp == 1:
            allreducer = self._allreducer or TorchAllReducer(world.group("dp"), world.wait_for)
            pairs = zip(self.weights, self.copies, strict=True)
            holders = {id(weight): copies // layout.dp for weight, copies in pairs}
            self._sums = {
                number: GradientAllReduce(
                    _trained([stage]),
                    allreducer,
                    bucket_bytes=self._bucket_bytes,
                    holders=holders,
                )
                for number, stage in self._stages.items()
            }
        self._owned, self.optimized = None, self.leaves
        if layout.zero1:
            self._owned = OwnedWeights(self.leaves, world.group("dp"))
            self.optimized = self._owned.owned
        if layout.fsdp > 1:
            group = world.group("dp", "fsdp")
            self._used = [self._parallelize.UsedWeights(part, group) for part in self.parts]
        if layout.pp > 1:
            self._pipeline = self._parallelize.Pipeline(
                self._stages,
                group=world.group("pp"),
                layout=layout,
                rank_in_pp=world.place.pp,
                shared=self._shared,
            )

    def _before_last(self, stage: int) -> None:
        self._set_sync(self._stages[stage], last=True)
        if stage in self._sums:
            self._sums[stage].arm()

    def _set_sync(self, stage: nn.Module, *, last: bool) -> None:
        if self.world.layout.fsdp > 1:
            self._parallelize.set_sync(stage, last=last)

    def _count_copies(self) -> list[int]:
        """How many workers hold the same as this one does of each weight."""
        layout = self.world.layout
        names = {
            id(weight): name for part in self.parts for name, weight in part.named_parameters()
        }
        counts: list[int] = []
        for weight in self.weights:
            cut = _cut_axes(weight)
            count = layout.dp * len(self._shared.get(names[id(weight)], [0]))
            count *= 1 if "fsdp" in cut else layout.fsdp
            counts.append(count * (1 if "tp" in cut else layout.tp))
        return counts


def blank_like(pattern: nn.Module) -> nn.Module:
    """A model of the same build, with weights of its own that hold anything."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(
            torch.empty_like(weight, device="cpu"), requires_grad=weight.requires_grad
        )
        for weight in pattern.parameters()
    }
    return copy.deepcopy(pattern, memo)


def pattern_of(model: nn.Module) -> nn.Module:
    """The build of a model without its weights, to make others like it from."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(
            torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad
        )
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _trained(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    found: dict[int, nn.Parameter] = {}
    for part in parts:
        found.update({id(weight): weight for weight in part.parameters() if weight.requires_grad})
    return list(found.values())


def _leaf(weight: nn.Parameter) -> Tensor:
    """What the optimiser changes: the weight, or the part of it that lies here."""
    if not is_distributed(weight):
        return weight
    return weight.to_local().detach().requires_grad_()


def _cut_axes(weight: Tensor) -> set[str]:
    if not is_distributed(weight):
        return set()
    names = weight.device_mesh.mesh_dim_names or ()
    return {
        name
        for name, placement in zip(names, weight.placements, strict=True)
        if not placement.is_replicate()
    }
