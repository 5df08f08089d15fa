"""Sample orders with a changing batch size; each sample still occurs once per epoch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from yunlu.training.data.sample_order import StepOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from yunlu.training.data.sample_order import SampleOrder


@dataclass(frozen=True, slots=True)
class PhasedOrder:
    """Phases of full epochs, each with its own order: (first epoch, order), from epoch 0 on.

    Step numbers are translated to each order's own count of the true epoch, so that epochs differ
    across phases as they do within one.
    """

    phases: tuple[tuple[int, SampleOrder], ...]
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
        """Samples of a full step of the first phase; see ``size_of``."""
        return self.phases[0][1].batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch of the first phase; see ``epoch_at``."""
        return self.phases[0][1].steps_per_epoch

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        order, order_step = self._locate(step)
        return order.size_of(order_step)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        order, order_step = self._locate(step)
        return order.samples_before(order_step)  # earlier epochs also used every sample once

    def epoch_at(self, step: int) -> float:
        """Epochs done before ``step``; an integer exactly at the end of an epoch."""
        order, order_step = self._locate(step)
        return order_step / order.steps_per_epoch

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        for until in self._starts[1:]:
            if step < until:
                order, order_step = self._locate(step)
                yield from islice(order.steps_from(order_step), until - step)
                step = until
        order, order_step = self._locate(step)
        yield from order.steps_from(order_step)

    def _locate(self, step: int) -> tuple[SampleOrder, int]:
        """The order of the phase of ``step``, and the step number within that order."""
        phase = bisect_right(self._starts, step) - 1
        first_epoch, order = self.phases[phase]
        return order, first_epoch * order.steps_per_epoch + step - self._starts[phase]


@dataclass(frozen=True, slots=True)
class SwitchedOrder:
    """An order up to a step, and from there on another one of another batch size.

    Within an epoch the new order continues at the sample where the first one stopped: positions in an
    epoch do not depend on the batch. Orders by length cannot do that.
    """

    before: PhasedOrder | SwitchedOrder
    step: int
    """First step, from 0, of ``order``."""
    order: SampleOrder
    _first: int = field(init=False, repr=False, compare=False)
    """Samples taken before."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first", self.before.samples_before(self.step))
        if self._first % self.samples and not isinstance(self.order, StepOrder):
            raise ValueError(f"step {self.step} is in the middle of an epoch sorted by length")

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.order.samples

    @property
    def batch(self) -> int:
        """Samples of a full step at first; see ``size_of``."""
        return self.before.batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch at first; see ``epoch_at``."""
        return self.before.steps_per_epoch

    def size_of(self, step: int) -> int:
        """Number of samples of step ``step`` (from 0)."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before ``step``."""
        if step < self.step:
            return self.before.samples_before(step)
        rest = step - self.step - self._steps_to_epoch_end
        if rest < 0:
            return self._first + (step - self.step) * self.order.batch
        return self.order.samples_before(self._next_epoch * self.order.steps_per_epoch + rest)

    def epoch_at(self, step: int) -> float:
        """Epochs done before ``step``; an integer exactly at the end of an epoch."""
        if step < self.step:
            return self.before.epoch_at(step)
        epochs, within = divmod(self.samples_before(step), self.samples)
        return epochs + within / self.samples

    def steps_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        """Sample indices of each step, from ``step`` on, without end."""
        if step < self.step:
            yield from islice(self.before.steps_from(step), self.step - step)
            step = self.step
        order_step = step - self.step
        if order_step < self._steps_to_epoch_end:
            assert isinstance(self.order, StepOrder)
            epoch, done = divmod(self._first, self.samples)
            yield from self.order.rest_of(epoch, done + order_step * self.order.batch)
        rest = max(order_step - self._steps_to_epoch_end, 0)
        yield from self.order.steps_from(self._next_epoch * self.order.steps_per_epoch + rest)

    @property
    def _steps_to_epoch_end(self) -> int:
        """Remaining steps of the current epoch; 0 at its boundary."""
        done = self._first % self.samples
        return -(-(self.samples - done) // self.order.batch) if done else 0

    @property
    def _next_epoch(self) -> int:
        return -(-self._first // self.samples)


RunOrder = PhasedOrder | SwitchedOrder
"""Sample order of a run."""
