"""The gradient-noise scale: the batch at which noise and signal of the gradient are equal.

McCandlish et al. 2018, section 2.2: tr(Sigma) / |G|^2, where G is the true gradient and Sigma the
covariance of one sample's. Two gradients from different batches tell both: their noise is
independent, so that their product holds only the signal and their difference only the noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY = 20
NUMBERS = 1 << 14
MEMORY = 0.97
"""What the pairs before weigh against the newest: an average over about 33 of them."""
FEWEST_PAIRS = 8


class NoiseScale:
    """Compares the gradients of two steps in a row, now and then, at a few places.

    Between the two the weights move once. Where momentum gives the newest gradient a small part in
    that move (Adam, momentum), the answer stays right; under plain SGD near a minimum the second
    gradient points against the noise of the first, and the answer is far too high or none.
    On a problem where the truth is known: within a factor of 1.35 up to ten times the batch, and
    of 3.5 at twenty times (``tests/unit/training/test_noise.py``).
    """

    def __init__(self, weights: Sequence[Tensor], every: int = EVERY) -> None:
        if every < 2:
            raise ValueError(f"every must be at least 2, not {every}")
        self._every = every
        self._places = _choose_places(weights)
        self._sums = torch.zeros(2, device=weights[0].device)
        """Averages of tr(Sigma) and |G|^2: the correction for their start at 0 cancels in the ratio."""
        self._pairs = 0
        self._first: Tensor | None = None
        self._first_step, self._first_batch = -1, 0
        self._value: float | None = None
        self._is_stale = False

    def observe(self, step: int, batch: int) -> None:
        """Take the gradients of step ``step`` (from 0) over ``batch`` samples, before clipping."""
        within = step % self._every
        if within == 0:
            self._first, self._first_step, self._first_batch = self._sample(), step, batch
        elif within == 1 and self._first is not None and self._first_step == step - 1:
            self._compare(self._first, self._sample(), 1 / self._first_batch + 1 / batch)
            self._first = None

    @property
    def value(self) -> float | None:
        """In samples; None while too little is known, or where no signal stands above the noise.

        Waits for the device, but only once per pair.
        """
        if self._is_stale:
            noise, signal = self._sums.tolist()
            known = self._pairs >= FEWEST_PAIRS and signal > 0
            self._value, self._is_stale = (noise / signal if known else None), False
        return self._value

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint keeps: tensors, and numbers as JSON."""
        tensors = {"sums": self._sums.cpu().clone()}
        if self._first is not None:
            tensors["first"] = self._first.cpu().clone()
        return tensors, {
            "pairs": self._pairs,
            "first_step": self._first_step,
            "first_batch": self._first_batch,
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        device = self._sums.device
        self._sums = tensors["sums"].to(device, copy=True)
        self._first = tensors["first"].to(device, copy=True) if "first" in tensors else None
        self._pairs = numbers["pairs"]
        self._first_step, self._first_batch = numbers["first_step"], numbers["first_batch"]
        self._is_stale = True

    def _sample(self) -> Tensor:
        parts = [
            weight.grad.take(places).float()
            if weight.grad is not None
            else torch.zeros(len(places), device=places.device)  # it took no part in this step
            for weight, places in self._places
        ]
        return torch.cat(parts)

    def _compare(self, first: Tensor, second: Tensor, per_sample: float) -> None:
        difference = second - first
        noise = difference.dot(difference) / per_sample
        pair = torch.stack((noise, first.dot(second)))
        # Without asking the device: gradients that are not finite change nothing.
        known = torch.where(pair.isfinite().all(), pair, self._sums)
        self._sums = torch.lerp(self._sums, known, 1 - MEMORY)
        self._pairs += 1
        self._is_stale = True


def _choose_places(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The same share of every weight's numbers, at random but always the same places."""
    total = sum(weight.numel() for weight in weights)
    generator = torch.Generator().manual_seed(total)  # its own: training's numbers stay as they are
    chosen: list[tuple[Tensor, Tensor]] = []
    for weight in weights:
        count = min(weight.numel(), -(-weight.numel() * NUMBERS // total))  # ceiling
        # Drawn with repetition above: a permutation of all places would take the gradient's memory.
        places = (
            torch.arange(count)
            if count == weight.numel()
            else torch.randint(weight.numel(), (count,), generator=generator).sort().values
        )
        chosen.append((weight, places.to(weight.device)))
    return chosen
