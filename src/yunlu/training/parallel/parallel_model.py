"""A model distributed over the workers of a world: data, tensor and pipeline parallelism, sharding."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.training.communication.allreducer import TorchAllReducer
from yunlu.training.device import sum_type
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.placement import move_in_place
from yunlu.training.parallel.redistribute import redistribute
from yunlu.training.parallel.sync_batch_norm import remove_sync, synchronise_batch_norm, uncounted
from yunlu.training.parallel.zero import OwnedWeights
from yunlu.training.tensor_slices import is_distributed, join_groups, local_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.engine import Engine
    from yunlu.training.parallel.fsdp import UsedWeights
    from yunlu.training.parallel.pipeline import Pipeline
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import Backward, ForwardContext, LossOf
    from yunlu.training.tasks.task import Batch


class ParallelModel:
    """One worker's part of a model, with the parameter names of the full model.

    A replicated model is used unchanged; partitioning changes it for good, so other layouts need a
    copy of their own (``blank_like``).
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
        self._is_partitioned = not layout.is_replicated
        self._whole = model
        self._stages: dict[int, nn.Module] = {0: model}
        self._shared: dict[str, list[int]] = {}
        if self._is_partitioned:
            # Slow to import, and not needed by replicas: a joining node starts sooner.
            from yunlu.training.parallel import parallelize  # noqa: PLC0415

            self._parallelize = parallelize
            self._stages, self._shared = parallelize.parallelize(model, world)
            for stage in self._stages.values():
                move_in_place(stage, world.device)
        self.parts = list(self._stages.values())
        self.weights = _trained(self.parts)
        self.leaves = [_leaf(weight) for weight in self.weights]
        self._sharded_pairs = [
            (weight, leaf)
            for weight, leaf in zip(self.weights, self.leaves, strict=True)
            if weight is not leaf
        ]
        self.copies = self._count_copies()
        self.optimized = self.leaves
        self._owned: OwnedWeights | None = None
        self._used: list[UsedWeights] = []
        self._allreduces: dict[int, GradientAllReduce] = {}
        """By stage: each stage has its own last backward pass."""
        self._pipeline: Pipeline | None = None
        self.is_watched = False
        self._samples = 0
        self._connect()

    @property
    def is_partitioned(self) -> bool:
        """Whether each worker holds only a part of the model."""
        return self._is_partitioned

    @property
    def view(self) -> nn.Module:
        """The model to evaluate: all workers of a replica call it with the same inputs."""
        return self.parts[0] if self._pipeline is None else self._pipeline.view

    def step_context(self) -> AbstractContextManager[Any]:
        """Context of forward and backward of a step."""
        if not self.world.layout.vocabulary:
            return nullcontext()
        return self._parallelize.sharded_loss(self._whole)

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: LossOf,
        backward: Backward,
        *,
        forward: ForwardContext,
    ) -> Tensor:
        """Forward and backward over the micro-batches; the sum of this worker's losses."""
        self._samples = sum(micro.samples for micro in micros)
        for allreduce in self._allreduces.values():
            allreduce.is_watched = self.is_watched
        if self._pipeline is not None:
            for stage in self._stages.values():
                self._set_sync(stage, last=False)
            # Not only the loss, which moves its batch itself: a stage takes the inputs as they are.
            here = [micro.to(self.world.device) for micro in micros]
            return self._pipeline.accumulate(
                here, loss_of, backward, before_last=self._before_last, context=forward
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
        """Wait for the gradient reduction over all replicas, and assign the gradients to the leaves."""
        for allreduce in self._allreduces.values():
            allreduce.finish()
        for used in self._used:
            used.clear_unused()
        if self._pipeline is not None:
            self._pipeline.sum_shared_gradients()
        for weight, leaf in self._sharded_pairs:
            gradient = weight.grad
            leaf.grad = None if gradient is None else local_of(gradient)

    def gradient_squares(self) -> tuple[Tensor, ...]:
        """See ``WrappedModel``; only for exact reductions of unsharded gradients."""
        if (
            not all(allreduce.is_exact for allreduce in self._allreduces.values())
            or not self._allreduces
        ):
            return ()
        layout = self.world.layout
        local, summed = zip(
            *(allreduce.squares() for allreduce in self._allreduces.values()), strict=True
        )
        square, device = torch.stack(summed).sum() / layout.dp, summed[0].device
        # Workers of one replica process the same samples.
        taken = self._samples**2 * layout.replicas / layout.world
        batches = torch.full((), taken, dtype=sum_type(device), device=device)
        return torch.stack(local).sum(), square, batches

    @property
    def exchange_s(self) -> float:
        """Seconds of the gradient reduction in the last step, overlapped or not."""
        return sum(allreduce.exchange_s for allreduce in self._allreduces.values())

    def release_gathered(self) -> None:
        """Drop gathered weights, before weights are replaced.

        After an evaluation FSDP2 keeps the outermost ones gathered, and would reuse them.
        """
        if self.world.layout.fsdp > 1:
            for part in self.parts:
                self._parallelize.reshard(part)

    def publish(self) -> None:
        """After an update: receive the weights that other workers updated."""
        if self._owned is not None:
            self._owned.publish()

    def drop_gradients(self) -> None:
        """Clear all gradients, also of weights that other workers update."""
        for weight, leaf in zip(self.weights, self.leaves, strict=True):
            weight.grad = leaf.grad = None

    def close(self) -> None:
        """Remove the hooks from the weights."""
        for allreduce in self._allreduces.values():
            allreduce.close()
        self._allreduces.clear()
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
            self._allreduces = {
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
                rank_in_pp=world.coordinates.pp,
                shared=self._shared,
                p2p_groups=world.p2p_groups,
            )

    def _before_last(self, stage: int) -> None:
        self._set_sync(self._stages[stage], last=True)
        if stage in self._allreduces:
            self._allreduces[stage].arm()

    def _set_sync(self, stage: nn.Module, *, last: bool) -> None:
        if self.world.layout.fsdp > 1:
            self._parallelize.set_sync(stage, last=last)

    def _count_copies(self) -> list[int]:
        """Number of workers that hold the same shard of each weight."""
        layout = self.world.layout
        names = {
            id(weight): name for part in self.parts for name, weight in part.named_parameters()
        }
        counts: list[int] = []
        for weight in self.weights:
            sharded = _sharded_axes(weight)
            count = layout.dp * len(self._shared.get(names[id(weight)], [0]))
            count *= 1 if "fsdp" in sharded else layout.fsdp
            counts.append(count * (1 if "tp" in sharded else layout.tp))
        return counts


def blank_like(template: nn.Module) -> nn.Module:
    """A model of the same architecture, with uninitialised weights."""
    return _copy_without_weights(template, "cpu")


def template_of(model: nn.Module) -> nn.Module:
    """The architecture of a model without its weights (meta tensors), as a template for copies."""
    return _copy_without_weights(model, "meta")


def _copy_without_weights(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(
            torch.empty_like(weight, device=device), requires_grad=weight.requires_grad
        )
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _trained(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    trained: dict[int, nn.Parameter] = {}
    for part in parts:
        trained.update({id(weight): weight for weight in part.parameters() if weight.requires_grad})
    return list(trained.values())


def _leaf(weight: nn.Parameter) -> Tensor:
    """The tensor that the optimiser updates: the weight, or its local shard."""
    if not is_distributed(weight):
        return weight
    return weight.to_local().detach().requires_grad_()


def _sharded_axes(weight: Tensor) -> set[str]:
    if not is_distributed(weight):
        return set()
    names = weight.device_mesh.mesh_dim_names or ()
    return {
        name
        for name, placement in zip(names, weight.placements, strict=True)
        if not placement.is_replicate()
    }


def gather_model(engine: Engine, template: nn.Module) -> nn.Module | None:
    """The full model on the leader, None on the others; all workers call this."""
    held = join_groups({"model": engine.state.model})
    if not engine.world.is_leader:
        redistribute(held, [])
        return None
    model = blank_like(template)
    aliases = engine.state.aliases
    redistribute(held, join_groups({"model": weights_of([model], aliases=aliases)}))
    return model
