"""What all workers agree on before a step: how much it holds, of which samples, and whether to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from yunlu.training.data.order import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch

Ask = Literal["", "pause", "stop"]
_WEIGHT = {"": 0, "pause": 1, "stop": 1 << 32}


@dataclass(frozen=True, slots=True)
class Agreed:
    """One step, over all workers."""

    items: int
    tokens: int
    padding: int
    samples: int = 0
    digest: int = 0
    """Of the samples that the workers took, in any order."""
    ask: Ask = ""
    """What one of them asked for: everyone then stands before the same step."""


def agree(world: World, micros: Sequence[Batch], ask: Ask = "") -> Agreed:
    """Add up the parts of a step; one short collective."""
    items = tokens = padding = samples = digest = 0
    for micro in micros:
        items += micro.items
        tokens += micro.tokens
        padding += micro.padding
        samples += micro.samples
        digest += micro.digest
    if world.layout.is_single:
        return Agreed(items, tokens, padding, samples, digest % _RANGE, ask)
    ours = [items, tokens, padding, samples, _signed(digest), _WEIGHT[ask]]
    found: list[int] = world.sum_over_all(torch.tensor(ours)).tolist()
    # Workers that cut one model between them took the same samples.
    alike = world.layout.tp * world.layout.pp
    items, tokens, padding, samples = (number // alike for number in found[:4])
    asked: Ask = "stop" if found[5] >= _WEIGHT["stop"] else "pause" if found[5] else ""
    return Agreed(items, tokens, padding, samples, found[4] % _RANGE, asked)


def expected_digest(world: World, indices: NDArray[np.int64]) -> int:
    """What ``agree`` finds when every sample of the step was taken by one replica, and once."""
    alike = world.layout.tp * world.layout.pp
    return digest_of(indices) * alike % _RANGE


_RANGE = 1 << 64


def _signed(number: int) -> int:
    number %= _RANGE
    return number - _RANGE if number >= _RANGE // 2 else number
