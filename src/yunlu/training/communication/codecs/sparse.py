"""Sparsification: only the largest values, or random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from yunlu.training.communication.codecs.codec import read_as

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_VALUE_BYTES = 2
_POSITION_BYTES = 2
_COUNT_BYTES = 4
_BLOCK = 1 << 16
"""Positions are relative to a block, in two bytes."""
_SAMPLES = 1 << 14
_SEED_BYTES = 8


def count_selected(length: int, share: float) -> int:
    """Number of values to send."""
    return min(length, max(1, round(length * share)))


class TopKCodec:
    """The largest values as bf16, and their positions (Aji and Heafield 2017; Lin et al. 2018)."""

    name = "topk"

    def __init__(self, share: float = 0.01) -> None:
        self.share = check_share(share)

    def size_bytes(self, length: int) -> int:
        """See ``Codec``."""
        count = count_selected(length, self.share)
        return _COUNT_BYTES * -(-length // _BLOCK) + (_POSITION_BYTES + _VALUE_BYTES) * count

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        del seed
        if not len(values):
            return
        count = count_selected(len(values), self.share)
        positions = find_largest(values.abs().numpy(), count)
        blocks = -(-len(values) // _BLOCK)
        counts = np.bincount(positions // _BLOCK, minlength=blocks).astype("<i4")
        parts = (
            torch.from_numpy(counts),
            torch.from_numpy((positions % _BLOCK).astype("<u2")),
            values[torch.from_numpy(positions)].to(torch.bfloat16),
        )
        torch.cat([part.view(torch.uint8) for part in parts], out=out)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        if not len(out):
            return
        count = count_selected(len(out), self.share)
        starts = np.arange(0, len(out), _BLOCK)
        counts_bytes = _COUNT_BYTES * len(starts)
        positions_end = counts_bytes + _POSITION_BYTES * count
        counts = read_as(data[:counts_bytes], torch.int32).numpy()
        within = read_as(data[counts_bytes:positions_end], torch.uint16).numpy()
        positions = torch.from_numpy(np.repeat(starts, counts) + within)
        _scatter(positions, data[positions_end:], out, add=add)


class RandomKCodec:
    """Random values as bf16: one of each of ``k`` blocks, chosen by the seed.

    Workers with the same seed send the same positions, so that their sum is as sparse.
    """

    name = "randomk"

    def __init__(self, share: float = 0.01) -> None:
        self.share = check_share(share)

    def size_bytes(self, length: int) -> int:
        """See ``Codec``."""
        return _SEED_BYTES + _VALUE_BYTES * count_selected(length, self.share) if length else 0

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        if not len(values):
            return
        positions = _draw(len(values), count_selected(len(values), self.share), seed)
        parts = (torch.tensor([seed]), values[positions].to(torch.bfloat16))
        torch.cat([part.view(torch.uint8) for part in parts], out=out)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        if not len(out):
            return
        seed = int(read_as(data[:_SEED_BYTES], torch.int64))
        positions = _draw(len(out), count_selected(len(out), self.share), seed)
        _scatter(positions, data[_SEED_BYTES:], out, add=add)


def check_share(share: float) -> float:
    """Validate a share."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"the share must be above 0 and at most 1, not {share}")
    return share


def find_largest(sizes: NDArray[Any], count: int) -> NDArray[Any]:
    """Positions of the ``count`` largest, in order; NaN counts as largest.

    A sample gives a threshold below which values need not be considered: partitioning all of them would
    take longer than everything else.
    """
    selected = np.arange(len(sizes))
    step = len(sizes) // _SAMPLES
    if step > 1:
        sample = sizes[::step]
        expected = len(sample) * count / len(sizes)
        rank_in_sample = (
            int(expected + 4 * expected**0.5) + 8
        )  # four standard deviations more than needed
        if rank_in_sample < len(sample):
            bound = np.partition(sample, len(sample) - rank_in_sample)[len(sample) - rank_in_sample]
            candidates = np.flatnonzero(~(sizes < bound))
            if len(candidates) >= count:
                selected, sizes = candidates, sizes[candidates]
    if len(selected) > count:
        selected = selected[np.argpartition(sizes, len(selected) - count)[len(selected) - count :]]
        selected.sort()
    return selected


def _draw(length: int, count: int, seed: int) -> Tensor:
    """One position of each of ``count`` blocks of nearly equal length."""
    starts = np.arange(count + 1) * length // count
    # Equal on every machine, whatever its libraries (Steele et al. 2014, SplitMix64).
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    mixed = (mixed + np.uint64(seed % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy(starts[:-1] + (mixed % np.diff(starts).astype(np.uint64)).astype(int))


def _scatter(positions: Tensor, data: Tensor, out: Tensor, *, add: bool) -> None:
    values = read_as(data, torch.bfloat16).float()
    if not add:
        out.zero_()
    out.index_add_(0, positions, values)
