"""Batch schedule of a run: batch size, learning rate and progress of each step.

The batch size may change at certain steps. The changes determine which samples a step takes, its
learning rate, its progress, and the last step. A step of a larger batch counts as ``gain`` steps of the
initial batch (Johnson et al. 2020, AdaScale): the run ends after the planned progress, not after a
fixed number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.value import Value
from yunlu.planning.large_batch import (
    adapt_batch,
    batch_limits,
    gain_of,
    phases_of,
    rate,
    rate_factor,
    rate_rule,
)
from yunlu.runs.events import BatchChanged
from yunlu.training.data.sample_order import PhasedOrder, SwitchedOrder, make_order

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.data.sample_order import RunOrder
    from yunlu.training.engine import Engine


CHANGE_EVERY = 20
"""Steps between possible changes; fixed, so that a resumed run changes at the same steps."""
_NEW_BATCH, _NEW_GAIN = 1.1, 1.1
"""Smallest factor by which the batch or the gain must change."""


class BatchChange(Value):
    """A change of batch size or gain, from one step on."""

    step: int
    """First step of the new batch, from 0."""
    batch: int
    gain: float
    """Steps of the initial batch that one step counts as."""
    rate: float
    """Factor on the learning rate."""


class BatchSchedule:
    """Batch size, rate and progress of each step; the same on all workers.

    Args:
        job: The job.
        plan: Initial batch, learning rate and number of steps.
        lengths: Lengths of the samples, if they vary.
        samples: Number of training samples.
        replicas: Number of replicas at the start of the run.
    """

    def __init__(
        self, job: Job, plan: Plan, lengths: Any, *, samples: int, replicas: int = 1
    ) -> None:
        self._job, self._plan, self._lengths = job, plan, lengths
        self._first_order = make_sample_order(job, plan, lengths, samples=samples)
        self._replicas = replicas
        self.order: RunOrder = self._first_order
        """Which samples each step takes."""
        self.changes: list[BatchChange] = []
        self._starts: list[float] = []
        """Progress at each change, in steps of the initial batch."""

    @property
    def steps(self) -> int:
        """Total steps of the run under the current schedule."""
        if not self.changes:
            return self._plan.steps
        last, left = self.changes[-1], self._plan.steps - self._starts[-1]
        return last.step + max(math.ceil(left / last.gain - 1e-9), 1)

    def position(self, step: int) -> float:
        """Progress before ``step``, in steps of the initial batch."""
        at = self._index_of(step)
        if at is None:
            return step
        return self._starts[at] + (step - self.changes[at].step) * self.changes[at].gain

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, as a factor of the plan's."""
        at, plan = self._index_of(step), self._plan
        share = rate(
            self._job.train.schedule,
            self.position(step),
            steps=plan.steps,
            warmup_steps=plan.warmup_steps,
        )
        return share if at is None else share * self.changes[at].rate

    def may_change(self, step: int) -> bool:
        """Whether the batch may change at this step."""
        if self._job.train.adapt_batch is None or step % CHANGE_EVERY or not 0 < step < self.steps:
            return False
        return self._plan.padding != "bucket" or self.order.epoch_at(step).is_integer()

    def plan_change(
        self, step: int, *, noise: float | None, replicas: int, requested: int | None = None
    ) -> BatchChange | None:
        """The change to apply before ``step``; None if nothing changes, or the noise is unknown.

        By default the batch follows the number of replicas, as far as the gradient noise scale
        justifies it; ``requested`` takes precedence. Both stay within the job's limits.
        """
        spec, base = self._job.train.adapt_batch, self._plan.batch
        if spec is None or noise is None:
            return None
        low, high = batch_limits(spec, base, samples=self.order.samples)
        now, gain = (self.changes[-1].batch, self.changes[-1].gain) if self.changes else (base, 1.0)
        target = requested or adapt_batch(noise, base, replicas / self._replicas)
        batch = min(max(target, low), high)
        if requested is None and low <= now <= high and _is_near(batch, now, _NEW_BATCH):
            batch = now
        gained = gain_of(noise, batch, base)
        if batch == now and _is_near(gained, gain, _NEW_GAIN):
            return None
        factor = rate_factor(rate_rule(self._job.train), batch, base, gain=gained)
        return BatchChange(step=step, batch=batch, gain=gained, rate=factor)

    def apply(self, change: BatchChange) -> None:
        """Apply a change; its step is still to come."""
        start = self.position(change.step)
        before = self.changes[-1].batch if self.changes else self._plan.batch
        if change.batch != before:
            seed, padding = self._job.train.seed, self._plan.padding
            order = make_order(
                self.order.samples, change.batch, seed, lengths=self._lengths, padding=padding
            )
            self.order = SwitchedOrder(self.order, change.step, order)
        self.changes.append(change)
        self._starts.append(start)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        changes = [change.model_dump(mode="json") for change in self.changes]
        return {"changes": changes, "replicas": self._replicas}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self._replicas = state.get("replicas", self._replicas)
        self.order, self.changes, self._starts = self._first_order, [], []
        for change in state.get("changes", []):
            self.apply(BatchChange.model_validate(change))

    def _index_of(self, step: int) -> int | None:
        """Index of the last change up to a step."""
        for at in reversed(range(len(self.changes))):
            if self.changes[at].step <= step:
                return at
        return None


def adapt_batch_size(engine: Engine) -> bool:
    """Change the batch size if due; called by all workers between two steps. True if it changed."""
    schedule, step, world = engine.batch_schedule, engine.steps_done, engine.world
    if not schedule.may_change(step) or engine.communication.communicator.is_local_update:
        return False
    engine.note_waiting()
    requested, noise = world.broadcast_numbers(
        engine.requested_batch() or 0, engine.noise.value or 0
    )
    engine.note_waiting(is_over=True)
    change = schedule.plan_change(
        step, noise=noise or None, replicas=world.layout.replicas, requested=int(requested) or None
    )
    if change is None:
        return False
    schedule.apply(change)
    engine.emit(
        BatchChanged(
            step=step + 1,
            batch=change.batch,
            rate=change.rate,
            gain=change.gain,
            noise_scale=noise,
            steps=schedule.steps,
        )
    )
    return True


def _is_near(one: float, other: float, factor: float) -> bool:
    return max(one, other) < factor * min(one, other)


def make_sample_order(job: Job, plan: Plan, lengths: Any, *, samples: int) -> PhasedOrder:
    """Sample order of all steps, over all phases of a growing batch."""
    epochs = plan.steps  # an upper bound: no phase is cut off
    phases = phases_of(job.train.grow_batch, plan.batch, samples, epochs)
    return PhasedOrder(
        tuple(
            (
                first,
                make_order(samples, batch, job.train.seed, lengths=lengths, padding=plan.padding),
            )
            for first, batch in phases
        )
    )


@dataclass(slots=True, kw_only=True)
class Plateau:
    """Lowers the rate when the metric stops improving."""

    factor: float
    patience: int
    scale: float = 1.0
    waited: int = 0

    def observe(self, *, improved: bool) -> bool:
        """Record one evaluation; true if the rate was lowered."""
        self.waited = 0 if improved else self.waited + 1
        if self.waited < self.patience:
            return False
        self.scale *= self.factor
        self.waited = 0
        return True

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"scale": self.scale, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.scale, self.waited = state["scale"], state["waited"]
