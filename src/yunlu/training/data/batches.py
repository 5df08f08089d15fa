"""From the order of samples to micro-batches, with or without loading processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from yunlu.core.errors import YunluError
from yunlu.training.data.sample_order import digest_of, shard_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from yunlu.training.data.sample_order import SampleOrder
    from yunlu.training.tasks.task import Batch, Samples


@dataclass(frozen=True, slots=True)
class BatchShard:
    """Which part of every step is ours, where replicas share it out."""

    replica: int = 0
    replicas: int = 1


WHOLE = BatchShard()


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
    share: BatchShard = WHOLE,
    digests: bool = False,
) -> Iterator[list[Batch]]:
    """For each step from ``first_step`` (from 0) up to ``steps``: our share of its micro-batches.

    With ``lengths``, samples of like length share a micro-batch: the same step, less padding.
    With ``digests``, batches tell which samples they hold.
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
    """Every sample once, in its own order: evaluation."""
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
    work = _Work(samples, collate, digests=digests)
    if workers == 0:
        return map(work, indices)
    loader = DataLoader(
        cast("Any", work),
        batch_sampler=cast("Any", indices),
        collate_fn=_unwrap,
        num_workers=workers,
        # Its own generator: the default one would draw from the training's random numbers.
        generator=torch.Generator(),
    )
    return map(_raise_if_error, loader)


def fetch(samples: Samples, indices: NDArray[np.int64]) -> Any:
    """The samples at these places, in one go where the data set can do that."""
    at_once = getattr(samples, "fetch_array", None)
    if at_once is not None:
        return at_once(indices)
    many = getattr(samples, "__getitems__", None)  # torch's convention
    listed = indices.tolist()
    return many(listed) if many is not None else [samples[index] for index in listed]


class _Work:
    """Fetches and collates; in a loading process, an error for the user travels as a value."""

    def __init__(
        self, samples: Samples, collate: Callable[[Sequence[Any]], Batch], *, digests: bool
    ) -> None:
        self._samples, self._collate, self._digests = samples, collate, digests

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        if indices[0] >= 0:
            batch = self._collate(fetch(self._samples, indices))
            return replace(batch, digest=digest_of(indices)) if self._digests else batch
        stand_in = self._collate(fetch(self._samples, -1 - indices))
        return replace(stand_in, samples=0, items=0, tokens=0, padding=0, counts=False)

    def __getitems__(self, indices: NDArray[np.int64]) -> list[Batch | YunluError]:
        try:
            return [self(indices)]
        except YunluError as error:  # torch would wrap it into a traceback
            return [error]


def _unwrap(made: list[Any]) -> Any:
    return made[0]


def _raise_if_error(made: Batch | YunluError) -> Batch:
    if isinstance(made, YunluError):
        raise made
    return made


def count_micros(size: int, micro_batch: int, replicas: int = 1) -> int:
    """Micro-batches of a step, the same for every replica: they meet in each of them."""
    largest_share = -(-size // replicas)  # ceiling
    return -(-largest_share // micro_batch)


def micro_indices(
    order: SampleOrder,
    micro_batch: int,
    first_step: int,
    steps: int,
    *,
    lengths: NDArray[np.integer] | None = None,
    share: BatchShard = WHOLE,
) -> Iterator[NDArray[np.int64]]:
    """The samples of each of our micro-batches, step after step.

    Where there are fewer samples than replicas, some get a stand-in: -1 - the index of a sample
    that another one takes.
    """
    weights = None if lengths is None else shard_weight(lengths)
    for indices in islice(order.steps_from(first_step), max(steps - first_step, 0)):
        micros = count_micros(len(indices), micro_batch, share.replicas)
        if weights is not None and (micros > 1 or share.replicas > 1):
            indices = indices[np.argsort(weights[indices], kind="stable")]  # noqa: PLW2901 - the same step, in another order
        if share.replicas == 1:
            for first in range(0, len(indices), micro_batch):
                yield indices[first : first + micro_batch]
            continue
        # Each micro-batch of all replicas together is a run of the step: of like length, then.
        for micro in np.array_split(indices, micros):
            ours = np.array_split(micro, share.replicas)[share.replica]
            yield ours if len(ours) else -1 - micro[:1]
