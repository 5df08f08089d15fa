"""Which samples a step consumes: a pure function of (seed, epoch, position), never of the workers.

A keyed permutation (a Feistel network with cycle walking) gives the sample at any position of any
epoch without holding the permutation: the whole state of the data is the number of the step. Any
layout, any resume and any resize therefore sees the same samples in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ROUNDS = 6
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """The samples of every step, from the size of the data, the global batch and the seed."""

    samples: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last step of an epoch takes what is left, so each sample comes once per epoch."""
        return math.ceil(self.samples / self.batch)

    def size_of(self, step: int) -> int:
        """How many samples step ``step`` (from 0) consumes."""
        first = step % self.steps_per_epoch * self.batch
        return min(self.batch, self.samples - first)

    def samples_before(self, step: int) -> int:
        """How many samples all steps before ``step`` consumed."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + within * self.batch

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """The sample indices of each step, from ``step`` on, without end."""
        epoch, within = divmod(step, self.steps_per_epoch)
        per_chunk = max(1, _CHUNK // self.batch)  # many steps at once: the arithmetic is vectorised
        while True:
            while within < self.steps_per_epoch:
                until = min(within + per_chunk, self.steps_per_epoch)
                first, last = within * self.batch, min(until * self.batch, self.samples)
                positions = np.arange(first, last, dtype=np.uint64)
                indices = permute(positions, self.samples, seed=self.seed, epoch=epoch)
                yield from np.split(indices, range(self.batch, last - first, self.batch))
                within = until
            epoch, within = epoch + 1, 0


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
