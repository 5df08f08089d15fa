"""Logits sharded over the vocabulary, and their cross-entropy.

torch's ``loss_parallel`` has no label smoothing, needs the backward pass inside it, and stays enabled
after an error inside it; so the loss is computed here.

Shapes: N targets, V vocabulary, v the local part of it.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
                replicated = DTensor.from_local(
                    plain, x.handling.mesh, [Replicate()], run_check=False
                )
                return x.handling.convert(func(replicated, *args[1:], **(kwargs or {})))
            return func(*args, **(kwargs or {}))


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
