"""How long samples are, and how much padding an order of them costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.training.data.batches import micro_indices
from yunlu.training.data.sample_order import shard_weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.training.data.sample_order import SampleOrder


def lengths_of(samples: Any) -> NDArray[np.integer] | None:
    """What the samples know of their lengths: ``(N,)``, or ``(N, sides)`` where each has several.

    None where they are all of one size, or where lengths would have to be measured first.
    """
    lengths = getattr(samples, "lengths", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu":
        return None  # somebody's own data may call anything its lengths
    return lengths if lengths.ndim in {1, 2} and len(lengths) == len(samples) else None


def expected_padding(
    lengths: NDArray[np.integer],
    order: SampleOrder,
    *,
    micro_batch: int | None = None,
    steps: int = 256,
) -> float:
    """The share of computed positions that is padding, over the first ``steps`` of the order.

    Counted, not estimated, for samples that are padded to the longest of their micro-batch.
    """
    steps = min(steps, order.steps_per_epoch)
    cut = order.batch if micro_batch is None else micro_batch
    sides = lengths.reshape(len(lengths), -1)
    real = computed = 0
    for chosen in micro_indices(order, cut, 0, steps, lengths=lengths):
        real += int(sides[chosen].sum())
        computed += len(chosen) * int(sides[chosen].max(axis=0).sum())
    return 1 - real / max(computed, 1)


def longest_samples(lengths: NDArray[np.integer], count: int) -> NDArray[np.int64]:
    """The samples of the largest micro-batch there can be: what has to fit into memory."""
    return np.argsort(shard_weight(lengths), kind="stable")[::-1][:count].copy()
