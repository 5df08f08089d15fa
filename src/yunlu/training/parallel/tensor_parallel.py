"""Tensor parallelism: each weight matrix cut across workers that compute the same samples together.

What enters and leaves a cut model is plain and the same on every worker of the ``tp`` axis. Between the
layers, activations are plain too, unless the sequence is cut: then they are DTensors, which know their
whole length even where it does not divide.

Weights that are cut are DTensors. Those that are not stay plain, and their gradient is whole and the same
everywhere because every worker computes it from the same whole activations. Two kinds of weight see only
a part of their activations on each worker: norms, where the sequence is cut, and norms of single heads.
These are DTensors too, and a hook sums their gradient over the workers before it is accumulated (FSDP2
replaces weights, and so loses the hook, but brings gradients to the placement of the weight by itself).
So the gradient of any weight has the placement of the weight, and its local part is the right one.

Dropout: workers of one ``tp`` axis must draw the same random numbers. Where activations are cut, each
draws for the whole and takes its part, so that a model drops what it would drop on one worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from yunlu.core.errors import ModelError
from yunlu.training.models.mlp import MLP
from yunlu.training.models.seq2seq import Seq2SeqTransformer
from yunlu.training.models.transformer import (
    Attention,
    Block,
    CausalTransformer,
    FeedForward,
    TransformerClassifier,
)
from yunlu.training.parallel.tensor_parallel_plans import (
    TRANSFORMERS,
    Styles,
    find_head,
    find_styles,
    tied_weights,
    why_not_tensor,
    why_not_vocabulary,
)
from yunlu.training.parallel.vocab_parallel import CutLoss, HeadInput, Scores, make_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "apply_tensor_parallel",
    "make_plain",
    "sharded_loss",
    "why_not_tensor",
    "why_not_vocabulary",
]

_LENGTH = -2
"""The axis of the sequence: ``(B, L, D)``, or ``(T, D)`` where samples are packed."""

_cut_heads: WeakKeyDictionary[nn.Module, Scores] = WeakKeyDictionary()


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, vocabulary: bool = False
) -> None:
    """Cut a model, in place: every worker of the mesh holds the same weights before, its part after.

    Args:
        model: Not wrapped in anything yet; ``fully_shard`` may follow.
        mesh: Of one axis.
        sequence: Also cut the activations between the matrices (Korthikanti et al. 2022, section 4.2.2).
        vocabulary: Leave the scores cut inside ``sharded_loss``; without effect where
            ``why_not_vocabulary`` has a reason.

    Raises:
        ModelError: The model cannot be cut so many ways.
    """
    ways = mesh.size()
    if reason := why_not_tensor(model, ways, sequence=sequence):
        raise ModelError(
            f"{type(model).__name__} cannot be cut {ways} ways: {reason}.",
            hint="choose a layout without tp: dp and fsdp take any model",
        )
    styles = find_styles(model, ways, sequence=sequence)
    head = find_head(model, styles)
    scores = Scores(mesh, may_stay_cut=vocabulary and head is not None)
    is_trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    tied = tied_weights(model)
    ours = isinstance(model, TRANSFORMERS)
    plan = _torch_styles(styles, sequence=sequence, inside_head=None if ours else head)
    if isinstance(model, MLP):
        # Joined by us: torch would hand out a sum that is still on its way.
        unjoined = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        plan.update({name: unjoined for name, style in styles.items() if style == "rowwise"})
    parallelize_module(model, mesh, plan, src_data_rank=None)
    _tie_again(model, tied)
    if isinstance(model, TRANSFORMERS):
        _connect_transformer(model, mesh, scores if head else None, sequence=sequence)
    elif isinstance(model, MLP):
        _connect_mlp(model, mesh, styles)
    elif head is not None:
        _change_output(model.get_submodule(head), scores.hand_out)
    for name, weight in model.named_parameters():
        # torch makes every norm trainable when it cuts the sequence.
        weight.requires_grad_(is_trained[name])
        _keep_placement(weight)
    _cut_heads[model] = scores


def sharded_loss(model: nn.Module) -> AbstractContextManager[None]:
    """Around the forward pass and the loss: scores stay cut, and ``cross_entropy`` can read them.

    The loss is a plain number, the same on every worker; the backward pass may run outside. Without effect
    for a model whose scores are not cut.
    """
    scores = _cut_heads.get(model)
    return nullcontext() if scores is None or not scores.may_stay_cut else _kept_cut(scores)


@contextmanager
def _kept_cut(scores: Scores) -> Generator[None]:
    scores.are_kept_cut = True
    try:
        with CutLoss():
            yield
    finally:
        scores.are_kept_cut = False


class CutDropout(nn.Dropout):
    """Dropout of activations of which a part lies here."""

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__(p)
        self._mesh = mesh

    def forward(self, input: Tensor) -> Tensor:
        """A plain tensor is taken for an even part of the last axis."""
        if not self.training or self.p == 0:
            return input
        if not isinstance(input, DTensor):
            whole = (*input.shape[:-1], input.shape[-1] * self._mesh.size())
            return input * self._draw(input, torch.Size(whole), input.ndim - 1)
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

    def _draw(self, local: Tensor, whole: torch.Size, axis: int) -> Tensor:
        keep = 1 - self.p
        drawn = local.new_empty(whole).bernoulli_(keep).div_(keep)
        first = min(-(-whole[axis] // self._mesh.size()) * self._mesh.get_local_rank(), whole[axis])
        return drawn.narrow(axis, first, local.shape[axis])


def _torch_styles(
    styles: Styles, *, sequence: bool, inside_head: str | None
) -> dict[str, ParallelStyle]:
    joined = (
        RowwiseParallel(output_layouts=Shard(_LENGTH), use_local_output=False)
        if sequence
        else RowwiseParallel()
    )
    known: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": joined,
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        # Heads are where a sequence would be: each worker norms its own.
        "replicated_with_grad_allreduce": SequenceParallel(
            sequence_dim=_LENGTH, use_local_output=True
        ),
    }
    plan = {name: known[style] for name, style in styles.items()}
    if inside_head is not None:
        plan[inside_head] = ColwiseParallel(use_local_output=False)
    return plan


def _connect_transformer(
    model: nn.Module, mesh: DeviceMesh, scores: Scores | None, *, sequence: bool
) -> None:
    """Tell the parts of our transformers what is cut and what is whole."""

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *memory = args
        whole = _whole(x, mesh)
        # Once for query, key and value: their gradients are added up before they are exchanged.
        return whole, *(whole if other is x else _whole(other, mesh) for other in memory)

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _cut_sequence(args[0], mesh), *args[1:]

    for module in list(model.modules()):
        if isinstance(module, Attention | FeedForward):
            module.register_forward_pre_hook(gather)
        elif sequence and isinstance(module, Block):
            module.register_forward_pre_hook(cut)
            module.dropout = CutDropout(module.dropout.p, mesh)
    if sequence:
        norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
        style = SequenceParallel(sequence_dim=_LENGTH)
        parallelize_module(model, mesh, dict.fromkeys(norms, style), src_data_rank=None)
        for norm in _last_norms(model):
            # The first norm of a chain gets a plain input where it stands alone, as in a pipeline.
            norm.register_forward_pre_hook(cut, prepend=True)
            _change_output(norm, make_plain)
    if scores is not None:
        _change_output(_last_norms(model)[-1], partial(HeadInput.of, scores=scores))


def _change_output(module: nn.Module, change: Callable[[Any], Tensor]) -> None:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Tensor:
        return change(output)

    module.register_forward_hook(hook)


def _last_norms(model: nn.Module) -> list[nn.Module]:
    """Those after which the whole sequence is needed; the last one stands before the head."""
    if isinstance(model, Seq2SeqTransformer):
        return [model.encoder_norm, model.decoder_norm]
    assert isinstance(model, CausalTransformer | TransformerClassifier)
    return [model.norm]


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def _connect_mlp(model: MLP, mesh: DeviceMesh, styles: Styles) -> None:
    is_cut = False
    for place, layer in enumerate(model.layers):
        if isinstance(layer, nn.Linear):
            is_cut = styles.get(f"layers.{place}") == "colwise"
            _change_output(layer, make_plain)
        elif is_cut and isinstance(layer, nn.Dropout):
            model.layers[place] = CutDropout(layer.p, mesh)


def _whole(x: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Replicate()])
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _cut_sequence(x: Tensor, mesh: DeviceMesh) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Shard(_LENGTH)])


def _tie_again(model: nn.Module, tied: list[list[tuple[str, str]]]) -> None:
    """Cutting gives each layer a weight of its own, also where two had one."""
    for (first, key), *others in tied:
        weight = model.get_submodule(first).get_parameter(key)
        for name, other in others:
            model.get_submodule(name).register_parameter(other, weight)


def _keep_placement(weight: nn.Parameter) -> None:
    if not isinstance(weight, DTensor) or not weight.requires_grad:
        return
    placements = weight.placements

    def settle(gradient: Any) -> Any:
        if gradient.placements == placements:
            return gradient
        return gradient.redistribute(placements=placements)

    hook: Callable[..., Any] = weight.register_hook
    hook(settle)
