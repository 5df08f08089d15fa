"""What all workers agree on before a step: how much it holds, of which samples, and whether to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch

StepRequest = Literal["", "relink", "pause", "stop", "serve"]
"""``relink``: measure the links, they are no longer what they were. ``serve``: train for servers from now
on; nobody need ask that of the others, since all have chosen it."""
_WEIGHT = {"": 0, "relink": 1, "pause": 1 << 20, "stop": 1 << 40}


@dataclass(frozen=True, slots=True)
class StepTotals:
    """One step, over all workers."""

    items: int
    tokens: int
    padding: int
    samples: int = 0
    digest: int = 0
    """Of the samples that the workers took, in any order."""
    ask: StepRequest = ""
    """What one of them asked for: everyone then stands before the same step."""


def sync_step(world: World, micros: Sequence[Batch], ask: StepRequest = "") -> StepTotals:
    """Add up the parts of a step; one short collective."""
    items = tokens = padding = samples = digest = 0
    for micro in micros:
        items += micro.items
        tokens += micro.tokens
        padding += micro.padding
        samples += micro.samples
        digest += micro.digest
    if world.layout.is_single:
        return StepTotals(items, tokens, padding, samples, digest % _RANGE, ask)
    ours = [items, tokens, padding, samples, _signed(digest), encode_request(ask)]
    if world.place.tp or world.place.pp:
        # Workers that cut one model between them took the same samples: one of them tells.
        ours[:5] = [0] * 5
    found: list[int] = world.sum_over_all(torch.tensor(ours)).tolist()
    items, tokens, padding, samples, digest, asked = found
    return StepTotals(items, tokens, padding, samples, digest % _RANGE, decode_request(asked))


def encode_request(ask: StepRequest) -> int:
    """What one asks, as a number to be summed over all workers."""
    return _WEIGHT[ask]


def decode_request(total: int) -> StepRequest:
    """What is asked for, by such a sum."""
    if total >= _WEIGHT["stop"]:
        return "stop"
    if total >= _WEIGHT["pause"]:
        return "pause"
    return "relink" if total else ""


_RANGE = 1 << 64


def _signed(number: int) -> int:
    number %= _RANGE
    return number - _RANGE if number >= _RANGE // 2 else number
