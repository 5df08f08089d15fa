"""Weights that each worker updates by itself, brought together now and then.

All workers hold the same *anchor*: the weights they last agreed on. What a worker has learned is the way
from there to its own weights. In an exchange all learn the mean of these ways, the anchor moves along it,
and each worker's weights move by as much as its anchor's way differs from its own. Steps done in the
meantime stay: so an exchange can be under way while computing goes on.

What an optimiser remembers stays with its worker: averaging it would treble the bytes.
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
from yunlu.training.communication.local.mean_exchange import MeanExchange, share_of
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
    """A stretch of all weights laid end to end, exchanged at a time."""

    whole: slice
    ours: slice
    """The share of it whose mean we take."""
    owed: Tensor
    """What was left out of the means of our share."""
    seen: Tensor
    """Room for our weights as an exchange begins."""
    samples: float = 0.0
    """Learned from since its last exchange."""
    weight: float = 1.0
    """Of ours in that exchange: what it left out weighs as much."""


@dataclass(slots=True, eq=False)
class PendingRound:
    """An exchange under way."""

    part: _WeightPart
    meeting: MeanExchange
    lands_at: int
    weight: float
    number: int
    becomes_anchor: bool
    """Our weights are to be the anchor: they will not have moved meanwhile, or were not finite."""
    change: Tensor
    """Our weights as the exchange begins; when it is over, what to add to them."""
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class WeightAveraging:
    """Brings the weights of all workers together, by the rules; every worker calls it in the same steps.

    Args:
        weights: The same values on all workers. They may lie on any device.
        transport: To the others; ours alone from now on, and closed with this.
        rules: When to meet.
        codec: How what was learned is packed, in place of the one that the rules name.
        mates: To those who make our steps with us, and for whom we speak (``Following``).
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        transport: Transport,
        rules: LocalRules,
        *,
        codec: Codec | None = None,
        mates: Transport | None = None,
    ) -> None:
        self.rules = rules
        self._transport, self._mates = transport, mates
        self._meeting = MeanExchange(transport, codec or make_codec(rules.codec))
        self._weights = [_in_memory(weight) for weight in weights]
        length = sum(len(weight) for weight in self._weights)
        self._all = slice(0, length)
        self._anchor = self._read(self._all, torch.empty(length))
        self._momentum = torch.zeros(length if rules.outer_momentum else 0)
        self._left_out = torch.zeros(length)
        self._parts = [self._make_part(number, length) for number in range(rules.parts)]
        self._flights: list[PendingRound] = []
        self._begun = self._rounds = 0
        self._error: float | None = None
        self.exchange_s: float | None = None
        """What the last exchange took, hidden or not."""
        self._waiting: queue.SimpleQueue[PendingRound | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="averaging", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def after_update(self, step: int, *, samples: float = 1.0) -> None:
        """Call when the optimiser has done a step, counted from 1; ends and begins exchanges.

        Args:
            step: The one just done.
            samples: How many our share of it held: what is learned from more counts for more.
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
        """Bring everything together now: afterwards all workers hold the same weights, to the bit.

        Before evaluating, saving, pausing and at the end; by all workers after the same step.

        Args:
            exact: Nothing is packed and so nothing left out: what is saved then is the same on all
                workers, and fits any number of them.
        """
        self._land_until(None)
        meeting = MeanExchange(self._transport, IdentityCodec()) if exact else self._meeting
        for part in self._parts:
            if part.samples or exact:
                self._begin(part, meeting, step=0, delay=0)
        self._land_until(None)
        self._write(0, self._anchor)

    @torch.no_grad()
    def fall_back(self) -> None:
        """Give up what is under way and return to the weights last agreed on.

        After others were lost. Of those left some may have gone one exchange further (``rounds``): all
        go on from the weights of one who has gone furthest.
        """
        self.abort()
        for flight in self._flights:
            flight.is_over.wait()
        self._flights.clear()
        for part in self._parts:
            part.samples = 0.0
        self._write(0, self._anchor)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the weights as they are now, the same on all workers, for what was agreed on."""
        self._land_until(None)
        for part in self._parts:
            part.samples = 0.0
        self._read(self._all, self._anchor)

    @property
    def rounds(self) -> int:
        """How often the anchor has moved."""
        return self._rounds

    def state(self) -> dict[str, Tensor]:
        """What to save besides the weights, once settled; the last two are zeros if that was exact."""
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
        """Go on from what was saved, weights included; what is missing is taken as zeros."""
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
        """What went over the wires so far."""
        mine, theirs = self._transport.traffic, self._mates.traffic if self._mates else Traffic()
        return Traffic(
            mine.sent_bytes + theirs.sent_bytes,
            mine.received_bytes + theirs.received_bytes,
            mine.messages + theirs.messages,
        )

    def error(self) -> float | None:
        """How much packing left out last, of what was to be sent; none where nothing is packed."""
        return self._error

    def abort(self) -> None:
        """End every wait with an error, now and later; from any thread."""
        self._transport.abort()
        if self._mates is not None:
            self._mates.abort()

    def close(self) -> None:
        """Hang up; what is under way is given up."""
        if self._flights:
            self.abort()
        self._waiting.put(None)
        self._thread.join()
        self._transport.close()
        if self._mates is not None:
            self._mates.close()

    def _make_part(self, number: int, length: int) -> _WeightPart:
        whole = share_of(length, number, self.rules.parts)
        share = share_of(whole.stop - whole.start, self._transport.rank, self._transport.size)
        ours = slice(whole.start + share.start, whole.start + share.stop)
        return _WeightPart(
            whole,
            ours,
            owed=torch.zeros(ours.stop - ours.start),
            seen=torch.empty(whole.stop - whole.start),
        )

    def _begin(self, part: _WeightPart, meeting: MeanExchange, *, step: int, delay: int) -> None:
        part.weight = part.samples or part.weight
        flight = PendingRound(
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
        self._flights.append(flight)
        self._waiting.put(flight)

    def _land_until(self, step: int | None) -> None:
        """End the exchanges that are to end by this step; all, if none is named."""
        while self._flights and (step is None or self._flights[0].lands_at <= step):
            flight = self._flights[0]
            flight.is_over.wait()
            if flight.error is not None:
                raise flight.error
            self._flights.pop(0)
            if flight.becomes_anchor:
                self._write(flight.part.whole.start, self._anchor[flight.part.whole])
            else:
                self._add(flight.part.whole.start, flight.change)

    def _serve(self) -> None:
        while (flight := self._waiting.get()) is not None:
            began_at = time.perf_counter()
            try:
                self._meet(flight)
                self.exchange_s = time.perf_counter() - began_at
            except BaseException as error:  # noqa: BLE001 - it is raised where the exchange is waited for
                flight.error = error
                self.abort()  # the others are not to wait for us
            flight.is_over.set()

    @torch.no_grad()
    def _meet(self, flight: PendingRound) -> None:
        part = flight.part
        anchor, learned = self._anchor[part.whole], self._left_out[part.whole]
        learned.add_(flight.change).sub_(anchor)
        size = float(torch.linalg.vector_norm(learned))
        is_broken = not math.isfinite(size)
        if is_broken:
            learned.zero_()
            flight.becomes_anchor = True
        mean = flight.meeting.take_mean(
            learned,
            part.owed,
            weight=0.0 if is_broken else flight.weight,
            origin=_digest(anchor),
            number=flight.number,
        )
        if not isinstance(flight.meeting.codec, IdentityCodec) and size:
            self._error = float(torch.linalg.vector_norm(learned)) / size
        self._move(part.whole, mean)
        self._pass_on(flight)
        if not flight.becomes_anchor:
            torch.sub(anchor, flight.change, out=flight.change)

    def _pass_on(self, flight: PendingRound) -> None:
        if self._mates is None:
            return
        flag = bytes([flight.becomes_anchor])
        with self._mates.session(tag=flight.number % _TAGS) as session:
            for mate in range(1, self._mates.size):
                session.send(mate, flag)
                for values in self.told(flight.part.whole):
                    session.send(mate, values)

    def told(self, where: slice) -> list[Any]:
        """The arrays that an exchange of this stretch changes: the anchor's, and of its momentum."""
        moved = [self._anchor, *([self._momentum] if len(self._momentum) else [])]
        return [tensor[where].numpy() for tensor in moved]

    def _move(self, where: slice, mean: Tensor) -> None:
        """Take the outer step, along the mean of what the workers have learned."""
        if len(self._momentum):
            momentum = self._momentum[where]
            momentum.mul_(self.rules.outer_momentum).add_(mean)
            mean.add_(momentum, alpha=self.rules.outer_momentum)
        self._anchor[where].add_(mean, alpha=self.rules.outer_lr)
        self._rounds += 1

    def _read(self, where: slice, into: Tensor) -> Tensor:
        """Copy a stretch of our weights."""
        for weight, place in self._overlaps(where):
            into[place].copy_(weight)
        return into

    def _write(self, start: int, values: Tensor) -> None:
        for weight, place in self._overlaps(slice(start, start + len(values))):
            weight.copy_(values[place])

    def _add(self, start: int, values: Tensor) -> None:
        for weight, place in self._overlaps(slice(start, start + len(values))):
            weight.add_(values[place].to(weight.device))

    def _overlaps(self, where: slice) -> Iterator[tuple[Tensor, slice]]:
        """The stretches of weights within a stretch of all of them, and where in it they lie."""
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
    """The weight's values in the order in which they lie in memory, whatever its shape."""
    weight = weight.detach()
    reach = sum(
        (size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True)
    )
    if weight.numel() and reach + 1 != weight.numel():
        raise ValueError("a weight has gaps in memory, or places that it uses twice")
    return weight.as_strided((weight.numel(),), (1,))
