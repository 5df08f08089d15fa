"""Micro-batches from the sample order, with or without loader processes, and their padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from yunlu.core.errors import YunluError
from yunlu.training.data.sample_order import digest_of, sort_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from yunlu.training.data.sample_order import SampleOrder
    from yunlu.training.tasks.task import Batch, Samples


@dataclass(frozen=True, slots=True)
class BatchShard:
    """This replica's share of every step."""

    replica: int = 0
    replicas: int = 1


FULL_BATCH = BatchShard()


def step_batches(
    samples: Samples,
    collate: Callable[[Sequence[Any]], Batch],
    order: SampleOrder,
    *,
    micro_batch: int,
    first_step: int,
    steps: int,
    workers: int,
    lengths: NDArray[np.integer] | None = None,
    share: BatchShard = FULL_BATCH,
    digests: bool = False,
) -> Iterator[list[Batch]]:
    """This replica's micro-batches of each step from ``first_step`` (from 0) up to ``steps``.

    With ``lengths``, samples of similar length share a micro-batch: the same step, less padding.
    With ``digests``, batches carry a digest of their samples.
    """
    sizes = (
        count_micros(order.size_of(step), micro_batch, share.replicas)
        for step in range(first_step, steps)
    )
    indices = micro_indices(order, micro_batch, first_step, steps, lengths=lengths, share=share)
    micros = load(samples, collate, indices, workers=workers, digests=digests)
    for size in sizes:
        yield list(islice(micros, size))


def sequential_batches(
    samples: Samples, collate: Callable[[Sequence[Any]], Batch], *, micro_batch: int, workers: int
) -> Iterator[Batch]:
    """Every sample once, in order, for evaluation."""
    indices = (
        np.arange(first, min(first + micro_batch, len(samples)))
        for first in range(0, len(samples), micro_batch)
    )
    return load(samples, collate, indices, workers=workers)


def load(
    samples: Samples,
    collate: Callable[[Sequence[Any]], Batch],
    indices: Iterator[NDArray[np.int64]],
    *,
    workers: int,
    digests: bool = False,
) -> Iterator[Batch]:
    """Fetch and collate each list of indices."""
    work = _FetchAndCollate(samples, collate, digests=digests)
    if workers == 0:
        return map(work, indices)
    loader = DataLoader(
        cast("Any", work),
        batch_sampler=cast("Any", indices),
        collate_fn=_unwrap,
        num_workers=workers,
        # A separate generator: the default one would change the training's random numbers.
        generator=torch.Generator(),
    )
    return map(_raise_if_error, loader)


def fetch(samples: Samples, indices: NDArray[np.int64]) -> Any:
    """Fetch samples by index, in one call if the data set supports it."""
    fetch_array = getattr(samples, "fetch_array", None)
    if fetch_array is not None:
        return fetch_array(indices)
    getitems = getattr(samples, "__getitems__", None)  # torch's convention
    listed = indices.tolist()
    return getitems(listed) if getitems is not None else [samples[index] for index in listed]


class _FetchAndCollate:
    """Fetches and collates; in a loader process, user errors are returned as values."""

    def __init__(
        self, samples: Samples, collate: Callable[[Sequence[Any]], Batch], *, digests: bool
    ) -> None:
        self._samples, self._collate, self._digests = samples, collate, digests

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        if indices[0] >= 0:
            batch = self._collate(fetch(self._samples, indices))
            return replace(batch, digest=digest_of(indices)) if self._digests else batch
        placeholder = self._collate(fetch(self._samples, -1 - indices))
        return replace(placeholder, samples=0, items=0, tokens=0, padding=0, counts=False)

    def __getitems__(self, indices: NDArray[np.int64]) -> list[Batch | YunluError]:
        try:
            return [self(indices)]
        except YunluError as error:  # torch would wrap it into a traceback
            return [error]


def _unwrap(loaded: list[Any]) -> Any:
    return loaded[0]


def _raise_if_error(loaded: Batch | YunluError) -> Batch:
    if isinstance(loaded, YunluError):
        raise loaded
    return loaded


def count_micros(size: int, micro_batch: int, replicas: int = 1) -> int:
    """Micro-batches of a step, the same for every replica: they synchronise in each."""
    largest_share = -(-size // replicas)  # ceiling
    return -(-largest_share // micro_batch)


def micro_indices(
    order: SampleOrder,
    micro_batch: int,
    first_step: int,
    steps: int,
    *,
    lengths: NDArray[np.integer] | None = None,
    share: BatchShard = FULL_BATCH,
) -> Iterator[NDArray[np.int64]]:
    """Sample indices of each of this replica's micro-batches, step after step.

    With fewer samples than replicas, some get a placeholder: -1 - the index of another replica's
    sample.
    """
    weights = None if lengths is None else sort_length(lengths)
    for indices in islice(order.steps_from(first_step), max(steps - first_step, 0)):
        micros = count_micros(len(indices), micro_batch, share.replicas)
        if weights is not None and (micros > 1 or share.replicas > 1):
            indices = indices[np.argsort(weights[indices], kind="stable")]  # noqa: PLW2901 - the same step, in another order
        if share.replicas == 1:
            for first in range(0, len(indices), micro_batch):
                yield indices[first : first + micro_batch]
            continue
        # The replicas' micro-batches together are a contiguous range: of similar length.
        for micro in np.array_split(indices, micros):
            own_indices = np.array_split(micro, share.replicas)[share.replica]
            yield own_indices if len(own_indices) else -1 - micro[:1]


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
