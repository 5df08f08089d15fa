"""Step synchronization: totals over all workers, the sample digest, and requests to pause or stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.single_worker import DIGESTS, StepTotals, total_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import Batch

_REQUEST_CODES = {"": 0, "relink": 1, "pause": 1 << 20, "stop": 1 << 40}


def sync_step(world: World, micros: Sequence[Batch], request: StepRequest = "") -> StepTotals:
    """Sum the counts of a step over all workers, in one small collective."""
    own = total_of(micros, request)
    if world.layout.is_single:
        return own
    totals = [own.items, own.tokens, own.padding, own.samples, _signed(own.digest)]
    counts = [*totals, encode_request(request)]
    if world.coordinates.tp or world.coordinates.pp:
        # Tensor- and pipeline-parallel workers use the same samples: count them once.
        counts[:5] = [0] * 5
    summed: list[int] = world.sum_over_all(torch.tensor(counts)).tolist()
    items, tokens, padding, samples, digest, code = summed
    return StepTotals(items, tokens, padding, samples, digest % DIGESTS, decode_request(code))


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


def _signed(number: int) -> int:
    number %= DIGESTS
    return number - DIGESTS if number >= DIGESTS // 2 else number
