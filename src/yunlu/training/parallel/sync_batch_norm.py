"""Synchronised batch normalisation: statistics over the samples of all replicas.

torch's SyncBatchNorm is another class, and does not support CPUs. Here the module keeps its class: only
its forward pass changes, so checkpoints and exports are not affected.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.training.device import is_accelerator, sum_type
from yunlu.training.models.networks import SINGLE_SAMPLE  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

# Not on the module: a copy of it, such as a moving average, must not communicate.
_reducers: WeakKeyDictionary[nn.Module, Callable[[Tensor], object]] = WeakKeyDictionary()
_uncounted: list[None] = []
_FEWEST = 2
"""Fewest values of a channel: one alone has no variance."""


class _GroupStatistics(NamedTuple):
    """Statistics of a forward pass over the group."""

    mean: Tensor
    variance: Tensor
    eps: float
    size: int | Tensor
    is_counted: bool
    all_reduce: Callable[[Tensor], object]


def synchronise_batch_norm(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """Synchronise the statistics of every batch normalisation over a group while training.

    Each worker must then run the same forward and backward passes, whatever the size of its batch.

    Args:
        model: The model to change.
        all_reduce: Sums a tensor over the group, in place.
    """
    forward = _synchronised_forward
    if "torch._dynamo" in sys.modules:  # do not import it only for this
        forward = torch.compiler.disable(forward)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            _reducers[module] = all_reduce
            module.forward = MethodType(forward, module)


def remove_sync(model: nn.Module) -> None:
    """Remove the synchronisation."""
    for module in model.modules():
        if _reducers.pop(module, None) is not None:
            del module.forward


@contextmanager
def uncounted() -> Generator[None]:
    """Context for passes of a batch that must not enter the statistics."""
    _uncounted.append(None)
    try:
        yield
    finally:
        _uncounted.pop()


def _synchronised_forward(module: _BatchNorm, values: Tensor) -> Tensor:
    all_reduce = _reducers.get(module)
    alone = bool(module.__dict__.get(SINGLE_SAMPLE, False))
    if all_reduce is None or not (module.training or alone):
        return type(module).forward(module, values)
    module._check_input_dim(values)  # pyright: ignore[reportPrivateUsage]
    local_count = 0 if _uncounted else values.numel() // values.shape[1]
    mean, variance, count = _group_statistics(values, local_count, all_reduce)
    if not isinstance(count, Tensor) and count < _FEWEST:
        return _use_running(module, values)
    if module.track_running_stats:
        _track(module, mean, variance * (count / (count - 1)))
    kind = torch.promote_types(values.dtype, torch.float32)
    statistics = _GroupStatistics(
        mean.to(kind), variance.to(kind), module.eps, count, local_count > 0, all_reduce
    )
    return cast("Tensor", _Normalise.apply(values, module.weight, module.bias, statistics))


def _group_statistics(
    values: Tensor,
    local_count: int,
    all_reduce: Callable[[Tensor], object],
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Mean and variance of each channel, and the number of values.

    Sums of squares in double precision are exact enough for single-precision inputs.
    """
    if is_accelerator(values.device):
        return _group_statistics_on_device(values, local_count, all_reduce)
    channels = values.shape[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if local_count:
        exact = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        mean, variance = torch.batch_norm_update_stats(exact, None, None, 0.0)
        mean, variance = mean.double(), variance.double()
        sums[:channels] = local_count * mean
        sums[channels:-1] = local_count * (variance + mean * mean)
        sums[-1] = local_count
    all_reduce(sums)
    count = int(sums[-1])
    mean = sums[:channels] / max(1, count)
    variance = (sums[channels:-1] / max(1, count) - mean * mean).clamp_min_(0)
    return mean, variance, count


def _group_statistics_on_device(
    values: Tensor, local_count: int, all_reduce: Callable[[Tensor], object]
) -> tuple[Tensor, Tensor, int | Tensor]:
    """The same in single precision: the mean first, and then the squares about it.

    The host does not wait for the number of values unless it may be too small.
    """
    channels = values.shape[1]
    sums = torch.zeros(channels + 1, device=values.device)
    local_mean = local_variance = sums[:-1]
    if local_count:
        exact = values.detach().float()
        local_mean, local_variance = torch.batch_norm_update_stats(exact, None, None, 0.0)
        sums = functional.pad(local_mean * local_count, (0, 1), value=float(local_count))
    all_reduce(sums)
    count = sums[-1] if local_count >= _FEWEST else max(1, int(sums[-1]))
    mean = sums[:-1] / count
    squares = (local_variance + (local_mean - mean).square()) * local_count
    all_reduce(squares)
    return mean, squares / count, count


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
    """Normalisation by statistics over the group.

    Backward pass: Ioffe and Szegedy 2015, section 3, with its sums over the batch taken over the group.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _GroupStatistics,
    ) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.statistics = statistics
        return functional.batch_norm(
            values,
            statistics.mean,
            statistics.variance,
            weight,
            bias,
            training=False,
            eps=statistics.eps,
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        statistics: _GroupStatistics = ctx.statistics
        values, weight = ctx.saved_tensors
        scale = torch.ones_like(statistics.mean) if weight is None else weight
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_out,
            values,
            scale,
            statistics.mean,
            statistics.variance,
            None,
            None,
            False,
            statistics.eps,
            [False, True, True],
        )
        sums = torch.cat((grad_bias, grad_weight))
        sums = sums.to(sum_type(sums.device))
        if not statistics.is_counted:
            sums.zero_()
        statistics.all_reduce(sums)
        needs_grad = ctx.needs_input_grad
        return (
            _input_gradient(grad_out, values, scale, sums, statistics) if needs_grad[0] else None,
            grad_weight if needs_grad[1] else None,
            grad_bias if needs_grad[2] else None,
            None,
        )


def _input_gradient(
    grad_out: Tensor, values: Tensor, scale: Tensor, sums: Tensor, statistics: _GroupStatistics
) -> Tensor:
    """Gradient of the values: the output's, minus the part through mean and variance."""
    shape = (1, -1, *(1,) * (values.ndim - 2))
    inverse = (statistics.variance + statistics.eps).rsqrt()
    factor = (scale * inverse).view(shape)
    if not statistics.is_counted:
        return (grad_out * factor).to(values.dtype)
    total, aligned = (sums / statistics.size).to(statistics.mean.dtype).chunk(2)
    slope = scale * inverse * inverse * aligned
    offset = scale * inverse * total - statistics.mean * slope
    grad = torch.addcmul(-offset.view(shape), values, -slope.view(shape))
    return grad.addcmul_(grad_out, factor).to(values.dtype)
