"""Value ranges of a module, and whether a low precision can represent them.

A range is a histogram of magnitudes by power of two. Values that are exactly zero in a precision with
the range of FP32 (after a ReLU, in an unused row of an embedding) are true zeros and do not
count: underflow is distinguished from sparsity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_LOWEST = -150
"""One below FP32's smallest power of two: the bin of exact zeros."""
_BINS = 280
_SAMPLE = 1 << 16
LOST_SHARE = 0.05
"""A gradient or an activation may lose this share of its sum of magnitudes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """Limits of a floating-point format."""

    name: str
    largest: float
    lowest_power: int
    """Values below this power of two round to zero."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> FloatFormat:
        """The limits of a floating-point type, subnormal numbers included."""
        limits = torch.finfo(dtype)
        smallest = math.log2(limits.smallest_normal * limits.eps)
        return cls(name=name, largest=limits.max, lowest_power=round(smallest) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """Magnitudes of one kind of tensor in one module, in one step."""

    top: float
    """Largest magnitude; not finite if any value was not."""
    counts: tuple[float, ...] = ()
    """Histogram by power of two, from ``_LOWEST`` on."""

    def band(self, form: FloatFormat) -> tuple[int, int]:
        """Scale factors, as powers of two, between which the format represents these values.

        At the lower end only ``LOST_SHARE`` of them rounds to zero; at the upper end the largest
        still fits twice over.
        """
        shares = self._shares()
        first = int(np.searchsorted(shares, LOST_SHARE, side="right"))
        lowest = form.lowest_power - (_LOWEST + 1 + first) if first < len(shares) else -_BINS
        highest = math.floor(math.log2(form.largest / self.top)) - 1 if self.top else _BINS
        return lowest, highest

    def lost_share(self, power: int, form: FloatFormat) -> float:
        """Share of the sum of magnitudes that rounds to zero after a factor of ``2**power``."""
        shares, lost = self._shares(), form.lowest_power - power - (_LOWEST + 1)
        return float(shares[min(lost, len(shares)) - 1]) if lost > 0 and len(shares) else 0.0

    def _shares(self) -> np.ndarray:
        """Share of the sum of magnitudes up to each power of two; empty where all are zero."""
        # Weighted by magnitude: many tiny values may vanish without harm.
        powers = np.arange(_LOWEST + 1, _LOWEST + len(self.counts))
        masses = np.asarray(self.counts[1:]) * np.exp2(powers, dtype=np.float64)
        total = masses.sum()
        return masses.cumsum() / total if total else np.empty(0)


def measure(values: Tensor) -> Tensor:
    """The range of a tensor as one small tensor on its device, without synchronising."""
    flat = values.detach().float().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE) | 1  # odd: not aligned with rows and columns
    sizes = flat[::stride].abs().log2().nan_to_num(nan=128.0).clamp(_LOWEST, 128)
    counts = torch.bincount((sizes.floor() - _LOWEST).long(), minlength=_BINS)
    return torch.cat([flat.abs().amax()[None], counts])


def merge(measured: Sequence[Tensor]) -> Tensor:
    """The range of several tensors together."""
    stacked = torch.stack(list(measured))
    return torch.cat([stacked[:, 0].amax()[None], stacked[:, 1:].sum(0)])


def read(measured: Mapping[tuple[str, str], Sequence[Tensor]]) -> dict[tuple[str, str], ValueRange]:
    """Read ranges from the device in one transfer."""
    if not measured:
        return {}
    rows: list[list[float]] = torch.stack(
        [merge(tensors) for tensors in measured.values()]
    ).tolist()
    return {
        key: ValueRange(top=top, counts=tuple(counts))
        for key, (top, *counts) in zip(measured, rows, strict=True)
    }
