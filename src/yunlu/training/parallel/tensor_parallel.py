"""Tensor parallelism: each weight matrix is sharded across workers that process the same samples.

Inputs and outputs of the model are plain and equal on every worker of the ``tp`` axis. Activations between
the layers are plain too, except with sequence parallelism: then they are DTensors, which know the full
length even where it does not divide.

Sharded weights are DTensors. Replicated ones stay plain; their gradient is complete and equal everywhere,
because every worker computes it from the same activations. Two kinds of weight see only a part of their
activations on each worker: norms under sequence parallelism, and norms of single heads. These are DTensors
too, and a hook sums their gradient over the workers before accumulation (FSDP2 replaces weights, and so
loses the hook, but converts gradients to the placement of the weight by itself). So the gradient of any
weight has the weight's placement.

Dropout: workers of one ``tp`` axis must draw the same random numbers. For sharded activations, each draws
the full mask and takes its part, so that a model drops the same elements as on one worker.

Logits may be sharded over the vocabulary. torch's ``loss_parallel`` has no label smoothing, needs the
backward pass inside it, and stays enabled after an error inside it; so the loss is computed here.
Shapes: N targets, V vocabulary, v the local part of it.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from yunlu.core.errors import ModelError
from yunlu.training.models.networks import MLP
from yunlu.training.models.transformer import (
    Attention,
    Block,
    CausalTransformer,
    FeedForward,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.tensor_parallel_plans import (
    TRANSFORMERS,
    Styles,
    find_head,
    find_styles,
    tied_weights,
    why_not_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


_UNCOUNTED = -1


@dataclass(slots=True)
class LogitsHandling:
    """How the logits of a sharded head are returned."""

    mesh: DeviceMesh
    may_stay_sharded: bool
    are_kept_sharded: bool = False
    """Only inside a loss that supports sharded logits."""

    def convert(self, cut: DTensor) -> Tensor:
        """The logits, gathered on every worker unless kept sharded."""
        return cut if self.are_kept_sharded else make_plain(cut)


class HeadInput(Tensor):
    """A plain tensor that can be multiplied with a sharded weight: the input of a model's head.

    The head is a product that the model computes itself, with a weight that may be the embedding's:
    there is no layer for a hook.
    """

    handling: LogitsHandling

    @classmethod
    def of(cls, x: Tensor, handling: LogitsHandling) -> HeadInput:
        """The same values."""
        entering = x.as_subclass(cls)
        entering.handling = handling
        return entering

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """All functions except that product see a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if func is functional.linear and isinstance(args[1], DTensor):
                x: HeadInput = args[0]
                plain = x.as_subclass(Tensor)
                return multiply_with_head(plain, *args[1:], handling=x.handling, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def multiply_with_head(x: Tensor, *weights: Any, handling: LogitsHandling, **named: Any) -> Tensor:
    """The logits of a plain tensor."""
    replicated = DTensor.from_local(x, handling.mesh, [Replicate()], run_check=False)
    logits: Any = functional.linear(replicated, *weights, **named)
    return handling.convert(logits)


class ShardedLoss(TorchFunctionMode):
    """Mode in which ``cross_entropy`` accepts logits sharded over the classes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept ``cross_entropy``; pass everything else through."""
        if func is functional.cross_entropy and isinstance(args[0], DTensor):
            return sharded_cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sharded_cross_entropy(
    input: DTensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **_: Any,
) -> Tensor:
    """``cross_entropy`` of logits ``(N, V)`` sharded over the columns.

    Other shardings and rare options are computed on gathered logits.
    """
    placement = input.placements[0]
    is_sharded = placement.is_shard(1) and input.ndim == 2 and target.ndim == 1
    if not is_sharded or weight is not None or reduction == "none":
        return functional.cross_entropy(
            make_plain(input),
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    counted_N = target != ignore_index
    target_N = target.where(counted_N, _UNCOUNTED)
    total: Any = _ShardedCrossEntropy.apply(
        input.to_local(), target_N, label_smoothing, input.device_mesh
    )
    return total if reduction == "sum" else total / counted_N.sum()


def make_plain(x: Tensor) -> Tensor:
    """The full tensor of a possibly sharded one, the same on every worker."""
    return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x


class _ShardedCrossEntropy(torch.autograd.Function):
    """Two small all-reduces instead of gathering all logits (Shoeybi et al. 2019, section 3)."""

    @staticmethod
    def forward(
        ctx: Any, z_Nv: Tensor, target_N: Tensor, smoothing: float, mesh: DeviceMesh
    ) -> Tensor:
        group, here = mesh.get_group(), z_Nv.shape[1]
        classes, first = here * mesh.size(), here * mesh.get_local_rank()
        top_N = z_Nv.amax(dim=1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
        shares_Nv = (z_Nv - top_N[:, None]).exp_()
        counted_N = target_N != _UNCOUNTED
        is_here_N = (target_N >= first) & (target_N < first + here)
        place_N = (target_N - first).where(is_here_N, 0)
        true_N = z_Nv.gather(1, place_N[:, None])[:, 0].where(is_here_N, 0)
        sums_3N = torch.stack((shares_Nv.sum(dim=1), true_N, z_Nv.sum(dim=1)))
        dist.all_reduce(sums_3N, group=group)
        total_N, true_N, all_N = sums_3N
        shares_Nv /= total_N[:, None]
        log_N = top_N + total_N.log()
        loss_N = log_N - (1 - smoothing) * true_N
        if smoothing:  # label smoothing spreads this weight over all classes
            loss_N -= smoothing / classes * all_N
        ctx.save_for_backward(shares_Nv, place_N, is_here_N, counted_N)
        ctx.smoothing, ctx.classes = smoothing, classes
        return loss_N.where(counted_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shares_Nv, place_N, is_here_N, counted_N = ctx.saved_tensors
        grad_Nv = shares_Nv - ctx.smoothing / ctx.classes
        true_N = is_here_N.to(grad_Nv.dtype) * (1 - ctx.smoothing)
        grad_Nv.scatter_add_(1, place_N[:, None], -true_N[:, None])
        grad_Nv *= (counted_N * grads[0])[:, None]
        return grad_Nv, None, None, None, None


_LENGTH = -2
"""Sequence dimension of ``(B, L, D)``, or ``(T, D)`` for packed samples."""

_sharded_heads: WeakKeyDictionary[nn.Module, LogitsHandling] = WeakKeyDictionary()


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, vocabulary: bool = False
) -> None:
    """Shard a model in place; every worker of the mesh holds the same weights before.

    Args:
        model: Not wrapped in anything yet; ``fully_shard`` may follow.
        mesh: One axis.
        sequence: Also shard the activations between the matrices (Korthikanti et al. 2022, section 4.2.2).
        vocabulary: Keep the logits sharded inside ``sharded_loss``; no effect where
            ``find_head`` finds no layer that is split.

    Raises:
        ModelError: The model cannot be sharded this many ways.
    """
    ways = mesh.size()
    if reason := why_not_tensor(model, ways, sequence=sequence):
        raise ModelError(
            f"{type(model).__name__} cannot be split {ways} ways: {reason}.",
            hint="choose a layout without tp: dp and fsdp take any model",
        )
    styles = find_styles(model, ways, sequence=sequence)
    head = find_head(model, styles)
    handling = LogitsHandling(mesh, may_stay_sharded=vocabulary and head is not None)
    is_trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    tied = tied_weights(model)
    is_builtin = isinstance(model, TRANSFORMERS)
    plan = _torch_styles(styles, sequence=sequence, inside_head=None if is_builtin else head)
    if isinstance(model, MLP):
        # Reduced by us: torch would return a pending sum.
        unreduced = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        plan.update({name: unreduced for name, style in styles.items() if style == "rowwise"})
    parallelize_module(model, mesh, plan, src_data_rank=None)
    _tie_again(model, tied)
    if isinstance(model, TRANSFORMERS):
        _connect_transformer(model, mesh, handling if head else None, sequence=sequence)
    elif isinstance(model, MLP):
        _connect_mlp(model, mesh, styles)
    elif head is not None:
        _change_output(model.get_submodule(head), handling.convert)
    for name, weight in model.named_parameters():
        # torch makes every norm trainable under sequence parallelism.
        weight.requires_grad_(is_trained[name])
        _keep_placement(weight)
    _sharded_heads[model] = handling


def sharded_loss(model: nn.Module) -> AbstractContextManager[None]:
    """Context of forward pass and loss: logits stay sharded, and ``cross_entropy`` accepts them.

    The loss is a plain number, the same on every worker; the backward pass may run outside. Without effect
    for a model whose logits are not sharded.
    """
    handling = _sharded_heads.get(model)
    return (
        nullcontext()
        if handling is None or not handling.may_stay_sharded
        else _keep_sharded(handling)
    )


@contextmanager
def _keep_sharded(handling: LogitsHandling) -> Generator[None]:
    handling.are_kept_sharded = True
    try:
        with ShardedLoss():
            yield
    finally:
        handling.are_kept_sharded = False


class ShardedDropout(nn.Dropout):
    """Dropout of sharded activations."""

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__(p)
        self._mesh = mesh

    def forward(self, input: Tensor) -> Tensor:
        """A plain tensor is treated as an even shard of the last dimension."""
        if not self.training or self.p == 0:
            return input
        if not isinstance(input, DTensor):
            replicated = (*input.shape[:-1], input.shape[-1] * self._mesh.size())
            return input * self._draw(input, torch.Size(replicated), input.ndim - 1)
        local, (placement,) = input.to_local(), input.placements
        assert isinstance(placement, Shard)
        dropped = local * self._draw(local, input.shape, placement.dim)
        return DTensor.from_local(
            dropped,
            self._mesh,
            [placement],
            run_check=False,
            shape=input.shape,
            stride=input.stride(),
        )

    def _draw(self, local: Tensor, replicated: torch.Size, axis: int) -> Tensor:
        keep = 1 - self.p
        drawn = local.new_empty(replicated).bernoulli_(keep).div_(keep)
        first = min(
            -(-replicated[axis] // self._mesh.size()) * self._mesh.get_local_rank(),
            replicated[axis],
        )
        return drawn.narrow(axis, first, local.shape[axis])


def _torch_styles(
    styles: Styles, *, sequence: bool, inside_head: str | None
) -> dict[str, ParallelStyle]:
    reduced = (
        RowwiseParallel(output_layouts=Shard(_LENGTH), use_local_output=False)
        if sequence
        else RowwiseParallel()
    )
    known: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": reduced,
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        # The head dimension takes the place of the sequence: each worker normalises its own heads.
        "replicated_with_grad_allreduce": SequenceParallel(
            sequence_dim=_LENGTH, use_local_output=True
        ),
    }
    plan = {name: known[style] for name, style in styles.items()}
    if inside_head is not None:
        plan[inside_head] = ColwiseParallel(use_local_output=False)
    return plan


def _connect_transformer(
    model: nn.Module, mesh: DeviceMesh, handling: LogitsHandling | None, *, sequence: bool
) -> None:
    """Add the gather and shard hooks to the built-in transformers."""

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *memory = args
        replicated = _replicate(x, mesh)
        # Once for query, key and value: their gradients are summed before they are reduced.
        return replicated, *(
            replicated if other is x else _replicate(other, mesh) for other in memory
        )

    def shard(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _shard_sequence(args[0], mesh), *args[1:]

    for module in list(model.modules()):
        if isinstance(module, Attention | FeedForward):
            module.register_forward_pre_hook(gather)
        elif sequence and isinstance(module, Block):
            module.register_forward_pre_hook(shard)
            module.dropout = ShardedDropout(module.dropout.p, mesh)
    if sequence:
        norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
        style = SequenceParallel(sequence_dim=_LENGTH)
        parallelize_module(model, mesh, dict.fromkeys(norms, style), src_data_rank=None)
        for norm in _last_norms(model):
            # A norm on its own, as in a pipeline stage, gets a plain input.
            norm.register_forward_pre_hook(shard, prepend=True)
            _change_output(norm, make_plain)
    if handling is not None:
        _change_output(_last_norms(model)[-1], partial(HeadInput.of, handling=handling))


def _change_output(module: nn.Module, change: Callable[[Any], Tensor]) -> None:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Tensor:
        return change(output)

    module.register_forward_hook(hook)


def _last_norms(model: nn.Module) -> list[nn.Module]:
    """Norms after which the full sequence is needed; the last one precedes the head."""
    if isinstance(model, Seq2SeqTransformer):
        return [model.encoder_norm, model.decoder_norm]
    assert isinstance(model, CausalTransformer | TransformerClassifier)
    return [model.norm]


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def _connect_mlp(model: MLP, mesh: DeviceMesh, styles: Styles) -> None:
    is_sharded = False
    for index, layer in enumerate(model.layers):
        if isinstance(layer, nn.Linear):
            is_sharded = styles.get(f"layers.{index}") == "colwise"
            _change_output(layer, make_plain)
        elif is_sharded and isinstance(layer, nn.Dropout):
            model.layers[index] = ShardedDropout(layer.p, mesh)


def _replicate(x: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Replicate()])
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _shard_sequence(x: Tensor, mesh: DeviceMesh) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Shard(_LENGTH)])


def _tie_again(model: nn.Module, tied: list[list[tuple[str, str]]]) -> None:
    """Restore tied weights: sharding gives each layer a weight of its own."""
    for (first, key), *others in tied:
        weight = model.get_submodule(first).get_parameter(key)
        for name, other in others:
            model.get_submodule(name).register_parameter(other, weight)


def _keep_placement(weight: nn.Parameter) -> None:
    if not isinstance(weight, DTensor) or not weight.requires_grad:
        return
    placements = weight.placements

    def to_placement(gradient: Any) -> Any:
        if gradient.placements == placements:
            return gradient
        return gradient.redistribute(placements=placements)

    hook: Callable[..., Any] = weight.register_hook
    hook(to_placement)
