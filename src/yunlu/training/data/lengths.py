"""Sample lengths, and the share of padding of an order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.training.data.batches import micro_indices
from yunlu.training.data.sample_order import sort_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.training.data.sample_order import SampleOrder


def lengths_of(samples: Any) -> NDArray[np.integer] | None:
    """Lengths of the samples: ``(N,)``, or ``(N, sides)`` for several sequences per sample.

    None if all are of one size, or if the samples do not provide lengths.
    """
    lengths = getattr(samples, "lengths", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu":
        return None  # user data may have an unrelated attribute of that name
    return lengths if lengths.ndim in {1, 2} and len(lengths) == len(samples) else None


def expected_padding(
    lengths: NDArray[np.integer],
    order: SampleOrder,
    *,
    micro_batch: int | None = None,
    steps: int = 256,
) -> float:
    """Share of padding in computed positions, over the first ``steps`` of the order.

    Counted exactly, for samples padded to the longest of their micro-batch.
    """
    steps = min(steps, order.steps_per_epoch)
    size = order.batch if micro_batch is None else micro_batch
    sides = lengths.reshape(len(lengths), -1)
    real = computed = 0
    for chosen in micro_indices(order, size, 0, steps, lengths=lengths):
        real += int(sides[chosen].sum())
        computed += len(chosen) * int(sides[chosen].max(axis=0).sum())
    return 1 - real / max(computed, 1)


def longest_samples(lengths: NDArray[np.integer], count: int) -> NDArray[np.int64]:
    """Indices of the longest samples: the largest possible micro-batch, which has to fit into memory."""
    return np.argsort(sort_length(lengths), kind="stable")[::-1][:count].copy()
