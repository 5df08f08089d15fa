"""The gradient noise scale: the batch size at which noise and signal of the gradient are equal.

McCandlish et al. 2018, section 2.2: tr(Sigma) / |G|^2, where G is the true gradient and Sigma the
covariance of one sample's. Both follow from gradients of different samples: their noise is independent,
so that their inner products contain only the signal. Sources, the best first:

- from the replicas of a step: each replica's gradient against the sum (appendix A.1);
- from the two halves of the micro-batches that a worker accumulates in a step;
- from two steps in a row, between which the weights move: biased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yunlu.training.device import is_accelerator, sum_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.training.precision import Precision
    from yunlu.training.tasks.task import Batch

EVERY = 20
EARLY_STEPS, EARLY_EVERY = 100, 5
"""More often at first, so that short runs get an estimate too."""
NUMBERS = 1 << 14
MEMORY = 0.97
"""Decay of the average: about the last 33 measurements."""
FEWEST = 8
"""Measurements before an estimate is given."""
_PATIENCE = 4
"""Steps without several parts before two steps are compared: an epoch's last step is short."""


class NoiseScale:
    """Estimates the noise scale by comparing gradients of different samples at a few positions.

    Gradients of one step give an unbiased estimate. Of two steps in a row the estimate stays right with
    momentum or Adam, where the newest gradient has a small part in the update between them; under plain
    SGD near a minimum the second gradient points against the noise of the first, and the estimate is far
    too high or missing. On a problem with a known answer: within a factor of 1.35 up to ten times the
    batch, and of 3.5 at twenty times (``tests/unit/training/test_gradient_noise.py``).

    Args:
        weights: Weights whose gradients are sampled.
        every: Steps between measurements.
        is_mixed: Whether the parts of a step hold random samples. Sorted by length they do not,
            and only steps can be compared.
    """

    def __init__(
        self, weights: Sequence[Tensor], every: int = EVERY, *, is_mixed: bool = True
    ) -> None:
        if every < 2:
            raise ValueError(f"every must be at least 2, not {every}")
        self._every, self._is_mixed = every, is_mixed
        self._positions, self._factors = _choose_positions(weights)
        self._sums = torch.zeros(3, device=weights[0].device)
        """Averages of tr(Sigma), of |G|^2 and of 1; the last corrects for the start at 0."""
        self._count = 0
        self._parts = self._missed = 0
        self._first: Tensor | None = None
        self._first_step, self._first_batch = -1, 0
        self._halves: list[tuple[Tensor, int]] = []
        """Current step: gradients so far, and their number of samples."""
        self._shares: Tensor | None = None
        """Current step: sum of the replicas' squares, square of the sum, squared batches."""
        self._replicas = 1
        self._scale = 1.0
        self._known: tuple[float, float] | None = None
        self._is_stale = False
        self._is_on_device = is_accelerator(self._sums.device)

    def is_due(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is measured."""
        return step % (min(self._every, EARLY_EVERY) if step < EARLY_STEPS else self._every) == 0

    def begin(
        self, step: int, micros: Sequence[Batch], precision: Precision
    ) -> Callable[[Tensor], None]:
        """Begin a step; returns the function that runs the backward passes of its micro-batches.

        ``micros``: those whose gradients accumulate locally; empty with several replicas.
        """
        self._halves, self._shares, self._scale = [], None, precision.scale or 1.0
        if len(micros) < 2 or not self._is_mixed or not self.is_due(step):
            return precision.backward
        sizes = [micro.samples for micro in micros]
        middle = len(sizes) // 2
        done = 0

        def backward(loss: Tensor) -> None:
            nonlocal done
            precision.backward(loss)
            done += 1
            if done in {middle, len(sizes)}:
                self._halves.append((self._sample() / self._scale, sum(sizes[:done])))

        return backward

    def hold(self, shares: Tensor, *, replicas: int) -> None:
        """Take the replicas' squares of this step: see ``ParallelModel.gradient_squares``; may be empty."""
        if len(shares) and self._is_mixed:
            self._shares, self._replicas = shares, replicas

    def observe(self, step: int, batch: int) -> None:
        """Measure step ``step`` (from 0) of ``batch`` samples by its gradients before clipping."""
        if not self.is_due(step):
            if self._first is not None and self._first_step == step - 1:
                pair = estimate_from_pair(self._first, self._sample(), self._first_batch, batch)
                self._add_estimate(pair, parts=1)
            self._first = None
            return
        self._first = None
        if self._shares is not None:
            shares = estimate_from_replicas(self._shares, batch) / self._scale**2
            self._add_estimate(shares, parts=self._replicas)
        elif len(self._halves) == 2:
            (first, before), (both, after) = self._halves
            first, second = first * (after / before), (both - first) * (after / (after - before))
            self._add_estimate(estimate_from_pair(first, second, before, after - before), parts=2)
        else:
            self._missed += 1
            if self._parts < 2 or self._missed >= _PATIENCE:
                self._first, self._first_step, self._first_batch = self._sample(), step, batch

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None with too few measurements, or without a measurable signal."""
        known = self._read()
        return None if known is None else known[0] / known[1]

    @property
    def unread(self) -> Tensor | None:
        """Sums on a device that the host has not seen: whoever waits for it next may bring them along."""
        return self._sums if self._is_on_device and self._is_stale else None

    def read(self, sums: list[float]) -> None:
        """Take the numbers of ``unread``."""
        noise, signal, weight = sums
        is_known = self._count >= FEWEST and signal > 0
        self._known = (noise / weight, signal / weight) if is_known else None
        self._is_stale = False

    def figures(self) -> dict[str, float]:
        """Values for the log; empty without an estimate. On an accelerator those of the step before."""
        known = self._known if self._is_on_device else self._read()
        if known is None:
            return {}
        noise, signal = known
        return {
            "noise_scale": noise / signal,
            "noise_sqr": signal,
            "noise_var": noise,
            "noise_parts": self._parts,
        }

    def numbers(self) -> dict[str, Any]:
        """State for a checkpoint or a joining worker, as JSON."""
        return {
            "sums": self._sums.tolist(),
            "count": self._count,
            "parts": self._parts,
            "missed": self._missed,
        }

    def adopt(self, numbers: dict[str, Any]) -> None:
        """Restore the result of ``numbers``; empty state restores nothing."""
        if "sums" not in numbers:
            return
        self._sums = torch.tensor(numbers["sums"], device=self._sums.device)
        self._count, self._parts = numbers["count"], numbers["parts"]
        self._missed = numbers["missed"]
        self._first, self._is_stale = None, True

    def pair(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Sample of the last step, if the next is compared with it: tensors, and numbers as JSON."""
        if self._first is None:
            return {}, {}
        step, batch = self._first_step, self._first_batch
        return {"first": self._first.cpu().clone()}, {"step": step, "batch": batch}

    def adopt_pair(self, first: Tensor, numbers: dict[str, Any]) -> None:
        """Restore the result of ``pair``."""
        self._first = first.to(self._sums.device, copy=True)
        self._first_step, self._first_batch = numbers["step"], numbers["batch"]

    def _read(self) -> tuple[float, float] | None:
        """Noise and signal; synchronises with the device once per measurement."""
        if self._is_stale:
            self.read(self._sums.tolist())
        return self._known

    def _sample(self) -> Tensor:
        parts: list[Tensor] = []
        for weight, positions, count in self._positions:
            gradient = weight.grad
            if gradient is None:  # no gradient in this step
                parts.append(torch.zeros(count, device=weight.device))
            else:
                sampled = gradient.reshape(-1) if positions is None else gradient.take(positions)
                parts.append(sampled.float())
        return torch.cat(parts) * self._factors

    def _add_estimate(self, estimate: Tensor, *, parts: int) -> None:
        if parts > 1:
            self._missed = 0
            if self._parts == 1:  # earlier estimates are biased: drop them
                self._sums, self._count = torch.zeros_like(self._sums), 0
        self._parts = parts
        newest = torch.cat((estimate.to(self._sums), torch.ones_like(self._sums[:1])))
        # Without synchronising: gradients that are not finite change nothing.
        known = torch.where(newest.isfinite().all(), newest, self._sums)
        self._sums = torch.lerp(self._sums, known, 1 - MEMORY)
        self._count += 1
        self._is_stale = True


def estimate_from_pair(
    first: Tensor, second: Tensor, first_batch: int, second_batch: int
) -> Tensor:
    """tr(Sigma) and |G|^2 from two mean gradients over the given numbers of samples."""
    difference = second - first
    noise = difference.dot(difference) / (1 / first_batch + 1 / second_batch)
    return torch.stack((noise, first.dot(second)))


def estimate_from_replicas(shares: Tensor, batch: int) -> Tensor:
    """tr(Sigma) and |G|^2 from replicas, each with its part of the mean over ``batch`` samples.

    A part of p of the samples is p G and noise of p tr(Sigma) / batch: its square is expected to be
    p^2 |G|^2 + p tr(Sigma) / batch. So the squares add up to q |G|^2 + tr(Sigma) / batch, where q is the
    sum of all p^2, and the square of the sum is |G|^2 + tr(Sigma) / batch.

    Args:
        shares: The sum of squares, the square of the sum, the sum of the replicas' squared batches.
        batch: Samples of all replicas.
    """
    squares, square, batches = shares.to(sum_type(shares.device)).unbind()
    q = batches / batch**2
    return torch.stack((batch * (squares - q * square), square - squares)) / (1 - q)


def choose_positions(count: int, total: int, generator: torch.Generator) -> Tensor:
    """Sampled positions of a weight of ``count`` elements: its share of ``NUMBERS`` out of ``total``."""
    sampled = min(count, -(-count * NUMBERS // total))  # ceiling
    if sampled == count:
        return torch.arange(count)
    # With replacement: a permutation of all positions would take the gradient's memory.
    return torch.randint(count, (sampled,), generator=generator).sort().values


def _choose_positions(
    weights: Sequence[Tensor],
) -> tuple[list[tuple[Tensor, Tensor | None, int]], Tensor]:
    """Sampled positions of each weight and their number; square roots of the inverse sampling rates."""
    total = sum(weight.numel() for weight in weights)
    generator = torch.Generator().manual_seed(
        total
    )  # a separate generator: training's random numbers do not change
    chosen: list[tuple[Tensor, Tensor | None, int]] = []
    factors: list[Tensor] = []
    for weight in weights:
        positions = choose_positions(weight.numel(), total, generator)
        count = len(positions)
        is_all = count == weight.numel()
        chosen.append((weight, None if is_all else positions.to(weight.device), count))
        factors.append(torch.full((count,), (weight.numel() / max(count, 1)) ** 0.5))
    return chosen, torch.cat(factors).to(weights[0].device)
