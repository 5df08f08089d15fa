"""How large the numbers in a module are, and whether a low precision can hold them.

A range is a count of magnitudes by power of two. Values that are exactly zero in a precision with
the range of FP32 (behind a ReLU, in an unused row of an embedding) are zero rightly and do not
count: what would vanish is told from what is sparse.
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
"""One below FP32's smallest power of two: the place of exact zeros."""
_BINS = 280
_SAMPLE = 1 << 16
LOST_SHARE = 0.05
"""A gradient or an activation may lose this share of its sum of magnitudes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """What a precision can hold."""

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
    """The magnitudes of one kind of number in one module, in one step."""

    top: float
    """The largest; not finite where one was not."""
    counts: tuple[float, ...] = ()
    """How many have each power of two, from ``_LOWEST`` on."""

    def band(self, form: FloatFormat) -> tuple[int, int]:
        """Factors, as powers of two, between which the format can hold these numbers.

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
        # Weighed by size: thousands of entries that never mattered may vanish without harm.
        powers = np.arange(_LOWEST + 1, _LOWEST + len(self.counts))
        masses = np.asarray(self.counts[1:]) * np.exp2(powers, dtype=np.float64)
        total = masses.sum()
        return masses.cumsum() / total if total else np.empty(0)


def measure(values: Tensor) -> Tensor:
    """The range of a tensor as one small tensor on its device: no waiting for it here."""
    flat = values.detach().float().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE) | 1  # odd: no rhythm of rows and columns
    sizes = flat[::stride].abs().log2().nan_to_num(nan=128.0).clamp(_LOWEST, 128)
    counts = torch.bincount((sizes.floor() - _LOWEST).long(), minlength=_BINS)
    return torch.cat([flat.abs().amax()[None], counts])


def merge(measured: Sequence[Tensor]) -> Tensor:
    """The range of several tensors together."""
    stacked = torch.stack(list(measured))
    return torch.cat([stacked[:, 0].amax()[None], stacked[:, 1:].sum(0)])


def read(measured: Mapping[tuple[str, str], Sequence[Tensor]]) -> dict[tuple[str, str], ValueRange]:
    """Bring ranges over from the device, all in one go."""
    if not measured:
        return {}
    rows: list[list[float]] = torch.stack([merge(each) for each in measured.values()]).tolist()
    return {
        key: ValueRange(top=top, counts=tuple(counts))
        for key, (top, *counts) in zip(measured, rows, strict=True)
    }
