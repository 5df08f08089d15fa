"""A batch that grows at the turn of an epoch: several orders, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from yunlu.training.data.order import Order


@dataclass(frozen=True, slots=True)
class GrowingOrder:
    """Phases of whole epochs, each with its own order: (first epoch, order), from epoch 0 on.

    An order is asked for the step that its own count would give to the true epoch, so that
    epochs differ from one another across phases as they do within one.
    """

    phases: tuple[tuple[int, Order], ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        epochs = [first for first, _ in self.phases]
        if not epochs or epochs[0] != 0 or sorted(set(epochs)) != epochs:
            raise ValueError(f"phases must begin at epoch 0 and follow one another: {epochs}")
        if len({order.samples for _, order in self.phases}) > 1:
            raise ValueError("all phases must order the same samples")
        starts = [0]
        for (first, order), (until, _) in zip(self.phases, self.phases[1:], strict=False):
            starts.append(starts[-1] + (until - first) * order.steps_per_epoch)
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.phases[0][1].samples

    @property
    def batch(self) -> int:
        """Samples of a full step of the first phase; ``size_of`` knows the others."""
        return self.phases[0][1].batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch of the first phase; ``epoch_at`` knows the others."""
        return self.phases[0][1].steps_per_epoch

    def size_of(self, step: int) -> int:
        """How many samples step ``step`` (from 0) consumes."""
        order, own = self._locate(step)
        return order.size_of(own)

    def samples_before(self, step: int) -> int:
        """How many samples all steps before ``step`` consumed."""
        order, own = self._locate(step)
        return order.samples_before(own)  # epochs before the phase took every sample once, too

    def epoch_at(self, step: int) -> float:
        """Epochs done before ``step``; a whole number exactly at the turn of an epoch."""
        order, own = self._locate(step)
        return own / order.steps_per_epoch

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """The sample indices of each step, from ``step`` on, without end."""
        for until in self._starts[1:]:
            if step < until:
                order, own = self._locate(step)
                yield from islice(order.steps_from(own), until - step)
                step = until
        order, own = self._locate(step)
        yield from order.steps_from(own)

    def _locate(self, step: int) -> tuple[Order, int]:
        """The order of the phase of ``step``, and the number that the order gives to it."""
        phase = bisect_right(self._starts, step) - 1
        first_epoch, order = self.phases[phase]
        return order, first_epoch * order.steps_per_epoch + step - self._starts[phase]
