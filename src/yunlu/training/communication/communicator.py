"""How the workers of a world keep together: the engine's door to all communication.

*Together* they add up the gradients of every step and make the same update. *Apart* each makes its own
steps on its own samples, and their weights are brought together now and then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from yunlu.core.errors import TrainingError
from yunlu.training.communication.error_feedback import share_out
from yunlu.training.communication.step_sync import StepTotals, sync_step, decode_request, encode_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from yunlu.training.communication.local.averaging import Averaging
    from yunlu.training.communication.local.sites import Site
    from yunlu.training.communication.step_sync import StepRequest
    from yunlu.training.communication.summation import Pending, Summation
    from yunlu.training.communication.transport import Traffic
    from yunlu.training.parallel.world import World
    from yunlu.training.tasks.task import Batch

_NOTES_EVERY = 8
"""Steps that workers on their own may be ahead of each other."""
_PIECE = 1 << 32
_REMEMBERED = 1024
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """What a step holds by the order of the data: every worker knows it without asking."""

    samples: int
    digest: int


class Communicator(Protocol):
    """What the engine asks of it in each step."""

    is_local_update: bool
    """Whether each worker makes its own steps."""
    summation: Summation | None
    """How gradients are added up; none where nothing is, or where torch does it."""
    bucket_bytes: int
    """How much of them is sent at a time."""
    holds_moments: bool
    """Whether gradients no longer tell how large they are: Adam's second moment is then to be held."""
    samples: int
    """Of how many the update of the step agreed on last will be."""

    def begin(self, step: int) -> None:
        """All hold the same weights, after ``step`` steps, and are about to go on."""
        ...

    def sync_step(self, micros: Sequence[Batch], ask: StepRequest, step: int) -> StepTotals:
        """What the step to come holds, and whether all end before it."""
        ...

    def share_loss(self, loss: Tensor) -> Tensor:
        """The loss of those with whom this worker makes a step, where they are not all."""
        ...

    def after_update(self, step: int, samples: int) -> None:
        """This step, counted from 1, is done; it learned from so many ``samples``."""
        ...

    def after_discarded(self) -> None:
        """This step changes no weights."""
        ...

    def synchronize(self) -> bool:
        """Bring all weights together: before evaluating, saving, pausing, and at the end.

        False where they are together already.
        """
        ...

    def exchange_s(self) -> float | None:
        """What an exchange took that has ended since this was asked last; none where none has."""
        ...

    def abandon(self) -> int | None:
        """Others are lost: hold weights that were agreed on; after how many steps, where that changed."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What this worker keeps from exchange to exchange, once settled."""
        ...

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from what workers had kept, as many as there were; before ``begin``."""
        ...

    def traffic(self) -> Traffic | None:
        """What was sent so far; none where nobody counts."""
        ...

    def error(self) -> float | None:
        """What compression left out of the last exchange, relative to what it was given."""
        ...

    def close(self) -> None:
        """End it; others may follow in the same world."""
        ...


class SyncCommunicator:
    """Every step is made by all."""

    is_local_update = False

    def __init__(
        self,
        world: World,
        summation: Summation | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        holds_moments: bool = False,
    ) -> None:
        self._world, self.summation = world, summation
        self.bucket_bytes, self.holds_moments = bucket_bytes, holds_moments
        self.samples = 0

    def begin(self, step: int) -> None:
        """Nothing is kept of the weights."""

    def sync_step(self, micros: Sequence[Batch], ask: StepRequest, step: int) -> StepTotals:  # noqa: ARG002
        """One short sum."""
        totals = sync_step(self._world, micros, ask)
        self.samples = totals.samples
        return totals

    def share_loss(self, loss: Tensor) -> Tensor:
        """It is ours alone, or summed with the norm."""
        return loss

    def after_update(self, step: int, samples: int) -> None:  # noqa: ARG002
        """All made the same update: what the exchange left out is still to come."""
        if self.summation is not None:
            self.summation.commit()

    def after_discarded(self) -> None:
        """What was left out before is still to come."""
        if self.summation is not None:
            self.summation.revert()

    def synchronize(self) -> bool:
        """They hold the same."""
        return False

    def exchange_s(self) -> float | None:
        """Gradients are timed where they are added up."""
        return None

    def abandon(self) -> int | None:
        """What a worker holds is what all held before the step."""
        self.after_discarded()
        return None

    def state(self) -> dict[str, Tensor]:
        """What exchanges left out."""
        return {} if self.summation is None else self.summation.state()

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """What others left out goes to somebody, so that none of it is lost."""
        if self.summation is None or not any(states):
            return
        size, rank = self._world.layout.world, self._world.rank
        is_same = len(states) == size
        self.summation.restore(states[rank] if is_same else share_out(states, size)[rank])

    def traffic(self) -> Traffic | None:
        """Of the gradients."""
        return None if self.summation is None else self.summation.traffic()

    def error(self) -> float | None:
        """Of the gradients."""
        return None if self.summation is None else self.summation.error()

    def close(self) -> None:
        """The connections are ours."""
        if self.summation is not None:
            self.summation.close()


class LocalUpdateCommunicator:
    """Every worker makes steps of its own.

    What one asks of all, and that every sample was taken once, goes round in notes: each is on its way
    while some steps are computed, and read by all before the same step.

    Args:
        averaging: Brings the weights together.
        notes: Sums of a few whole numbers, over connections of their own.
        expected: What a step (counted from 0) holds.
        site: With whom we make our steps; none where we make them alone.
    """

    is_local_update = True
    bucket_bytes = BUCKET_BYTES
    holds_moments = False

    def __init__(
        self,
        averaging: Averaging,
        notes: Summation,
        expected: Callable[[int], ExpectedStep],
        site: Site | None = None,
    ) -> None:
        self._averaging, self._notes, self._expected = averaging, notes, expected
        self._site, self.samples = site, 0
        self.summation = None if site is None else site.summation
        self._step, self._is_settled = 0, True
        self._begun: deque[int] = deque()
        """After which steps the latest exchanges began."""
        self._begun_count = 0
        self._under_way: tuple[Pending, Tensor] | None = None
        self._asking: StepRequest = ""
        """What is to go with the next notes."""
        self._timed_rounds = 0
        self._taken = self._due = ExpectedStep(0, 0)
        self._sent_due = self._due

    def begin(self, step: int) -> None:
        """These weights are what all agree on."""
        self._averaging.begin()
        self._step, self._is_settled = step, True
        parts = self._averaging.rules.parts
        self._begun = deque([step] * parts, maxlen=_REMEMBERED)
        self._begun_count = self._averaging.rounds + parts
        self._taken = self._due = ExpectedStep(0, 0)

    def sync_step(self, micros: Sequence[Batch], ask: StepRequest, step: int) -> StepTotals:
        """What is ours of the step; what one asked reaches all some steps later."""
        samples = sum(micro.samples for micro in micros)
        ours = self._count(micros, samples)
        self._asking = max(self._asking, ask, key=encode_request)
        asked: StepRequest = (
            self._pass_notes(self._asking, step) if step % _NOTES_EVERY == 0 else ""
        )
        expected = self._expected(step)
        self._taken = ExpectedStep(
            self._taken.samples + samples,
            self._taken.digest + sum(micro.digest for micro in micros),
        )
        self._due = ExpectedStep(
            self._due.samples + expected.samples, self._due.digest + expected.digest
        )
        return replace(ours, samples=expected.samples, digest=expected.digest, ask=asked)

    def _count(self, micros: Sequence[Batch], samples: int) -> StepTotals:
        counts = [
            sum(micro.items for micro in micros),
            sum(micro.tokens for micro in micros),
            sum(micro.padding for micro in micros),
            samples,
        ]
        if self._site is not None:
            counts = [int(number) for number in self._site.add_up(counts)]
        *told, self.samples = counts
        return StepTotals(items=told[0], tokens=told[1], padding=told[2])

    def share_loss(self, loss: Tensor) -> Tensor:
        """Of our site."""
        if self._site is None:
            return loss
        return torch.tensor(self._site.add_up([float(loss)])[0])

    def after_update(self, step: int, samples: int) -> None:
        """Exchange weights where it is time."""
        self._step, self._is_settled = step, False
        self._note_begun(len(self._averaging.rules.parts_at(step)))
        self._averaging.after_update(step, samples=samples)

    def after_discarded(self) -> None:
        """Nobody else knows."""

    def synchronize(self) -> bool:
        """By all, after the same step; once is enough, a second outer step would move the weights."""
        if self._is_settled:
            return False
        self._is_settled = True
        self._note_begun(self._averaging.rules.parts)
        self._averaging.synchronize(exact=True)
        return True

    def exchange_s(self) -> float | None:
        """Of weights, each once."""
        rounds, self._timed_rounds = self._timed_rounds, self._averaging.rounds
        return None if rounds == self._timed_rounds else self._averaging.exchange_s

    def abandon(self) -> int | None:
        """Back to what all agreed on: to the oldest part of it, so that no sample is lost."""
        self._averaging.fall_back()
        return self._begun[self._averaging.rounds - self._begun_count]

    def state(self) -> dict[str, Tensor]:
        """The outer momentum, the same on all: an exact exchange leaves nothing out."""
        kept = self._averaging.state()
        return {name: kept[name] for name in ("momentum",) if len(kept[name])}

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Anybody's: they are the same."""
        if states and states[0]:
            self._averaging.begin()  # with the weights as they are now: those of before are gone
            self._averaging.restore({"anchor": self._averaging.state()["anchor"], **states[0]})

    def traffic(self) -> Traffic | None:
        """Of the weights."""
        return self._averaging.traffic()

    def error(self) -> float | None:
        """Of the weights."""
        return self._averaging.error()

    def close(self) -> None:
        """The connections are ours."""
        self._averaging.close()
        self._notes.close()
        if self._site is not None:
            self._site.close()

    def _note_begun(self, parts: int) -> None:
        self._begun.extend([self._step] * parts)
        self._begun_count += parts

    def _pass_notes(self, ask: StepRequest, step: int) -> StepRequest:
        asked: StepRequest = ""
        if self._under_way is not None:
            pending, numbers = self._under_way
            pending.wait()
            asked = self._read(numbers, step)
        low, high = self._taken.digest % _PIECE, self._taken.digest // _PIECE % _PIECE
        numbers = torch.tensor(
            [encode_request(ask), self._taken.samples, low, high], dtype=torch.float64
        )
        self._under_way = self._notes.begin(numbers, key=0), numbers
        self._asking = ""
        self._sent_due = self._due
        self._taken = self._due = ExpectedStep(0, 0)
        return asked

    def _read(self, numbers: Tensor, step: int) -> StepRequest:
        asked, samples, low, high = (int(number) for number in numbers.tolist())
        digest = (low + high * _PIECE) % (1 << 64)
        if (samples, digest) != (self._sent_due.samples, self._sent_due.digest % (1 << 64)):
            raise TrainingError(
                f"The workers did not take the samples of the steps before {step} once each.",
                hint="Do their data sets differ? Each must see the same samples in the same order.",
            )
        return decode_request(asked)
