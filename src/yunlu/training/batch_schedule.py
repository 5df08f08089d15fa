"""The course of a run: the batch, the rate and the worth of each of its steps.

A run whose batch may change turns at certain steps. All that follows from its turns: which samples a step
takes, at which rate, how far it brings the run, and which step is the last. A step of a larger batch
brings the run as far as ``gain`` steps of the first one would (Johnson et al. 2020, AdaScale), and the
schedule counts these: the run is as long as it was asked to be, in what it learns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from yunlu.core.value import Value
from yunlu.planning.large_batch import adapt_batch, batch_limits, gain_of, rate_factor, rate_rule
from yunlu.planning.schedule import rate
from yunlu.runs.events import BatchChanged
from yunlu.training.data.batch_phases import SwitchedOrder
from yunlu.training.data.sample_order import make_order
from yunlu.training.engine_builders import make_sample_order

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.data.batch_phases import RunOrder
    from yunlu.training.engine import Engine

CHANGE_EVERY = 20
"""Steps; at fixed ones, so that a resumed run turns where it would have turned."""
_NEW_BATCH, _NEW_GAIN = 1.1, 1.1
"""A batch, or the worth of its steps, must have changed by such a factor."""


class BatchChange(Value):
    """From a step on another batch, or another worth of its steps."""

    step: int
    """The first one of it, from 0."""
    batch: int
    gain: float
    """How many steps of the first batch one of these is worth."""
    rate: float
    """The factor on the learning rate."""


class BatchSchedule:
    """What each step of a run is; the same on all workers.

    Args:
        job: What is asked.
        plan: The first batch, its rate, and how many steps of it.
        lengths: Of the samples, where they have any.
        samples: How many there are.
        replicas: Those that the run begins with.
    """

    def __init__(
        self, job: Job, plan: Plan, lengths: Any, *, samples: int, replicas: int = 1
    ) -> None:
        self._job, self._plan, self._lengths = job, plan, lengths
        self._first_order = make_sample_order(job, plan, lengths, samples=samples)
        self._replicas = replicas
        self.order: RunOrder = self._first_order
        """Which samples each step takes."""
        self.turns: list[BatchChange] = []
        self._starts: list[float] = []
        """How far the run is at each turn, in steps of the first batch."""

    @property
    def steps(self) -> int:
        """Of the whole run, as things are."""
        if not self.turns:
            return self._plan.steps
        last, left = self.turns[-1], self._plan.steps - self._starts[-1]
        return last.step + max(math.ceil(left / last.gain - 1e-9), 1)

    def position(self, step: int) -> float:
        """How far the run is before ``step``, in steps of the first batch."""
        at = self._turn_of(step)
        if at is None:
            return step
        return self._starts[at] + (step - self.turns[at].step) * self.turns[at].gain

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, as a share of the plan's."""
        at, plan = self._turn_of(step), self._plan
        share = rate(
            self._job.train.schedule,
            self.position(step),
            steps=plan.steps,
            warmup_steps=plan.warmup_steps,
        )
        return share if at is None else share * self.turns[at].rate

    def may_turn(self, step: int) -> bool:
        """Whether another batch may begin with this step."""
        if self._job.train.adapt_batch is None or step % CHANGE_EVERY or not 0 < step < self.steps:
            return False
        return self._plan.padding != "bucket" or self.order.epoch_at(step).is_integer()

    def find_turn(
        self, step: int, *, noise: float | None, replicas: int, asked: int | None = None
    ) -> BatchChange | None:
        """The turn to be taken before ``step``; none where things stay, or too little is known.

        Without a word the batch follows the replicas, as far as the gradient's noise makes that
        worth it; what is ``asked`` for counts before that. Both stay within the job's limits.
        """
        spec, base = self._job.train.adapt_batch, self._plan.batch
        if spec is None or noise is None:
            return None
        low, high = batch_limits(spec, base, samples=self.order.samples)
        now, gain = (self.turns[-1].batch, self.turns[-1].gain) if self.turns else (base, 1.0)
        wanted = asked or adapt_batch(noise, base, replicas / self._replicas)
        batch = min(max(wanted, low), high)
        if asked is None and low <= now <= high and _is_near(batch, now, _NEW_BATCH):
            batch = now
        gained = gain_of(noise, batch, base)
        if batch == now and _is_near(gained, gain, _NEW_GAIN):
            return None
        factor = rate_factor(rate_rule(self._job.train), batch, base, gain=gained)
        return BatchChange(step=step, batch=batch, gain=gained, rate=factor)

    def turn(self, turn: BatchChange) -> None:
        """Go on like this from its step on, which is still to come."""
        start = self.position(turn.step)
        before = self.turns[-1].batch if self.turns else self._plan.batch
        if turn.batch != before:
            seed, padding = self._job.train.seed, self._plan.padding
            order = make_order(
                self.order.samples, turn.batch, seed, lengths=self._lengths, padding=padding
            )
            self.order = SwitchedOrder(self.order, turn.step, order)
        self.turns.append(turn)
        self._starts.append(start)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        turns = [turn.model_dump(mode="json") for turn in self.turns]
        return {"turns": turns, "replicas": self._replicas}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self._replicas = state.get("replicas", self._replicas)
        self.order, self.turns, self._starts = self._first_order, [], []
        for turn in state.get("turns", []):
            self.turn(BatchChange.model_validate(turn))

    def _turn_of(self, step: int) -> int | None:
        """The last turn up to a step."""
        for at in reversed(range(len(self.turns))):
            if self.turns[at].step <= step:
                return at
        return None


def adapt_batch_size(engine: Engine) -> bool:
    """Between two steps, by all workers: whether another batch, or another rate, begins with the next."""
    course, step, world = engine.batch_schedule, engine.steps_done, engine.world
    if not course.may_turn(step) or engine.communication.communicator.is_apart:
        return False
    engine.note_waiting()
    asked, noise = world.broadcast_numbers(engine.requested_batch() or 0, engine.noise.value or 0)
    engine.note_waiting(is_over=True)
    turn = course.find_turn(
        step, noise=noise or None, replicas=world.layout.replicas, asked=int(asked) or None
    )
    if turn is None:
        return False
    course.turn(turn)
    about = turn.model_dump() | {"step": step + 1, "noise_scale": noise, "steps": course.steps}
    engine.emit(BatchChanged(**about))
    return True


def _is_near(one: float, other: float, factor: float) -> bool:
    return max(one, other) < factor * min(one, other)
