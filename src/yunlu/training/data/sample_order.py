"""Order of samples: a pure function of (seed, epoch, position), also when the batch size changes.

A keyed permutation (a Feistel network with cycle walking) gives the sample at any position of any
epoch without storing the permutation: the only state of the data is the step number. Samples and their
order therefore do not depend on the layout, and survive a resume or resize.

Samples of different length can be batched by length: ``BucketOrder`` sorts a window of the same
permutation, splits it into batches and shuffles those, so that a batch holds samples of similar length
and yet differs in every epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ROUNDS = 6
_CHUNK = 1 << 12  # arrays that fit the CPU cache, and that malloc reuses
_WINDOW, _WINDOWS_PER_EPOCH = 64, 4
"""Most batches of a window, and fewest windows of an epoch: with one window batches would never vary.

Texts of 61 tokens in the mean, 153 at p95 and at most 256, batches of 8: 56 % of positions are padding,
19 % with windows of 8 batches, 11 % with 16, 5.5 % with 32, 2.8 % with 64, 1.5 % with 128.
"""


class SampleOrder(Protocol):
    """Sample indices of each step, without end; steps count from 0."""

    @property
    def samples(self) -> int:
        """Samples in the data."""
        ...

    @property
    def batch(self) -> int:
        """Samples of a full step."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        ...

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step``."""
        ...

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        ...

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """Random order, given by the size of the data, the global batch and the seed."""

    samples: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last one may be smaller, so each sample occurs once."""
        return math.ceil(self.samples / self.batch)

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        first = step % self.steps_per_epoch * self.batch
        return min(self.batch, self.samples - first)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + within * self.batch

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        epoch, within = divmod(step, self.steps_per_epoch)
        while True:
            yield from self.rest_of(epoch, within * self.batch)
            epoch, within = epoch + 1, 0

    def rest_of(self, epoch: int, first: int) -> Iterator[NDArray[np.int64]]:
        """The remaining steps of an epoch after its first ``first`` samples."""
        # Many steps at once: the arithmetic is vectorised.
        chunk = max(1, _CHUNK // self.batch) * self.batch
        for start in range(first, self.samples, chunk):
            last = min(start + chunk, self.samples)
            positions = np.arange(start, last, dtype=np.uint64)
            indices = permute(positions, self.samples, seed=self.seed, epoch=epoch)
            yield from np.split(indices, range(self.batch, last - start, self.batch))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketOrder:
    """As ``StepOrder``, but samples of similar length share a step; a short last step stays last."""

    samples: int
    batch: int
    seed: int
    lengths: NDArray[np.integer] = field(repr=False)
    """One per sample."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last one may be smaller, so each sample occurs once."""
        return self._plain.steps_per_epoch

    @property
    def window(self) -> int:
        """Steps whose samples are sorted together."""
        return max(1, min(_WINDOW, self.steps_per_epoch // _WINDOWS_PER_EPOCH))

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        return self._plain.size_of(step)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        return self._plain.samples_before(step)

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        epoch, within = divmod(step, self.steps_per_epoch)
        while True:
            while within < self.steps_per_epoch:
                number, done = divmod(within, self.window)
                yield from self._sorted_window(epoch, number)[done:]
                within = (number + 1) * self.window
            epoch, within = epoch + 1, 0

    @property
    def _plain(self) -> StepOrder:
        return StepOrder(samples=self.samples, batch=self.batch, seed=self.seed)

    def _sorted_window(self, epoch: int, number: int) -> list[NDArray[np.int64]]:
        size = self.window * self.batch
        first, last = number * size, min((number + 1) * size, self.samples)
        positions = np.arange(first, last, dtype=np.uint64)
        indices = permute(positions, self.samples, seed=self.seed, epoch=epoch)
        full_size = len(indices) // self.batch * self.batch
        full, rest = indices[:full_size], indices[full_size:]
        by_length = full[np.argsort(self.lengths[full], kind="stable")].reshape(-1, self.batch)
        numbers = np.arange(len(by_length), dtype=np.uint64)
        # Seeds have 32 bits: the upper bits hold the window number.
        seed = self.seed + ((number + 1) << 32)
        mixed = by_length[permute(numbers, len(by_length), seed=seed, epoch=epoch)]
        return [*mixed, rest] if len(rest) else list(mixed)


def make_order(
    samples: int,
    batch: int,
    seed: int,
    *,
    lengths: NDArray[np.integer] | None = None,
    padding: Literal["pad", "bucket", "pack"] = "pad",
) -> StepOrder | BucketOrder:
    """The order for a padding mode; packing uses the random order, since nothing is padded."""
    if padding != "bucket":
        return StepOrder(samples=samples, batch=batch, seed=seed)
    assert lengths is not None, "bucketing needs sample lengths"
    return BucketOrder(samples=samples, batch=batch, seed=seed, lengths=sort_length(lengths))


def sort_length(lengths: NDArray[np.integer]) -> NDArray[np.integer]:
    """One length per sample to sort by; the sum for samples with several sequences."""
    return lengths if lengths.ndim == 1 else lengths.sum(axis=1)


def digest_of(indices: NDArray[np.int64]) -> int:
    """Additive digest of a set of samples: the sum of their hashes.

    Digests of disjoint parts add up to that of the union, modulo 2**64; an extra or missing sample
    is detected except for one case in 2**64.
    """
    return int(_mix(indices.astype(np.uint64)).sum(dtype=np.uint64))


def permute(
    positions: NDArray[np.uint64], size: int, *, seed: int, epoch: int
) -> NDArray[np.int64]:
    """The images of ``positions`` under the permutation of ``range(size)`` keyed by seed and epoch."""
    half_bits = max(1, math.ceil(math.ceil(math.log2(max(size, 2))) / 2))
    keys = _round_keys(seed, epoch)
    images = _feistel(positions, half_bits, keys)
    # The network permutes a power of four; walking on from outside the range stays a bijection.
    while True:
        outside = images >= size
        if not outside.any():
            return images.astype(np.int64)
        images[outside] = _feistel(images[outside], half_bits, keys)


def _feistel(
    values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    counters = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
    start = _mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch)
    return _mix(_mix(start) + counters)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class PhasedOrder:
    """Phases of full epochs, each with its own order: (first epoch, order), from epoch 0 on.

    Step numbers are translated to each order's own count of the true epoch, so that epochs differ
    across phases as they do within one.
    """

    phases: tuple[tuple[int, SampleOrder], ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        epochs = [first for first, _ in self.phases]
        if not epochs or epochs[0] != 0 or sorted(set(epochs)) != epochs:
            raise ValueError(f"phases must begin at epoch 0 and follow one another: {epochs}")
        if len({order.samples for _, order in self.phases}) > 1:
            raise ValueError("all phases must order the same samples")
        starts = [0]
        for (first, order), (until, _) in zip(self.phases, self.phases[1:], strict=False):
            starts.append(starts[-1] + (until - first) * order.steps_per_epoch)
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.phases[0][1].samples

    @property
    def batch(self) -> int:
        """Samples of a full step of the first phase; see ``size_of``."""
        return self.phases[0][1].batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch of the first phase; see ``epoch_at``."""
        return self.phases[0][1].steps_per_epoch

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        order, order_step = self._locate(step)
        return order.size_of(order_step)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        order, order_step = self._locate(step)
        return order.samples_before(order_step)  # earlier epochs also used every sample once

    def epoch_at(self, step: int) -> float:
        """Epochs done before ``step``; an integer exactly at the end of an epoch."""
        order, order_step = self._locate(step)
        return order_step / order.steps_per_epoch

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        for until in self._starts[1:]:
            if step < until:
                order, order_step = self._locate(step)
                yield from islice(order.steps_from(order_step), until - step)
                step = until
        order, order_step = self._locate(step)
        yield from order.steps_from(order_step)

    def _locate(self, step: int) -> tuple[SampleOrder, int]:
        """The order of the phase of ``step``, and the step number within that order."""
        phase = bisect_right(self._starts, step) - 1
        first_epoch, order = self.phases[phase]
        return order, first_epoch * order.steps_per_epoch + step - self._starts[phase]


@dataclass(frozen=True, slots=True)
class SwitchedOrder:
    """An order up to a step, and from there on another one of another batch size.

    Within an epoch the new order continues at the sample where the first one stopped: positions in an
    epoch do not depend on the batch. Orders by length cannot do that.
    """

    before: PhasedOrder | SwitchedOrder
    step: int
    """First step, from 0, of ``order``."""
    order: SampleOrder
    _first: int = field(init=False, repr=False, compare=False)
    """Samples taken before."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first", self.before.samples_before(self.step))
        if self._first % self.samples and not isinstance(self.order, StepOrder):
            raise ValueError(f"step {self.step} is in the middle of an epoch sorted by length")

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.order.samples

    @property
    def batch(self) -> int:
        """Samples of a full step at first; see ``size_of``."""
        return self.before.batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch at first; see ``epoch_at``."""
        return self.before.steps_per_epoch

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        if step < self.step:
            return self.before.samples_before(step)
        rest = step - self.step - self._steps_to_epoch_end
        if rest < 0:
            return self._first + (step - self.step) * self.order.batch
        return self.order.samples_before(self._next_epoch * self.order.steps_per_epoch + rest)

    def epoch_at(self, step: int) -> float:
        """Epochs done before ``step``; an integer exactly at the end of an epoch."""
        if step < self.step:
            return self.before.epoch_at(step)
        epochs, within = divmod(self.samples_before(step), self.samples)
        return epochs + within / self.samples

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        if step < self.step:
            yield from islice(self.before.steps_from(step), self.step - step)
            step = self.step
        order_step = step - self.step
        if order_step < self._steps_to_epoch_end:
            assert isinstance(self.order, StepOrder)
            epoch, done = divmod(self._first, self.samples)
            yield from self.order.rest_of(epoch, done + order_step * self.order.batch)
        rest = max(order_step - self._steps_to_epoch_end, 0)
        yield from self.order.steps_from(self._next_epoch * self.order.steps_per_epoch + rest)

    @property
    def _steps_to_epoch_end(self) -> int:
        """Remaining steps of the current epoch; 0 at its boundary."""
        done = self._first % self.samples
        return -(-(self.samples - done) // self.order.batch) if done else 0

    @property
    def _next_epoch(self) -> int:
        return -(-self._first // self.samples)


RunOrder = PhasedOrder | SwitchedOrder
"""Sample order of a run."""
