"""Gradient clipping: by value, by norm, or by an adaptive norm learned from earlier steps.

On a CPU torch's own functions spend most of their time sorting tensors by device and multiplying by
one; the same arithmetic is done here without that, and gives the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from yunlu.training.device import CPU, is_accelerator, sum_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.train import ClipSpec

DEVIATIONS = 2.5
"""Standard deviations of the adaptive bound above the mean norm (Kumar et al. 2025)."""
MEMORY = 0.97
"""Decay of the exponential averages."""
WARMUP = 25
"""Steps before the adaptive bound applies."""
_ENOUGH = (1 - MEMORY ** (WARMUP - 0.5)) / (1 - MEMORY)  # weight of WARMUP norms, rounding aside
_LEAST_SPREAD = 0.05  # of the mean: norms that hardly vary must still be free to grow
_EPSILON = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm

Number = float | Tensor
Statistics = tuple[Number, Number, Number]
"""Weight, mean and variance of earlier norms."""


def measure_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of the whole gradient, as ``torch.nn.utils.get_total_norm`` gives it.

    All gradients lie on one device.
    """
    if not gradients or gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def measure_square(weights: Sequence[Tensor], copies: Sequence[int]) -> Tensor:
    """This worker's part of the squared gradient norm; replicated weights count once over all workers."""
    held = [
        (weight.grad, count)
        for weight, count in zip(weights, copies, strict=True)
        if weight.grad is not None
    ]
    device = weights[0].device if weights else CPU
    if not held:
        return torch.zeros((), dtype=sum_type(device), device=device)
    if is_accelerator(device):
        return _square_on_device(held)
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient, _ in held])
    counts = torch.tensor([count for _, count in held], dtype=torch.float64)
    return (norms.double().square() / counts).sum()


def _square_on_device(held: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Without numbers of the host: to copy them to the device is to wait for it."""
    groups: dict[int, list[Tensor]] = {}
    for gradient, count in held:
        groups.setdefault(count, []).append(gradient)
    squares = [
        get_total_norm(gradients).float().square() / count for count, gradients in groups.items()
    ]
    return torch.stack(squares).sum()


class Clipper:
    """Clips gradients in place, as the job configures."""

    def __init__(self, spec: ClipSpec) -> None:
        self._spec = spec
        self._statistics: Statistics = (0.0, 0.0, 0.0)

    def clip(
        self, gradients: list[Tensor], norm: Tensor, measure: Callable[[], Tensor] | None = None
    ) -> None:
        """Clip gradients of norm ``norm``; never synchronises with an accelerator.

        ``measure`` computes the norm again, where these are only a part of the gradient.
        """
        if self._spec.value is not None:
            for gradient in gradients:
                gradient.clamp_(-self._spec.value, self._spec.value)
            if self._spec.norm is not None:
                norm = measure_norm(gradients) if measure is None else measure()
        bound = self.bound(norm)
        if bound is not None:
            _scale(gradients, bound, norm)

    def bound(self, norm: Tensor) -> Number | None:
        """Largest norm allowed at this step; an adaptive bound learns from ``norm``."""
        if self._spec.norm != "adaptive":
            return self._spec.norm
        if norm.device.type == "cpu":  # plain numbers cost a hundredth of one-element tensors
            bound, self._statistics = learn_bound(self._statistics, norm.item())
            return bound
        weight, mean, variance = (_on_device(number, norm) for number in self._statistics)
        bound, self._statistics = learn_bound((weight, mean, variance), norm.float())
        return bound

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {"statistics": [float(number) for number in self._statistics]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        weight, mean, variance = state["statistics"]
        self._statistics = (weight, mean, variance)


def learn_bound(statistics: Statistics, norm: Number) -> tuple[Number, Statistics]:
    """The bound for a step of this norm, and the updated statistics.

    Mean and variance are exponential (West 1979), corrected for their start at zero. The bound
    is a z-score (Kumar et al. 2025, section 3). Never synchronises with an accelerator.
    """
    weight, mean, variance = statistics
    spread = (variance + (_LEAST_SPREAD * mean) ** 2) ** 0.5
    bound = _where(weight > _ENOUGH, mean + DEVIATIONS * spread, math.inf)
    # A spike must not widen the bound by its own size, and an overflow not at all.
    change = _where(norm < bound, norm, bound) - mean
    grown = 1 + MEMORY * weight
    learnt = (grown, mean + change / grown, (1 - 1 / grown) * (variance + change**2 / grown))
    is_finite = abs(norm) < math.inf
    weight, mean, variance = (
        _where(is_finite, new, old) for new, old in zip(learnt, statistics, strict=True)
    )
    return bound, (weight, mean, variance)


def _on_device(number: Number, like: Tensor) -> Tensor:
    """The number beside ``like``; written there, since to copy it is to wait for the device."""
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float32, device=like.device)


def _where(test: bool | Tensor, yes: Number, no: Number) -> Number:
    if isinstance(test, Tensor):
        return torch.where(test, yes, no)
    return yes if test else no


def _scale(gradients: list[Tensor], bound: float | Tensor, norm: Tensor) -> None:
    on_cpu = norm.device.type == "cpu"
    # Far enough below the bound for any rounding: torch would multiply by one.
    if on_cpu and float(norm) + 2 * _EPSILON < 0.999 * float(bound):
        return
    factor = torch.clamp(bound / (norm + _EPSILON), max=1.0)
    if on_cpu:
        for gradient in gradients:
            gradient.mul_(factor)
    else:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - one kernel, not hundreds
