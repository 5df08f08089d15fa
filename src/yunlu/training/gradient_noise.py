"""The gradient-noise scale: the batch at which noise and signal of the gradient are equal.

McCandlish et al. 2018, section 2.2: tr(Sigma) / |G|^2, where G is the true gradient and Sigma the
covariance of one sample's. Gradients of different samples tell both: their noise is independent, so
that their products hold only the signal. They come, the best source first,

- from the replicas of a step: what each brings to the sum, against the sum (appendix A.1);
- from the two halves of the micro-batches that a worker accumulates in a step;
- from two steps in a row, between which the weights move: biased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.training.precision import Precision
    from yunlu.training.tasks.task import Batch

EVERY = 20
EARLY_STEPS, EARLY_EVERY = 100, 5
"""At first more often: short runs have a noise scale, too."""
NUMBERS = 1 << 14
MEMORY = 0.97
"""What the measurements before weigh against the newest: an average over about 33 of them."""
FEWEST = 8
"""Measurements before anything is said."""
_PATIENCE = 4
"""Times without several parts in a step before two steps are compared: an epoch's last is short."""


class NoiseScale:
    """Compares gradients of different samples, now and then, at a few places; changes none.

    Of one step they tell the truth. Of two in a row, where momentum gives the newest gradient a small
    part in the move between them (Adam, momentum), the answer stays right; under plain SGD near a
    minimum the second gradient points against the noise of the first, and the answer is far too high
    or none. On a problem where the truth is known: within a factor of 1.35 up to ten times the batch,
    and of 3.5 at twenty times (``tests/unit/training/test_noise.py``).

    Args:
        weights: Whose gradients are looked at.
        every: Steps from one measurement to the next.
        is_mixed: Whether the parts of a step hold samples at random. Sorted by length they do not,
            and only steps can be compared.
    """

    def __init__(
        self, weights: Sequence[Tensor], every: int = EVERY, *, is_mixed: bool = True
    ) -> None:
        if every < 2:
            raise ValueError(f"every must be at least 2, not {every}")
        self._every, self._is_mixed = every, is_mixed
        self._places, self._factors = _choose_places(weights)
        self._sums = torch.zeros(3, device=weights[0].device)
        """Averages of tr(Sigma), of |G|^2 and of 1: by the last the start at 0 is corrected."""
        self._count = 0
        self._parts = self._missed = 0
        self._first: Tensor | None = None
        self._first_step, self._first_batch = -1, 0
        self._halves: list[tuple[Tensor, int]] = []
        """Of the step under way: gradients so far, and of how many samples."""
        self._shares: Tensor | None = None
        """Of the step under way: the replicas' squares summed, the sum's square, squared batches."""
        self._replicas = 1
        self._scale = 1.0
        self._known: tuple[float, float] | None = None
        self._is_stale = False

    def is_due(self, step: int) -> bool:
        """Whether step ``step`` (from 0) is one to be measured."""
        return step % (min(self._every, EARLY_EVERY) if step < EARLY_STEPS else self._every) == 0

    def begin(
        self, step: int, micros: Sequence[Batch], precision: Precision
    ) -> Callable[[Tensor], None]:
        """A step begins; what runs the backward passes of its micro-batches.

        ``micros`` are those whose gradients will lie beside the weights; none among replicas.
        """
        self._halves, self._shares, self._scale = [], None, precision.scale or 1.0
        if len(micros) < 2 or not self._is_mixed or not self.is_due(step):
            return precision.backward
        sizes = [micro.samples for micro in micros]
        middle = len(sizes) // 2
        done = 0

        def follow(loss: Tensor) -> None:
            nonlocal done
            precision.backward(loss)
            done += 1
            if done in {middle, len(sizes)}:
                self._halves.append((self._sample() / self._scale, sum(sizes[:done])))

        return follow

    def hold(self, shares: Tensor, *, replicas: int) -> None:
        """Take what the replicas brought to this step: see ``Arrangement.looked``; may be empty."""
        if len(shares) and self._is_mixed:
            self._shares, self._replicas = shares, replicas

    def observe(self, step: int, batch: int) -> None:
        """Take in step ``step`` (from 0) of ``batch`` samples, with its gradients before clipping."""
        if not self.is_due(step):
            if self._first is not None and self._first_step == step - 1:
                pair = compare(self._first, self._sample(), self._first_batch, batch)
                self._take_in(pair, parts=1)
            self._first = None
            return
        self._first = None
        if self._shares is not None:
            shares = weigh(self._shares, batch) / self._scale**2
            self._take_in(shares, parts=self._replicas)
        elif len(self._halves) == 2:
            (first, before), (both, after) = self._halves
            first, second = first * (after / before), (both - first) * (after / (after - before))
            self._take_in(compare(first, second, before, after - before), parts=2)
        else:
            self._missed += 1
            if self._parts < 2 or self._missed >= _PATIENCE:
                self._first, self._first_step, self._first_batch = self._sample(), step, batch

    @property
    def value(self) -> float | None:
        """In samples; None while too little is known, or where no signal stands above the noise."""
        known = self._read()
        return None if known is None else known[0] / known[1]

    def figures(self) -> dict[str, float]:
        """For the log, by their names there; empty while nothing is known."""
        known = self._read()
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
        """What is known, as JSON: for a checkpoint, and for who joins."""
        return {
            "sums": self._sums.tolist(),
            "count": self._count,
            "parts": self._parts,
            "missed": self._missed,
        }

    def adopt(self, numbers: dict[str, Any]) -> None:
        """Go on from what ``numbers`` gave; from the start where it gave nothing."""
        if "sums" not in numbers:
            return
        self._sums = torch.tensor(numbers["sums"], device=self._sums.device)
        self._count, self._parts = numbers["count"], numbers["parts"]
        self._missed = numbers["missed"]
        self._first, self._is_stale = None, True

    def pair(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The first step of two to be compared, if it was the last: tensors, and numbers as JSON."""
        if self._first is None:
            return {}, {}
        step, batch = self._first_step, self._first_batch
        return {"first": self._first.cpu().clone()}, {"step": step, "batch": batch}

    def adopt_pair(self, first: Tensor, numbers: dict[str, Any]) -> None:
        """Go on from what ``pair`` gave."""
        self._first = first.to(self._sums.device, copy=True)
        self._first_step, self._first_batch = numbers["step"], numbers["batch"]

    def _read(self) -> tuple[float, float] | None:
        """Noise and signal; waits for the device, but only once per measurement."""
        if self._is_stale:
            noise, signal, weight = self._sums.tolist()
            is_known = self._count >= FEWEST and signal > 0
            self._known = (noise / weight, signal / weight) if is_known else None
            self._is_stale = False
        return self._known

    def _sample(self) -> Tensor:
        parts: list[Tensor] = []
        for weight, places, count in self._places:
            gradient = weight.grad
            if gradient is None:  # it took no part
                parts.append(torch.zeros(count, device=weight.device))
            else:
                found = gradient.reshape(-1) if places is None else gradient.take(places)
                parts.append(found.float())
        return torch.cat(parts) * self._factors

    def _take_in(self, found: Tensor, *, parts: int) -> None:
        if parts > 1:
            self._missed = 0
            if self._parts == 1:  # what is known is biased: begin again without it
                self._sums, self._count = torch.zeros_like(self._sums), 0
        self._parts = parts
        newest = torch.cat((found.to(self._sums), torch.ones_like(self._sums[:1])))
        # Without asking the device: gradients that are not finite change nothing.
        known = torch.where(newest.isfinite().all(), newest, self._sums)
        self._sums = torch.lerp(self._sums, known, 1 - MEMORY)
        self._count += 1
        self._is_stale = True


def compare(first: Tensor, second: Tensor, first_batch: int, second_batch: int) -> Tensor:
    """tr(Sigma) and |G|^2 by two mean gradients of so many samples each."""
    difference = second - first
    noise = difference.dot(difference) / (1 / first_batch + 1 / second_batch)
    return torch.stack((noise, first.dot(second)))


def weigh(shares: Tensor, batch: int) -> Tensor:
    """tr(Sigma) and |G|^2 by replicas, of which each brings its part of the mean over ``batch``.

    A part of p of the samples is p G and noise of p tr(Sigma) / batch: its square is expected to be
    p^2 |G|^2 + p tr(Sigma) / batch. So the squares add up to q |G|^2 + tr(Sigma) / batch, where q is the
    sum of all p^2, and the square of the sum is |G|^2 + tr(Sigma) / batch.

    Args:
        shares: The sum of squares, the square of the sum, the sum of the replicas' squared batches.
        batch: Of all replicas.
    """
    squares, square, batches = shares.double().unbind()
    q = batches / batch**2
    return torch.stack((batch * (squares - q * square), square - squares)) / (1 - q)


def choose_places(count: int, total: int, generator: torch.Generator) -> Tensor:
    """Some of a weight's ``count`` places: its share of ``NUMBERS``, where there are ``total``."""
    wanted = min(count, -(-count * NUMBERS // total))  # ceiling
    if wanted == count:
        return torch.arange(count)
    # Drawn with repetition: a permutation of all places would take the gradient's memory.
    return torch.randint(count, (wanted,), generator=generator).sort().values


def _choose_places(
    weights: Sequence[Tensor],
) -> tuple[list[tuple[Tensor, Tensor | None, int]], Tensor]:
    """Of each weight some places, or all, and how many; and the roots of what each stands for."""
    total = sum(weight.numel() for weight in weights)
    generator = torch.Generator().manual_seed(total)  # its own: training's numbers stay as they are
    chosen: list[tuple[Tensor, Tensor | None, int]] = []
    factors: list[Tensor] = []
    for weight in weights:
        places = choose_places(weight.numel(), total, generator)
        count = len(places)
        is_all = count == weight.numel()
        chosen.append((weight, None if is_all else places.to(weight.device), count))
        factors.append(torch.full((count,), (weight.numel() / max(count, 1)) ** 0.5))
    return chosen, torch.cat(factors).to(weights[0].device)
