"""Weights that each worker updates by itself, averaged now and then.

All workers hold the same *anchor*: the weights they last agreed on. A worker's update is the difference
between its weights and the anchor. An exchange computes the mean update, moves the anchor by it,
and moves each worker's weights by the difference between the mean and its own update. Steps made
meanwhile are kept, so that an exchange can overlap with computing.

Optimizer states stay with their workers: averaging them would triple the bytes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from yunlu.training.communication.codecs.codec import IdentityCodec
from yunlu.training.communication.codecs.registry import make_codec
from yunlu.training.communication.local.mean_exchange import MeanExchange, owned_slice
from yunlu.training.communication.transport_session import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from yunlu.training.communication.codecs.codec import Codec
    from yunlu.training.communication.local.rules import LocalRules
    from yunlu.training.communication.transport import Transport

_TAGS = 1 << 32


@dataclass(slots=True, eq=False)
class _WeightPart:
    """A contiguous part of all weights, exchanged at a time."""

    whole: slice
    ours: slice
    """The share of it whose mean this worker computes."""
    owed: Tensor
    """Residual of the means of that share."""
    seen: Tensor
    """Buffer for the weights at the start of an exchange."""
    samples: float = 0.0
    """Samples learned from since its last exchange."""
    weight: float = 1.0
    """This worker's samples in that exchange, the weight of its residual."""


