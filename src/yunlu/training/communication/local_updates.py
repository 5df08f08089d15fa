"""Weights that each worker updates by itself, averaged now and then.

All workers hold the same *anchor*: the weights they last agreed on. A worker's update is the difference
between its weights and the anchor. An exchange computes the mean update, moves the anchor by it,
and moves each worker's weights by the difference between the mean and its own update. Steps made
meanwhile are kept, so that an exchange can overlap with computing.

Optimizer states stay with their workers: averaging them would triple the bytes.

Sites: links are fast within a site and slow between sites. Gradients are summed in every step within the
site, and one worker of each site averages weights with those of the other sites.
"""

from __future__ import annotations

import math
import queue
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from yunlu.training.communication.codecs.codec import IdentityCodec, make_codec
from yunlu.training.communication.transport import RefusedMessageError, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.communication.codecs.codec import Codec
    from yunlu.training.communication.transport import Transport


_HEADER = struct.Struct("<dQ")
_TAGS = 1 << 32


def owned_slice(length: int, rank: int, size: int) -> slice:
    """The slice that a worker owns."""
    return slice(length * rank // size, length * (rank + 1) // size)


class MeanExchange:
    """Successive exchanges of the workers' updates: a bitwise equal mean on all; buffers are reused.

    Every worker owns a slice. Encoded slices are sent to their owners; an owner computes the mean,
    encodes it and sends it to all. Encoding errors are kept at sender and owner, and added to the next
    exchange (error feedback: Seide et al. 2014; in both directions: Tang et al. 2019, DoubleSqueeze).

    Args:
        transport: To the other workers.
        codec: Encodes values.
    """

    def __init__(self, transport: Transport, codec: Codec) -> None:
        self.codec = codec
        self._transport = transport
        self._others = [peer for peer in range(transport.size) if peer != transport.rank]
        self._memory: dict[tuple[str, int], Tensor] = {}

    def take_mean(
        self, learned: Tensor, owed: Tensor, *, weight: float, origin: int, number: int
    ) -> Tensor:
        """The mean over all workers, valid until the next call.

        Args:
            learned: Update of this worker; afterwards its encoding error.
            owed: Encoding error of the means of the own slice; updated.
            weight: Of this update in the mean; 0 leaves it out.
            origin: Digest of the anchor weights, equal on all workers.
            number: Number of the exchange, equal on all workers.
        """
        shares = [
            owned_slice(len(learned), rank, self._transport.size)
            for rank in range(self._transport.size)
        ]
        parts = [learned[share] for share in shares]
        mean = self._collect(parts, weight, origin, number)
        mean += owed
        whole = self._keep("whole", 0, len(learned), torch.float32)
        self._spread(mean, [whole[share] for share in shares], number)
        torch.sub(mean, whole[shares[self._transport.rank]], out=owed)
        return whole

    def _collect(self, parts: list[Tensor], weight: float, origin: int, number: int) -> Tensor:
        """Mean of this worker's slice; what is sent of the other slices is subtracted from ``parts``."""
        own = parts[self._transport.rank]
        outgoing = {
            peer: self._message_buffer("to", peer, len(parts[peer])) for peer in self._others
        }
        incoming = {peer: self._message_buffer("from", peer, len(own)) for peer in self._others}
        header = bytearray(_HEADER.pack(weight, origin))
        for peer, message in outgoing.items():
            message.numpy()[: _HEADER.size] = header
            self._encode(parts[peer], message[_HEADER.size :], number)
        self._exchange(outgoing, incoming, tag=2 * number)
        weights = {peer: _read_header(peer, message, origin) for peer, message in incoming.items()}
        total = weight + sum(weights.values())
        mean = self._keep("mean", 0, len(own), torch.float32)
        mean.zero_()
        if weight:
            mean.add_(own, alpha=weight / total)
            own.zero_()  # the own slice is not encoded
        for peer, share in weights.items():
            if share:
                values = self._decode(incoming[peer][_HEADER.size :], len(own))
                mean.add_(values, alpha=share / total)
        if weight:
            for peer, message in outgoing.items():
                parts[peer] -= self._decode(message[_HEADER.size :], len(parts[peer]))
        return mean

    def _spread(self, mean: Tensor, wholes: list[Tensor], number: int) -> None:
        """Fill in the means of all slices, as encoded by their owners."""
        rooms = [
            self._message_buffer("mean of", peer, len(part))[_HEADER.size :]
            for peer, part in enumerate(wholes)
        ]
        own = rooms[self._transport.rank]
        self._encode(mean, own, number)
        incoming = {peer: rooms[peer] for peer in self._others}
        self._exchange(dict.fromkeys(incoming, own), incoming, tag=2 * number + 1)
        for part, room in zip(wholes, rooms, strict=True):
            if len(part):
                self.codec.decode(room, part)

    def _exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], *, tag: int
    ) -> None:
        self._transport.exchange(
            {peer: _buffer(message) for peer, message in outgoing.items()},
            {peer: _buffer(message) for peer, message in incoming.items()},
            tag=tag % _TAGS,
        )

    def _encode(self, values: Tensor, out: Tensor, number: int) -> None:
        if len(values):
            self.codec.encode(values, out, seed=number)

    def _decode(self, data: Tensor, length: int) -> Tensor:
        values = self._keep("values", 0, length, torch.float32)
        if length:
            self.codec.decode(data, values)
        return values

    def _message_buffer(self, name: str, peer: int, length: int) -> Tensor:
        """Buffer for a message of so many values."""
        size = self.codec.size_bytes(length) if length else 0
        return self._keep(name, peer, _HEADER.size + size, torch.uint8)

    def _keep(self, name: str, peer: int, length: int, dtype: torch.dtype) -> Tensor:
        # Allocating is slower than the work itself: every new page is a fault.
        memory = self._memory.get((name, peer))
        if memory is None or len(memory) < length:
            memory = self._memory[name, peer] = torch.empty(length, dtype=dtype)
        return memory[:length]


