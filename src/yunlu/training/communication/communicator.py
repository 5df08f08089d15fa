"""Communicators: how the workers of a world keep their weights in agreement.

A *synchronous* communicator sums the gradients of every step, so that all workers make the same update.
With *local updates* each worker makes its own steps, and the weights are averaged now and then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from yunlu.core.errors import TrainingError
from yunlu.training.communication.error_feedback import redistribute_residuals
from yunlu.training.single_worker import BUCKET_BYTES, DIGESTS, StepTotals, total_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from yunlu.training.communication.allreducer import AllReducer, PendingAllReduce
    from yunlu.training.communication.local_updates import Site, WeightAveraging
    from yunlu.training.communication.transport import Traffic
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import Batch


_NOTE_INTERVAL = 8
"""Steps that workers with local updates may be ahead of each other."""
_WORD = 1 << 32
_MAX_ROUNDS = 1024


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """Samples of a step by the sample order, known to every worker."""

    samples: int
    digest: int


class Communicator(Protocol):
    """Interface of the engine to communication, called in each step."""

    is_local_update: bool
    """Whether each worker makes its own steps."""
    allreducer: AllReducer | None
    """All-reduce of gradients; None if there is none, or torch does it."""
    bucket_bytes: int
    """Bytes of gradients per bucket."""
    holds_moments: bool
    """Whether gradients lose their scale, so that Adam's second moment must be frozen."""
    samples: int
    """Samples in the update of the last synchronized step."""

    def begin(self, step: int) -> None:
        """Begin after ``step`` steps; all workers hold the same weights."""
        ...

    def sync_step(self, micros: Sequence[Batch], request: StepRequest, step: int) -> StepTotals:
        """Totals of the next step, and whether all workers stop before it."""
        ...

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Loss over the workers that make this step together, if not all do."""
        ...

    def after_update(self, step: int, samples: int) -> None:
        """The step, counted from 1, updated the weights with so many ``samples``."""
        ...

    def after_discarded(self) -> None:
        """The step changed no weights."""
        ...

    def synchronize(self) -> bool:
        """Average all weights: before evaluation, checkpoints, pauses, and at the end.

        False if they already are equal.
        """
        ...

    def exchange_s(self) -> float | None:
        """Time of an exchange that ended since the last call; None if none did."""
        ...

    def abandon(self) -> int | None:
        """Peers are lost: return to weights all agreed on; the step of these weights, if it changed."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Communication state of this worker, after ``synchronize``."""
        ...

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore the states of all previous workers; before ``begin``."""
        ...

    def traffic(self) -> Traffic | None:
        """Bytes sent so far; None if not counted."""
        ...

    def error(self) -> float | None:
        """Relative compression error of the last exchange."""
        ...

    def close(self) -> None:
        """Close the connections; another communicator may follow."""
        ...


class SyncCommunicator:
    """All workers make every step together."""

    is_local_update = False

    def __init__(
        self,
        world: World,
        allreducer: AllReducer | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        holds_moments: bool = False,
    ) -> None:
        self._world, self.allreducer = world, allreducer
        self.bucket_bytes, self.holds_moments = bucket_bytes, holds_moments
        self.samples = 0

    def begin(self, step: int) -> None:
        """No state to initialize."""

    def sync_step(self, micros: Sequence[Batch], request: StepRequest, step: int) -> StepTotals:  # noqa: ARG002
        """One small all-reduce."""
        totals = sync_step(self._world, micros, request)
        self.samples = totals.samples
        return totals

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Unchanged: it is summed with the norm, or local."""
        return loss

    def after_update(self, step: int, samples: int) -> None:  # noqa: ARG002
        """Keep the compression residual for the next exchange."""
        if self.allreducer is not None:
            self.allreducer.commit()

    def after_discarded(self) -> None:
        """Return to the residual before the step."""
        if self.allreducer is not None:
            self.allreducer.revert()

    def synchronize(self) -> bool:
        """The weights are always equal."""
        return False

    def exchange_s(self) -> float | None:
        """Gradient exchanges are timed by the summation."""
        return None

    def abandon(self) -> int | None:
        """The weights are those before the step, on all workers."""
        self.after_discarded()
        return None

    def state(self) -> dict[str, Tensor]:
        """Compression residuals."""
        return {} if self.allreducer is None else self.allreducer.state()

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Residuals of previous workers are redistributed, so that none is lost."""
        if self.allreducer is None or not any(states):
            return
        size, rank = self._world.layout.world, self._world.rank
        is_same = len(states) == size
        self.allreducer.restore(
            states[rank] if is_same else redistribute_residuals(states, size)[rank]
        )

    def traffic(self) -> Traffic | None:
        """Of the gradients."""
        return None if self.allreducer is None else self.allreducer.traffic()

    def error(self) -> float | None:
        """Of the gradients."""
        return None if self.allreducer is None else self.allreducer.error()

    def close(self) -> None:
        """Close the connections."""
        if self.allreducer is not None:
            self.allreducer.close()


class LocalUpdateCommunicator:
    """Each worker makes its own steps.

    Requests and sample counts are exchanged as notes: each is in flight
    while some steps are computed, and read by all workers before the same step.

    Args:
        averaging: Averages the weights.
        note_sums: All-reduce of a few integers, on connections of its own.
        expected: Samples of a step, counted from 0.
        site: The workers that step together with this one; None if it steps alone.
    """

    is_local_update = True
    bucket_bytes = BUCKET_BYTES
    holds_moments = False

    def __init__(
        self,
        averaging: WeightAveraging,
        note_sums: AllReducer,
        expected: Callable[[int], ExpectedStep],
        site: Site | None = None,
    ) -> None:
        self._averaging, self._note_sums, self._expected = averaging, note_sums, expected
        self._site, self.samples = site, 0
        self.allreducer = None if site is None else site.allreducer
        self._step, self._is_synchronized = 0, True
        self._round_steps: deque[int] = deque()
        """Steps after which the latest exchanges began."""
        self._first_round = 0
        self._pending_notes: tuple[PendingAllReduce, Tensor] | None = None
        self._pending_request: StepRequest = ""
        """Request to send with the next notes."""
        self._timed_rounds = 0
        self._used = self._expected_total = ExpectedStep(0, 0)
        self._sent_expected = self._expected_total

    def begin(self, step: int) -> None:
        """All workers agree on these weights."""
        self._averaging.begin()
        self._step, self._is_synchronized = step, True
        parts = self._averaging.rules.parts
        self._round_steps = deque([step] * parts, maxlen=_MAX_ROUNDS)
        self._first_round = self._averaging.rounds + parts
        self._used = self._expected_total = ExpectedStep(0, 0)

    def sync_step(self, micros: Sequence[Batch], request: StepRequest, step: int) -> StepTotals:
        """Totals of this worker; a request reaches all workers some steps later."""
        samples = sum(micro.samples for micro in micros)
        ours = self._count(micros, samples)
        self._pending_request = max(self._pending_request, request, key=encode_request)
        received: StepRequest = (
            self._exchange_notes(self._pending_request, step) if step % _NOTE_INTERVAL == 0 else ""
        )
        expected = self._expected(step)
        self._used = ExpectedStep(
            self._used.samples + samples,
            self._used.digest + sum(micro.digest for micro in micros),
        )
        self._expected_total = ExpectedStep(
            self._expected_total.samples + expected.samples,
            self._expected_total.digest + expected.digest,
        )
        return replace(ours, samples=expected.samples, digest=expected.digest, request=received)

    def _count(self, micros: Sequence[Batch], samples: int) -> StepTotals:
        counts = [
            sum(micro.items for micro in micros),
            sum(micro.tokens for micro in micros),
            sum(micro.padding for micro in micros),
            samples,
        ]
        if self._site is not None:
            counts = [int(number) for number in self._site.sum_over_site(counts)]
        *totals, self.samples = counts
        return StepTotals(items=totals[0], tokens=totals[1], padding=totals[2])

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Over the site."""
        if self._site is None:
            return loss
        return torch.tensor(self._site.sum_over_site([float(loss)])[0])

    def after_update(self, step: int, samples: int) -> None:
        """Exchange weights if due."""
        self._step, self._is_synchronized = step, False
        self._record_rounds(len(self._averaging.rules.parts_at(step)))
        self._averaging.after_update(step, samples=samples)

    def after_discarded(self) -> None:
        """Local to this worker."""

    def synchronize(self) -> bool:
        """Called by all workers after the same step; only once, since a second outer step would move the weights."""
        if self._is_synchronized:
            return False
        self._is_synchronized = True
        self._record_rounds(self._averaging.rules.parts)
        self._averaging.synchronize(exact=True)
        return True

    def exchange_s(self) -> float | None:
        """Of weights, each exchange once."""
        rounds, self._timed_rounds = self._timed_rounds, self._averaging.rounds
        return None if rounds == self._timed_rounds else self._averaging.exchange_s

    def abandon(self) -> int | None:
        """Return to the oldest weights all workers agreed on, so that no sample is lost."""
        self._averaging.return_to_anchor()
        return self._round_steps[self._averaging.rounds - self._first_round]

    def state(self) -> dict[str, Tensor]:
        """Outer momentum, equal on all workers: an exact exchange leaves no residual."""
        state = self._averaging.state()
        return {name: state[name] for name in ("momentum",) if len(state[name])}

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """From any worker: the states are equal."""
        if states and states[0]:
            self._averaging.begin()  # from the current weights
            self._averaging.restore({"anchor": self._averaging.state()["anchor"], **states[0]})

    def traffic(self) -> Traffic | None:
        """Of the weights."""
        return self._averaging.traffic()

    def error(self) -> float | None:
        """Of the weights."""
        return self._averaging.error()

    def close(self) -> None:
        """Close the connections."""
        self._averaging.close()
        self._note_sums.close()
        if self._site is not None:
            self._site.close()

    def _record_rounds(self, parts: int) -> None:
        self._round_steps.extend([self._step] * parts)
        self._first_round += parts

    def _exchange_notes(self, request: StepRequest, step: int) -> StepRequest:
        received: StepRequest = ""
        if self._pending_notes is not None:
            pending, numbers = self._pending_notes
            pending.wait()
            received = self._check_notes(numbers, step)
        low, high = self._used.digest % _WORD, self._used.digest // _WORD % _WORD
        numbers = torch.tensor(
            [encode_request(request), self._used.samples, low, high], dtype=torch.float64
        )
        self._pending_notes = self._note_sums.begin(numbers, key=0), numbers
        self._pending_request = ""
        self._sent_expected = self._expected_total
        self._used = self._expected_total = ExpectedStep(0, 0)
        return received

    def _check_notes(self, numbers: Tensor, step: int) -> StepRequest:
        received, samples, low, high = (int(number) for number in numbers.tolist())
        digest = (low + high * _WORD) % (1 << 64)
        if (samples, digest) != (
            self._sent_expected.samples,
            self._sent_expected.digest % (1 << 64),
        ):
            raise TrainingError(
                f"The workers did not take the samples of the steps before {step} once each.",
                hint="Do their data sets differ? Each must see the same samples in the same order.",
            )
        return decode_request(received)