@dataclass(slots=True, eq=False)
class PendingRound:
    """An exchange in flight."""

    part: _WeightPart
    meeting: MeanExchange
    lands_at: int
    weight: float
    number: int
    becomes_anchor: bool
    """Copy the anchor to the weights: they have not moved meanwhile, or were not finite."""
    change: Tensor
    """Weights at the start of the exchange; after it, the amount to add to them."""
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class WeightAveraging:
    """Averages the weights of all workers by the rules; called by all workers in the same steps.

    Args:
        weights: Equal on all workers, on any device.
        transport: To the other workers; used and closed by this only.
        rules: Schedule of the exchanges.
        codec: Codec of updates, in place of that of the rules.
        site_transport: To the workers that step together with this one, their leader (``SiteFollower``).
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        transport: Transport,
        rules: LocalRules,
        *,
        codec: Codec | None = None,
        site_transport: Transport | None = None,
    ) -> None:
        self.rules = rules
        self._transport, self._site_transport = transport, site_transport
        self._meeting = MeanExchange(transport, codec or make_codec(rules.codec))
        self._weights = [_in_memory(weight) for weight in weights]
        length = sum(len(weight) for weight in self._weights)
        self._all = slice(0, length)
        self._anchor = self._read(self._all, torch.empty(length))
        self._momentum = torch.zeros(length if rules.outer_momentum else 0)
        self._left_out = torch.zeros(length)
        self._parts = [self._make_part(number, length) for number in range(rules.parts)]
        self._pending_rounds: list[PendingRound] = []
        self._begun = self._rounds = 0
        self._error: float | None = None
        self.exchange_s: float | None = None
        """Duration of the last exchange, overlapped or not."""
        self._waiting: queue.SimpleQueue[PendingRound | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="averaging", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def after_update(self, step: int, *, samples: float = 1.0) -> None:
        """Called after each optimizer step, counted from 1; ends and begins exchanges.

        Args:
            step: The step just made.
            samples: Samples in this worker's share of it, its weight in the mean.
        """
        if self.rules.sums_gradients(step):
            if step == self.rules.from_step:
                self._read(self._all, self._anchor)
            return
        for part in self._parts:
            part.samples += samples
        self._land_until(step)
        for number in self.rules.parts_at(step):
            self._begin(self._parts[number], self._meeting, step=step, delay=self.rules.delay)
        self._land_until(step)

    @torch.no_grad()
    def synchronize(self, *, exact: bool = False) -> None:
        """Average everything now: afterwards all workers hold bitwise equal weights.

        Before evaluation, checkpoints, pauses and at the end; by all workers after the same step.

        Args:
            exact: Without encoding, so that the saved state is equal on all
                workers and fits any number of them.
        """
        self._land_until(None)
        meeting = MeanExchange(self._transport, IdentityCodec()) if exact else self._meeting
        for part in self._parts:
            if part.samples or exact:
                self._begin(part, meeting, step=0, delay=0)
        self._land_until(None)
        self._write(0, self._anchor)

    @torch.no_grad()
    def return_to_anchor(self) -> None:
        """Abandon exchanges in flight and return to the anchor.

        After peers were lost. Some workers may be one exchange ahead (``rounds``): all
        continue from the weights of a most advanced one.
        """
        self.abort()
        for pending_round in self._pending_rounds:
            pending_round.is_over.wait()
        self._pending_rounds.clear()
        for part in self._parts:
            part.samples = 0.0
        self._write(0, self._anchor)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the current weights, equal on all workers, as the anchor."""
        self._land_until(None)
        for part in self._parts:
            part.samples = 0.0
        self._read(self._all, self._anchor)

    @property
    def rounds(self) -> int:
        """Number of anchor updates."""
        return self._rounds

    def state(self) -> dict[str, Tensor]:
        """State to save besides the weights, after ``synchronize``; the last two are zeros if that was exact."""
        owed = torch.zeros_like(self._anchor)
        for part in self._parts:
            owed[part.ours] = part.owed
        return {
            "anchor": self._anchor.clone(),
            "momentum": self._momentum.clone(),
            "left_out": self._left_out.clone(),
            "owed": owed,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, weights included; missing entries are zeros."""
        self._anchor.copy_(state["anchor"])
        zeros = torch.zeros_like(self._anchor)
        if len(self._momentum):
            saved = state.get("momentum", zeros)
            self._momentum.copy_(saved if len(saved) else zeros)
        self._left_out.copy_(state.get("left_out", zeros))
        for part in self._parts:
            part.owed.copy_(state.get("owed", zeros)[part.ours])
            part.samples = 0.0
        self._write(0, self._anchor)

    def traffic(self) -> Traffic:
        """Bytes sent so far."""
        mine, theirs = (
            self._transport.traffic,
            self._site_transport.traffic if self._site_transport else Traffic(),
        )
        return Traffic(
            mine.sent_bytes + theirs.sent_bytes,
            mine.received_bytes + theirs.received_bytes,
            mine.messages + theirs.messages,
        )

    def error(self) -> float | None:
        """Relative compression error of the last exchange; None without a codec."""
        return self._error

    def abort(self) -> None:
        """Abort all current and later waits; from any thread."""
        self._transport.abort()
        if self._site_transport is not None:
            self._site_transport.abort()

    def close(self) -> None:
        """Close the connections and abandon exchanges in flight."""
        if self._pending_rounds:
            self.abort()
        self._waiting.put(None)
        self._thread.join()
        self._transport.close()
        if self._site_transport is not None:
            self._site_transport.close()

    def _make_part(self, number: int, length: int) -> _WeightPart:
        whole = owned_slice(length, number, self.rules.parts)
        share = owned_slice(whole.stop - whole.start, self._transport.rank, self._transport.size)
        ours = slice(whole.start + share.start, whole.start + share.stop)
        return _WeightPart(
            whole,
            ours,
            owed=torch.zeros(ours.stop - ours.start),
            seen=torch.empty(whole.stop - whole.start),
        )

    def _begin(self, part: _WeightPart, meeting: MeanExchange, *, step: int, delay: int) -> None:
        part.weight = part.samples or part.weight
        pending_round = PendingRound(
            part,
            meeting,
            lands_at=step + delay,
            weight=part.weight,
            number=self._begun,
            becomes_anchor=delay == 0,
            change=self._read(part.whole, part.seen),
        )
        self._begun += 1
        part.samples = 0.0
        self._pending_rounds.append(pending_round)
        self._waiting.put(pending_round)

    def _land_until(self, step: int | None) -> None:
        """Finish the exchanges due by this step; all if None."""
        while self._pending_rounds and (step is None or self._pending_rounds[0].lands_at <= step):
            pending_round = self._pending_rounds[0]
            pending_round.is_over.wait()
            if pending_round.error is not None:
                raise pending_round.error
            self._pending_rounds.pop(0)
            if pending_round.becomes_anchor:
                self._write(pending_round.part.whole.start, self._anchor[pending_round.part.whole])
            else:
                self._add(pending_round.part.whole.start, pending_round.change)

    def _serve(self) -> None:
        while (pending_round := self._waiting.get()) is not None:
            began_at = time.perf_counter()
            try:
                self._meet(pending_round)
                self.exchange_s = time.perf_counter() - began_at
            except BaseException as error:  # noqa: BLE001 - raised where the exchange is waited for
                pending_round.error = error
                self.abort()  # peers must not wait for this worker
            pending_round.is_over.set()

    @torch.no_grad()
    def _meet(self, pending_round: PendingRound) -> None:
        part = pending_round.part
        anchor, learned = self._anchor[part.whole], self._left_out[part.whole]
        learned.add_(pending_round.change).sub_(anchor)
        size = float(torch.linalg.vector_norm(learned))
        is_broken = not math.isfinite(size)
        if is_broken:
            learned.zero_()
            pending_round.becomes_anchor = True
        mean = pending_round.meeting.take_mean(
            learned,
            part.owed,
            weight=0.0 if is_broken else pending_round.weight,
            origin=_digest(anchor),
            number=pending_round.number,
        )
        if not isinstance(pending_round.meeting.codec, IdentityCodec) and size:
            self._error = float(torch.linalg.vector_norm(learned)) / size
        self._move(part.whole, mean)
        self._pass_on(pending_round)
        if not pending_round.becomes_anchor:
            torch.sub(anchor, pending_round.change, out=pending_round.change)

    def _pass_on(self, pending_round: PendingRound) -> None:
        if self._site_transport is None:
            return
        flag = bytes([pending_round.becomes_anchor])
        with self._site_transport.session(tag=pending_round.number % _TAGS) as session:
            for mate in range(1, self._site_transport.size):
                session.send(mate, flag)
                for values in self.shared_arrays(pending_round.part.whole):
                    session.send(mate, values)

    def shared_arrays(self, where: slice) -> list[Any]:
        """Arrays that an exchange of this part changes: anchor and momentum."""
        moved = [self._anchor, *([self._momentum] if len(self._momentum) else [])]
        return [tensor[where].numpy() for tensor in moved]

    def _move(self, where: slice, mean: Tensor) -> None:
        """Outer step along the mean of the workers' updates."""
        if len(self._momentum):
            momentum = self._momentum[where]
            momentum.mul_(self.rules.outer_momentum).add_(mean)
            mean.add_(momentum, alpha=self.rules.outer_momentum)
        self._anchor[where].add_(mean, alpha=self.rules.outer_lr)
        self._rounds += 1

    def _read(self, where: slice, into: Tensor) -> Tensor:
        """Copy a part of the weights."""
        for weight, span in self._overlaps(where):
            into[span].copy_(weight)
        return into

    def _write(self, start: int, values: Tensor) -> None:
        for weight, span in self._overlaps(slice(start, start + len(values))):
            weight.copy_(values[span])

    def _add(self, start: int, values: Tensor) -> None:
        for weight, span in self._overlaps(slice(start, start + len(values))):
            weight.add_(values[span].to(weight.device))

    def _overlaps(self, where: slice) -> Iterator[tuple[Tensor, slice]]:
        """Slices of weights within a part, and their offsets."""
        begin = 0
        for weight in self._weights:
            end = begin + len(weight)
            first, last = max(begin, where.start), min(end, where.stop)
            if first < last:
                yield (
                    weight[first - begin : last - begin],
                    slice(first - where.start, last - where.start),
                )
            begin = end


def _digest(values: Tensor) -> int:
    data: Any = values.numpy()
    return xxhash.xxh3_64_intdigest(data)


def _in_memory(weight: Tensor) -> Tensor:
    """The weight's values in memory order, whatever its shape."""
    weight = weight.detach()
    reach = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    if weight.numel() and reach + 1 != weight.numel():
        raise ValueError("a weight must be dense in memory, without gaps or overlaps")
    return weight.as_strided((weight.numel(),), (1,))
