"""Step synchronization: totals over all workers, the sample digest, and requests to pause or stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch

StepRequest = Literal["", "relink", "pause", "stop", "serve"]
"""``relink``: measure the links again. ``serve``: switch to asynchronous training; every worker
has chosen it, so it is never sent."""
_REQUEST_CODES = {"": 0, "relink": 1, "pause": 1 << 20, "stop": 1 << 40}


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of one step over all workers."""

    items: int
    tokens: int
    padding: int
    samples: int = 0
    digest: int = 0
    """Order-independent digest of the samples used."""
    request: StepRequest = ""
    """Strongest request of any worker; all workers then stop before the same step."""


def sync_step(world: World, micros: Sequence[Batch], request: StepRequest = "") -> StepTotals:
    """Sum the counts of a step over all workers, in one small collective."""
    items = tokens = padding = samples = digest = 0
    for micro in micros:
        items += micro.items
        tokens += micro.tokens
        padding += micro.padding
        samples += micro.samples
        digest += micro.digest
    if world.layout.is_single:
        return StepTotals(items, tokens, padding, samples, digest % _RANGE, request)
    counts = [items, tokens, padding, samples, _signed(digest), encode_request(request)]
    if world.coordinates.tp or world.coordinates.pp:
        # Tensor- and pipeline-parallel workers use the same samples: count them once.
        counts[:5] = [0] * 5
    summed: list[int] = world.sum_over_all(torch.tensor(counts)).tolist()
    items, tokens, padding, samples, digest, code = summed
    return StepTotals(items, tokens, padding, samples, digest % _RANGE, decode_request(code))


def encode_request(request: StepRequest) -> int:
    """Encode a request as a number that is summed over all workers."""
    return _REQUEST_CODES[request]


def decode_request(total: int) -> StepRequest:
    """Strongest request in a sum of encoded requests."""
    if total >= _REQUEST_CODES["stop"]:
        return "stop"
    if total >= _REQUEST_CODES["pause"]:
        return "pause"
    return "relink" if total else ""


_RANGE = 1 << 64


def _signed(number: int) -> int:
    number %= _RANGE
    return number - _RANGE if number >= _RANGE // 2 else number
