"""From the order of samples to micro-batches, with or without loading processes."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.training.data.order import StepOrder
    from yunlu.training.tasks.task import Batch, Samples


def step_batches(
    samples: Samples,
    collate: Callable[[Sequence[Any]], Batch],
    order: StepOrder,
    *,
    micro_batch: int,
    first_step: int,
    steps: int,
    workers: int,
) -> Iterator[list[Batch]]:
    """For each step from ``first_step`` (from 0) up to ``steps``: its micro-batches."""
    sizes = (
        -(-order.size_of(step) // micro_batch)  # ceiling
        for step in range(first_step, steps)
    )
    micros = load(
        samples, collate, _micro_indices(order, micro_batch, first_step, steps), workers=workers
    )
    for size in sizes:
        yield list(islice(micros, size))


def sequential_batches(
    samples: Samples, collate: Callable[[Sequence[Any]], Batch], *, micro_batch: int, workers: int
) -> Iterator[Batch]:
    """Every sample once, in its own order: evaluation."""
    indices = (
        list(range(first, min(first + micro_batch, len(samples))))
        for first in range(0, len(samples), micro_batch)
    )
    return load(samples, collate, indices, workers=workers)


def load(
    samples: Samples,
    collate: Callable[[Sequence[Any]], Batch],
    indices: Iterator[list[int]],
    *,
    workers: int,
) -> Iterator[Batch]:
    """Fetch and collate each list of indices."""
    work = _Work(samples, collate)
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


class _Work:
    """Fetches and collates; in a loading process, an error for the user travels as a value."""

    def __init__(self, samples: Samples, collate: Callable[[Sequence[Any]], Batch]) -> None:
        self._samples, self._collate = samples, collate
        # torch's convention for fetching many samples in one go
        self._fetch_many = getattr(samples, "__getitems__", None)

    def __call__(self, indices: list[int]) -> Batch:
        if self._fetch_many is not None:
            return self._collate(self._fetch_many(indices))
        return self._collate([self._samples[index] for index in indices])

    def __getitems__(self, indices: list[int]) -> list[Batch | YunluError]:
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


def _micro_indices(
    order: StepOrder, micro_batch: int, first_step: int, steps: int
) -> Iterator[list[int]]:
    for indices in islice(order.steps_from(first_step), max(steps - first_step, 0)):
        chosen = indices.tolist()
        for first in range(0, len(chosen), micro_batch):
            yield chosen[first : first + micro_batch]