_REQUEST_CODES = {"": 0, "relink": 1, "pause": 1 << 20, "finish": 1 << 38, "stop": 1 << 40}
"""Far enough apart that weaker requests of all workers do not add up to a stronger one; only the worker
that leads asks to finish."""


def sync_step(world: World, micros: Sequence[Batch], request: StepRequest = "") -> StepTotals:
    """Sum the counts of a step over all workers, in one small collective."""
    own = total_of(micros, request)
    if world.layout.is_single:
        return own
    totals = [own.items, own.tokens, own.padding, own.samples, _signed(own.digest)]
    counts = [*totals, encode_request(request)]
    if world.coordinates.tp or world.coordinates.pp:
        # Tensor- and pipeline-parallel workers use the same samples: count them once.
        counts[:5] = [0] * 5
    summed: list[int] = world.sum_over_all(torch.tensor(counts)).tolist()
    items, tokens, padding, samples, digest, code = summed
    return StepTotals(items, tokens, padding, samples, digest % DIGESTS, decode_request(code))


def encode_request(request: StepRequest) -> int:
    """Encode a request as a number that is summed over all workers."""
    return _REQUEST_CODES[request]


def decode_request(total: int) -> StepRequest:
    """Strongest request in a sum of encoded requests."""
    if total >= _REQUEST_CODES["stop"]:
        return "stop"
    if total >= _REQUEST_CODES["finish"]:
        return "finish"
    if total >= _REQUEST_CODES["pause"]:
        return "pause"
    return "relink" if total else ""


def _signed(number: int) -> int:
    number %= DIGESTS
    return number - DIGESTS if number >= DIGESTS // 2 else number
