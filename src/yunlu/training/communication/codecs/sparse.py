"""Only some of the numbers: the largest, or random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from yunlu.training.communication.codecs.codec import read_as

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_VALUE_BYTES = 2
_PLACE_BYTES = 2
_COUNT_BYTES = 4
_STRETCH = 1 << 16
"""Places are told from the beginning of a stretch, in two bytes."""
_SAMPLES = 1 << 14
_SEED_BYTES = 8


def count_selected(length: int, share: float) -> int:
    """How many of so many numbers travel."""
    return min(length, max(1, round(length * share)))


class TopKCodec:
    """The largest numbers, as bf16, and where they are (Aji and Heafield 2017; Lin et al. 2018)."""

    name = "topk"

    def __init__(self, share: float = 0.01) -> None:
        self.share = check_share(share)

    def size_bytes(self, length: int) -> int:
        """See ``Codec``."""
        kept = count_selected(length, self.share)
        return _COUNT_BYTES * -(-length // _STRETCH) + (_PLACE_BYTES + _VALUE_BYTES) * kept

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        """See ``Codec``."""
        del seed
        kept = count_selected(len(values), self.share)
        places = find_largest(values.abs().numpy(), kept)
        stretches = -(-len(values) // _STRETCH)
        counts = np.bincount(places // _STRETCH, minlength=stretches).astype("<i4")
        parts = (
            torch.from_numpy(counts),
            torch.from_numpy((places % _STRETCH).astype("<u2")),
            values[torch.from_numpy(places)].to(torch.bfloat16),
        )
        torch.cat([part.view(torch.uint8) for part in parts], out=out)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        kept = count_selected(len(out), self.share)
        starts = np.arange(0, len(out), _STRETCH)
        counts_bytes = _COUNT_BYTES * len(starts)
        places_end = counts_bytes + _PLACE_BYTES * kept
        counts = read_as(data[:counts_bytes], torch.int32).numpy()
        within = read_as(data[counts_bytes:places_end], torch.uint16).numpy()
        places = torch.from_numpy(np.repeat(starts, counts) + within)
        _scatter(places, data[places_end:], out, add=add)


class RandomKCodec:
    """Random numbers as bf16: one out of each of ``k`` stretches, which one the seed tells.

    Workers with the same seed send the same places, so their sum is as small as its parts.
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
        places = _draw(len(values), count_selected(len(values), self.share), seed)
        parts = (torch.tensor([seed]), values[places].to(torch.bfloat16))
        torch.cat([part.view(torch.uint8) for part in parts], out=out)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See ``Codec``."""
        if not len(out):
            return
        seed = int(read_as(data[:_SEED_BYTES], torch.int64))
        places = _draw(len(out), count_selected(len(out), self.share), seed)
        _scatter(places, data[_SEED_BYTES:], out, add=add)


def check_share(share: float) -> float:
    """The share itself, if it is one."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"a share of {share} is not between 0 and 1")
    return share


def find_largest(sizes: NDArray[Any], kept: int) -> NDArray[Any]:
    """Where the ``kept`` largest are, in order; what is no number counts as largest.

    A sample tells from which size on it is worth looking: sorting parts of the rest would take longer
    than all else.
    """
    found = np.arange(len(sizes))
    step = len(sizes) // _SAMPLES
    if step > 1:
        sample = sizes[::step]
        expected = len(sample) * kept / len(sizes)
        wanted = int(expected + 4 * expected**0.5) + 8  # four standard deviations more than needed
        if wanted < len(sample):
            bound = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
            candidates = np.flatnonzero(~(sizes < bound))
            if len(candidates) >= kept:
                found, sizes = candidates, sizes[candidates]
    if len(found) > kept:
        found = found[np.argpartition(sizes, len(found) - kept)[len(found) - kept :]]
        found.sort()
    return found


def _draw(length: int, kept: int, seed: int) -> Tensor:
    """One place out of each of ``kept`` stretches that are as long as each other, or nearly."""
    starts = np.arange(kept + 1) * length // kept
    # The same on every machine, whatever its libraries (Steele et al. 2014, SplitMix64).
    mixed = np.arange(1, kept + 1, dtype=np.uint64)
    mixed = (mixed + np.uint64(seed % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy(starts[:-1] + (mixed % np.diff(starts).astype(np.uint64)).astype(int))


def _scatter(places: Tensor, data: Tensor, out: Tensor, *, add: bool) -> None:
    values = read_as(data, torch.bfloat16).float()
    if not add:
        out.zero_()
    out.index_add_(0, places, values)
