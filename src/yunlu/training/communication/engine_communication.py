"""A worker's company: how it communicates with the others, through generations and changes of the links."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yunlu.training.communication.communicator import ExpectedStep, SyncCommunicator
from yunlu.training.communication.pace import Pacer
from yunlu.training.data.sample_order import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.batch_schedule import BatchSchedule
    from yunlu.training.communication.communicator import Communicator
    from yunlu.training.communication.method_selector import MethodSelector
    from yunlu.training.communication.step_sync import StepRequest, StepTotals
    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch


class EngineCommunication:
    """The communicator of an engine, which may become another one between two steps.

    Args:
        job: What is asked.
        plan: What a step should take.
        model: Whose weights travel.
        course: Which samples each step holds.
        tell: Takes what was decided: the run's log of events.
    """

    communicator: Communicator

    def __init__(
        self,
        job: Job,
        plan: Plan,
        model: nn.Module,
        course: BatchSchedule,
        emit: Callable[..., Any],
    ) -> None:
        self._job, self._plan, self._model = job, plan, model
        self._course, self._emit = course, emit
        self._selector: MethodSelector | None = None
        self._pacer = Pacer()
        self._coming: tuple[int, Iterator[NDArray[np.int64]]] | None = None
        self._relink: StepRequest = ""
        self._samples = 0
        self._sent_before = 0
        self._token = ""
        """The same for all who chose together last."""
        self.has_own_moments = False
        """Whether workers that made steps of their own now make them together."""

    @property
    def steps_alone(self) -> bool:
        """Whether this worker makes steps without the others."""
        return self.world.layout.is_single or self.communicator.is_local_update

    @property
    def excluded(self) -> tuple[int, ...]:
        """Ranks without whom the others had better go on."""
        return () if self._selector is None else self._selector.excluded

    @property
    def is_excluded(self) -> bool:
        """Whether this worker is one of them."""
        return self.world.rank in self.excluded

    def join(self, world: World, step: int) -> None:
        """Communicate with the workers of a world from now on; all of them call this."""
        self._join(world, step, kept={}, was_local_update=False)

    def join_next(self, world: World, step: int) -> None:
        """The same among other workers, or in another way, with what is kept from before."""
        before, kept = self.communicator, self.communicator.state()
        before.close()
        self._join(world, step, kept=kept, was_local_update=before.is_local_update)

    def _join(
        self, world: World, step: int, *, kept: Mapping[str, Tensor], was_local_update: bool
    ) -> None:
        self.world = world
        told = self._compare(step, keeps=bool(kept), was_local_update=was_local_update)
        self.communicator = self._open(max(each["step"] for each in told))
        is_local_update = self.communicator.is_local_update
        self.has_own_moments = not is_local_update and any(each["was_apart"] for each in told)
        if is_local_update:
            # The same for all, whatever they come from: of who is furthest.
            ranks = range(len(told))
            givers = [rank for rank in ranks if told[rank]["was_apart"] and told[rank]["keeps"]]
            if givers:
                source = max(givers, key=lambda rank: (told[rank]["step"], -rank))
                self.communicator.restore([self.world.broadcast_tensors(kept, source)])
        elif kept and not was_local_update:
            self.communicator.restore([kept] * world.layout.world)

    def _compare(self, step: int, *, keeps: bool, was_local_update: bool) -> list[dict[str, Any]]:
        """What all workers tell; who did not choose together before chooses anew, and so do all."""
        setting = None if self._selector is None else self._selector.setting
        ours = {
            "step": step,
            "keeps": keeps,
            "was_apart": was_local_update,
            "chosen": [self._token, setting and setting.model_dump_json()],
            "token": secrets.token_hex(8),
        }
        if self.world.layout.is_single:
            return [ours]
        told: list[dict[str, Any]] = self.world.gather(ours)
        if any(each["chosen"] != told[0]["chosen"] for each in told):
            self._selector = None
        self._token = told[0]["token"]
        return told

    def begin(self, step: int) -> None:
        """All hold the same weights, after ``step`` steps, and go on."""
        self.communicator.begin(step)
        if self._selector is not None and self.world.is_leader:
            self._selector.announce(step)

    def sync_step(
        self, micros: Sequence[Batch], ask: StepRequest, step: int
    ) -> tuple[StepTotals, bool]:
        """What the step holds and whether all go on; and whether there is a new communicator."""
        switch_at = None if self._selector is None else self._selector.switch_at
        is_new = switch_at is not None and step >= switch_at
        if is_new:
            self._change(step)
        is_new = self._try_out(step) or is_new
        totals = self.communicator.sync_step(micros, ask or self._relink, step)
        self._samples = self.communicator.samples
        self._relink = ""
        if totals.ask == "relink":
            totals = replace(totals, ask="")
            assert self._selector is not None
            if self._selector.rethink(self.world, steps_done=step):
                self._change(step)
                is_new = True
        if not totals.ask and self._selector is not None and self._selector.is_to_be_served:
            totals = replace(totals, ask="serve")
        return totals, is_new

    def _try_out(self, step: int) -> bool:
        selector = self._selector
        if selector is None:
            return False
        if selector.try_out(self.world, step):
            self._change(step)
            return True
        if self.world.is_leader:
            selector.announce(step)  # a trial that ended with what is in use
        return False

    def share_loss(self, loss: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self.communicator.share_loss(loss)

    def note_exchange(self, exchange_s: float) -> None:
        """Take in what adding up the gradients took."""
        if self._selector is not None and self._selector.note(exchange_s):
            self._relink = "relink"

    def note_computing(self, seconds: float) -> None:
        """Take in what forward and backward of a step took this worker."""
        self._pacer.note(seconds, self.world.layout.replicas)

    def batch_of(self, step: int) -> int:
        """How many samples the gradient of this step, counted from 0, is of."""
        return self._samples if self.communicator.is_local_update else self._course.order.size_of(step)

    def after_update(self, step: int) -> None:
        """The weights were changed in this step, counted from 1."""
        self.communicator.after_update(step, self._samples)
        exchange_s = self.communicator.exchange_s()
        if exchange_s is not None:
            self.note_exchange(exchange_s)

    def after_discarded(self, step: int) -> None:
        """They were not."""
        self.communicator.after_discarded()
        if self.communicator.is_local_update:
            self.communicator.after_update(step, 0)

    def metrics(self) -> dict[str, float | None]:
        """What was exchanged since this was asked last, for the log."""
        return {
            "sent_bytes": self._count_sent(),
            "compression_error": self.communicator.error(),
        }

    def state(self) -> dict[str, Tensor]:
        """See ``Communicator``."""
        return self.communicator.state()

    def close(self) -> None:
        """No more company."""
        self.communicator.close()

    def _open(self, step: int) -> Communicator:
        self._sent_before = 0
        if self.world.layout.is_single:
            return SyncCommunicator(self.world)
        # Only those among others load what it takes to choose.
        from yunlu.training.communication.method_selector import MethodSelector  # noqa: PLC0415

        if self._selector is None:
            self._selector = MethodSelector(self._job, self._plan, self._emit, self._pacer)
        return self._selector.open(self.world, self._model, self._expect, steps_done=step)

    def _change(self, step: int) -> None:
        self.communicator.synchronize()
        self.join_next(self.world, step)
        self.begin(step)

    def _expect(self, step: int) -> ExpectedStep:
        if self._coming is None or self._coming[0] != step:
            self._coming = step, self._course.order.steps_from(step)
        number, order = self._coming
        self._coming = number + 1, order
        indices = next(order)
        return ExpectedStep(len(indices), digest_of(indices))

    def _count_sent(self) -> float | None:
        traffic = self.communicator.traffic()
        if traffic is None:
            return None
        before, self._sent_before = self._sent_before, traffic.sent_bytes
        return float(traffic.sent_bytes - before)