def _read_header(peer: int, message: Tensor, origin: int) -> float:
    weight, anchor_digest = _HEADER.unpack(bytes(message[: _HEADER.size].numpy()))
    if anchor_digest != origin:
        reason = "its anchor weights differ"
    elif not 0 <= weight < math.inf:
        reason = f"its weight {weight} is invalid"
    else:
        return weight
    raise RefusedMessageError(peer, reason)


def _buffer(message: Tensor) -> Any:
    return message.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRules:
    """Interval, part size and outer step of local updates."""

    every: int = 8
    """Steps between two exchanges of a weight."""
    from_step: int = 0
    """Steps with gradients summed in every step at first (post-local SGD: Lin et al. 2020)."""
    delay: int = 0
    """Steps computed while an exchange is in flight (Wang et al. 2020, overlap local SGD)."""
    parts: int = 1
    """Parts of the model exchanged in turn (Douillard et al. 2025, streaming DiLoCo)."""
    codec: str = "none"
    """Codec of updates; residuals are added to the next."""
    outer_lr: float = 1.0
    """Outer learning rate."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer steps (Douillard et al. 2023, DiLoCo)."""

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.parts <= self.every:
            raise ValueError(f"every={self.every} and parts={self.parts}: 1 <= parts <= every")
        if not 0 <= self.delay <= self.every:
            raise ValueError(f"delay={self.delay}: an exchange ends before the next of its weights")
        if self.from_step < 0 or self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise ValueError(
                "from_step >= 0, outer_lr > 0 and 0 <= outer_momentum < 1 are expected"
            )

    def sums_gradients(self, step: int) -> bool:
        """Whether the gradients of this step, counted from 1, are summed over all workers."""
        return step <= self.from_step

    def parts_at(self, step: int) -> tuple[int, ...]:
        """Parts whose exchange starts after this step, counted from 1."""
        local_step = step - self.from_step
        if local_step < 1:
            return ()
        turn = local_step % self.every
        return tuple(part for part in range(self.parts) if part * self.every // self.parts == turn)


METHODS: dict[str, LocalRules] = {
    "local": LocalRules(),
    "post-local": LocalRules(from_step=100),
    "diloco": LocalRules(every=100, outer_lr=0.7, outer_momentum=0.9),
}
"""Defaults of the methods; a job may set each value."""


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


class SiteFollower(WeightAveraging):
    """Holds the same weights as the leader (rank 0 of the transport), which sends what its exchanges changed."""

    @torch.no_grad()
    def _meet(self, pending_round: PendingRound) -> None:
        flag = bytearray(1)
        with self._transport.session(tag=pending_round.number % (1 << 32)) as session:
            session.receive(0, flag)
            for values in self.shared_arrays(pending_round.part.whole):
                session.receive(0, values)
        self._rounds += 1
        pending_round.becomes_anchor = bool(flag[0])
        if not pending_round.becomes_anchor:
            torch.sub(
                self._anchor[pending_round.part.whole],
                pending_round.change,
                out=pending_round.change,
            )


@dataclass(frozen=True, slots=True)
class Site:
    """The site of this worker."""

    allreducer: AllReducer
    """All-reduce of gradients over the site."""
    numbers: AllReducer
    """All-reduce of a few numbers per step."""

    def sum_over_site(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the workers of the site."""
        flat = torch.tensor(numbers, dtype=torch.float64)
        self.numbers.begin(flat, key=0).wait()
        return flat.tolist()

    def close(self) -> None:
        """Close the connections."""
        self.allreducer.close()
        self.numbers.close()
