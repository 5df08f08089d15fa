"""Batch normalisation over the samples of all replicas, as if one worker had them all.

torch's SyncBatchNorm is another class, and refuses a CPU. Here the module stays what it is: only its
forward pass asks the others, so checkpoints and exports do not know of it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.training.models.batch_norm import ALONE  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor, nn

# Aside: a copy of the module, such as a moving average, must not talk to anybody.
_sums: WeakKeyDictionary[nn.Module, Callable[[Tensor], object]] = WeakKeyDictionary()
_uncounted: list[None] = []
_FEWEST = 2
"""Values of a channel: one alone has no variance."""


class _GroupStatistics(NamedTuple):
    """What a forward pass learned from all members."""

    mean: Tensor
    variance: Tensor
    eps: float
    size: int
    is_counted: bool
    add_up: Callable[[Tensor], object]


def synchronise_batch_norm(model: nn.Module, add_up: Callable[[Tensor], object]) -> None:
    """Let every batch normalisation, while it trains, take its statistics over a group.

    Each member then runs the same forward and backward passes, whatever the size of its batch.

    Args:
        model: Whose modules.
        add_up: Leaves the sum over the group in a tensor.
    """
    forward = _forward_together
    if "torch._dynamo" in sys.modules:  # not to be loaded for this alone
        forward = torch.compiler.disable(forward)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            _sums[module] = add_up
            module.forward = MethodType(forward, module)


def remove_sync(model: nn.Module) -> None:
    """Each replica by itself again."""
    for module in model.modules():
        if _sums.pop(module, None) is not None:
            del module.forward


@contextmanager
def uncounted() -> Generator[None]:
    """Around the passes of a batch that must leave no trace: it enters no statistics."""
    _uncounted.append(None)
    try:
        yield
    finally:
        _uncounted.pop()


def _forward_together(module: _BatchNorm, values: Tensor) -> Tensor:
    add_up = _sums.get(module)
    alone = bool(module.__dict__.get(ALONE, False))
    if add_up is None or not (module.training or alone):
        return type(module).forward(module, values)
    module._check_input_dim(values)  # pyright: ignore[reportPrivateUsage]
    mine = 0 if _uncounted else values.numel() // values.shape[1]
    mean, variance, count = _measure_together(values, mine, add_up)
    if count < _FEWEST:
        return _use_running(module, values)
    if module.track_running_stats:
        _track(module, mean, variance * (count / (count - 1)))
    kind = torch.promote_types(values.dtype, torch.float32)
    seen = _GroupStatistics(mean.to(kind), variance.to(kind), module.eps, count, mine > 0, add_up)
    return cast("Tensor", _Normalise.apply(values, module.weight, module.bias, seen))


def _measure_together(
    values: Tensor, mine: int, add_up: Callable[[Tensor], object]
) -> tuple[Tensor, Tensor, int]:
    """Mean and variance of each channel, and how many values they stand for.

    In double precision sums of squares lose nothing that single precision could hold.
    """
    channels = values.shape[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if mine:
        exact = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        mean, variance = torch.batch_norm_update_stats(exact, None, None, 0.0)
        mean, variance = mean.double(), variance.double()
        sums[:channels] = mine * mean
        sums[channels:-1] = mine * (variance + mean * mean)
        sums[-1] = mine
    add_up(sums)
    count = int(sums[-1])
    mean = sums[:channels] / max(1, count)
    variance = (sums[channels:-1] / max(1, count) - mean * mean).clamp_min_(0)
    return mean, variance, count


def _use_running(module: _BatchNorm, values: Tensor) -> Tensor:
    if module.running_mean is None:
        raise ValueError("batch normalisation needs more than one value per channel to train on")
    was, module.training = module.training, False
    try:
        return type(module).forward(module, values)
    finally:
        module.training = was


@torch.no_grad()
def _track(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if module.momentum is not None:
        share = module.momentum
    else:
        share = 1.0 / float(module.num_batches_tracked) if module.num_batches_tracked else 0.0
    for running, new in ((module.running_mean, mean), (module.running_var, variance)):
        if running is not None:
            running.lerp_(new.to(running.dtype), share)


class _Normalise(Function):
    """Normalisation by statistics that depend on the values of all members.

    Backward pass: Ioffe and Szegedy 2015, section 3, with its sums over the batch taken over the group.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, seen: _GroupStatistics
    ) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.seen = seen
        return functional.batch_norm(
            values, seen.mean, seen.variance, weight, bias, training=False, eps=seen.eps
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        seen: _GroupStatistics = ctx.seen
        values, weight = ctx.saved_tensors
        scale = torch.ones_like(seen.mean) if weight is None else weight
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_out,
            values,
            scale,
            seen.mean,
            seen.variance,
            None,
            None,
            False,
            seen.eps,
            [False, True, True],
        )
        sums = torch.cat((grad_bias, grad_weight)).double()
        if not seen.is_counted:
            sums.zero_()
        seen.add_up(sums)
        wanted = ctx.needs_input_grad
        return (
            _through(grad_out, values, scale, sums, seen) if wanted[0] else None,
            grad_weight if wanted[1] else None,
            grad_bias if wanted[2] else None,
            None,
        )


def _through(
    grad_out: Tensor, values: Tensor, scale: Tensor, sums: Tensor, seen: _GroupStatistics
) -> Tensor:
    """The gradient of the values: of the output, less what mean and variance took, a line per channel."""
    shape = (1, -1, *(1,) * (values.ndim - 2))
    inverse = (seen.variance + seen.eps).rsqrt()
    factor = (scale * inverse).view(shape)
    if not seen.is_counted:
        return (grad_out * factor).to(values.dtype)
    total, aligned = (sums / seen.size).to(seen.mean.dtype).chunk(2)
    slope = scale * inverse * inverse * aligned
    offset = scale * inverse * total - seen.mean * slope
    grad = torch.addcmul(-offset.view(shape), values, -slope.view(shape))
    return grad.addcmul_(grad_out, factor).to(values.dtype)
