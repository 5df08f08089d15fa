"""Sums of compressed messages, with error feedback at both ends (Tang et al. 2019, DoubleSqueeze)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from yunlu.training.communication.allreduce import direct_allreduce
from yunlu.training.communication.allreducer import ThreadedAllReducer
from yunlu.training.communication.codecs.registry import make_codec
from yunlu.training.communication.error_feedback import (
    ErrorFeedback,
    OwnerPart,
    clip_worker_gradient,
    fold_owner_residuals,
    pack_state,
    unpack_state,
)
from yunlu.training.communication.powersgd import PowerSgdAllReduce

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.training.communication.codecs.codec import Codec
    from yunlu.training.communication.powersgd import MatrixSlice
    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession

_ALIGNED = 512
"""Parts begin at multiples of it: of all blocks, only the tensor's last is short."""
_PIECE = 1 << 16
"""Numbers encoded at a time: one piece is on its way while the next is added up."""
_SPREAD = 0x9E3779B97F4A7C15
_FAITHFUL = "none", "fp16", "bf16"
"""What they leave out is less than what the gradient is uncertain by: not worth its memory."""


class LossyAllReduce(Protocol):
    """A way to add up that keeps what it left out for the next time."""

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum over all workers in ``flat``."""
        ...

    def commit(self) -> None:
        """The step that the last sums were for was taken."""
        ...

    def revert(self) -> None:
        """It was not."""
        ...

    def error(self) -> float | None:
        """What the last sums left out, relative to what they were given."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What is kept, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave."""
        ...


class CompressedAllReduce:
    """Adds up tensors over a wire; all workers get the same bits.

    Each worker owns a part. It gets the others' shares of it encoded, adds them up, and sends the sum to
    all, encoded again. What either encoding left out is added the next time. Where some share is not
    finite the sum is NaN for all, and everyone's residuals stay as they were.

    Args:
        codec: How messages are packed.
        feedback: Whether to keep what was left out; by default, with the codecs that need it.
        clip_norm: What the job bounds the gradient's norm by: see ``clip_worker_gradient``.
    """

    def __init__(
        self, codec: Codec, *, feedback: bool | None = None, clip_norm: float | None = None
    ) -> None:
        self._clip_norm = clip_norm
        self.switch(codec, feedback=feedback)
        self._worker, self._owner = ErrorFeedback(), ErrorFeedback()
        self._places: dict[str, OwnerPart] = {}
        self._restored: dict[str, Tensor] = {}

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum in ``flat``; exactly, for keys below zero: those are not gradients."""
        if key < 0 or not len(flat):
            direct_allreduce(transport, flat, tag=tag)
            return
        name = str(key)
        self._take_up(transport, name, len(flat))
        values = flat if flat.dtype == torch.float32 else flat.float()
        clip_worker_gradient(values, self._clip_norm, transport.size)
        norm = self._worker.add_to(name, values)
        if transport.size == 1:
            self._worker.drop(name)
            flat.copy_(values)
            return
        deal = _CompressedRound(transport, self.codec, values, self._places[name], self._owner, key)
        deal.run(tag)
        if deal.is_finite():
            self._keep(name, deal, norm)
        flat.copy_(deal.result)

    def switch(self, codec: Codec, *, feedback: bool | None = None) -> None:
        """Pack messages otherwise from now on; everyone, between the same two steps."""
        self.codec = codec
        self._has_feedback = codec.name not in _FAITHFUL if feedback is None else feedback

    def commit(self) -> None:
        """The step that the last sums were for was taken; where nobody says so, the next one does."""
        self._worker.commit()
        self._owner.commit()

    def revert(self) -> None:
        """It was left out or given up: residuals are as before it."""
        self._worker.revert()
        self._owner.revert()

    def error(self) -> float | None:
        """What this worker's last messages left out, relative to what they were to hold."""
        return self._worker.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals by name."""
        return self._restored | pack_state(self._worker, self._owner, self._places)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with residuals: those of the same worker, or what ``share_out`` made of them all."""
        self._worker, self._owner, self._places = ErrorFeedback(), ErrorFeedback(), {}
        self._restored = dict(state)

    def _keep(self, name: str, deal: _CompressedRound, norm: float) -> None:
        if not self._has_feedback:
            given, left = deal.sample_error()
            self._worker.note(name, given=given, left=left)
            self._worker.drop(name)
            self._owner.drop(name)
            return
        left = deal.left_by_us(self._worker.room(name, len(deal.values)))
        self._worker.keep(name, left)
        self._worker.note(name, given=norm, left=float(torch.linalg.vector_norm(left)))
        length = sum(len(total) for _, total in deal.totals)
        self._owner.keep(name, deal.left_by_owner(self._owner.room(name, length)))

    def _take_up(self, transport: Transport, name: str, length: int) -> None:
        """Make ready for one more sum of a tensor, with what was restored for it."""
        start = _cut(length, transport.size)[transport.rank].start
        place = self._places.get(name)
        rounds = 0 if place is None else place.rounds
        mine = {key: kept for key, kept in self._restored.items() if key.partition("/")[2] == name}
        for key in mine:
            del self._restored[key]
        if mine:
            worker, owner, places = unpack_state(mine)
            rounds = places[name].rounds if name in places else 0
            now = (transport.size, transport.rank, start, length)
            is_same = name in places and now == places[name].whose
            if not is_same:
                worker, owner, _ = unpack_state(fold_owner_residuals(mine))
            self._worker.kept |= worker
            self._owner.kept |= owner
        self._places[name] = OwnerPart(
            size=transport.size, rank=transport.rank, start=start, length=length, rounds=rounds + 1
        )


@dataclass(slots=True, eq=False)
class _CompressedRound:
    """One sum: what was sent and received, until it is known whether all of it was finite."""

    transport: Transport
    codec: Codec
    values: Tensor
    place: OwnerPart
    owner: ErrorFeedback
    key: int
    result: Tensor = field(init=False)
    sent: list[tuple[slice, Tensor]] = field(default_factory=list[tuple[slice, Tensor]])
    totals: list[tuple[slice, Tensor]] = field(default_factory=list[tuple[slice, Tensor]])

    def run(self, tag: int) -> None:
        transport, rank = self.transport, self.transport.rank
        self.result = torch.empty_like(self.values)
        others = [(rank + turn) % transport.size for turn in range(1, transport.size)]
        pieces = [_segments(part) for part in _cut(len(self.values), transport.size)]
        with transport.session(tag=tag) as session:
            # Between any two, all shares come before all sums.
            for number in range(max(len(places) for places in pieces)):
                for other in others:
                    for piece in pieces[other][number : number + 1]:
                        data = self._encode(self.values[piece], other, number)
                        self.sent.append((piece, data))
                        session.send(other, data.numpy())
            for number, piece in enumerate(pieces[rank]):
                self._collect(session, piece, number, others)
            for other in others:
                for piece in pieces[other]:
                    data = self._room(piece)
                    then = partial(self.codec.decode, data, self.result[piece])
                    session.receive(other, data.numpy(), then)

    def is_finite(self) -> bool:
        """Alike for all, whoever had what is not."""
        total = float(torch.linalg.vector_norm(self.result))
        return total - total == 0.0

    def left_by_us(self, room: Tensor) -> Tensor:
        """What the others did not get of our shares; of our own part nothing was lost."""
        room.zero_()
        for piece, data in self.sent:
            self.codec.decode(data, room[piece])
            torch.sub(self.values[piece], room[piece], out=room[piece])
        return room

    def left_by_owner(self, room: Tensor) -> Tensor:
        """What the sums that we sent lack."""
        for piece, total in self.totals:
            place = slice(piece.start - self.place.start, piece.stop - self.place.start)
            torch.sub(total, self.result[piece], out=room[place])
        return room

    def sample_error(self) -> tuple[float, float]:
        """Norms of what one message was to hold, and of what it left out."""
        if not self.sent:
            return 0.0, 0.0
        piece, data = self.sent[0]
        found = torch.empty_like(self.values[piece])
        self.codec.decode(data, found)
        norm = torch.linalg.vector_norm
        return float(norm(self.values[piece])), float(norm(self.values[piece] - found))

    def _collect(
        self, session: TransportSession, piece: slice, number: int, others: list[int]
    ) -> None:
        shares = {other: self._room(piece) for other in sorted(others)}
        missing = set(others)

        def take(other: int) -> None:
            missing.remove(other)
            if missing:
                return
            data = self._add_up(piece, number, shares)
            for peer in others:
                session.send(peer, data.numpy())

        for other in others:
            session.receive(other, shares[other].numpy(), partial(take, other))

    def _add_up(self, piece: slice, number: int, shares: Mapping[int, Tensor]) -> Tensor:
        total = self.values[piece].clone()
        for share in shares.values():  # in one order, whoever comes first
            self.codec.decode(share, total, add=True)
        kept = self.owner.kept.get(str(self.key))
        if kept is not None:
            start = self.place.start
            total.add_(kept[piece.start - start : piece.stop - start])
        if not bool(torch.isfinite(total.sum())):
            total.fill_(torch.nan)
        self.totals.append((piece, total))
        data = self._encode(total, self.transport.rank, number)
        self.codec.decode(data, self.result[piece])
        return data

    def _encode(self, values: Tensor, owner: int, number: int) -> Tensor:
        data = torch.empty(self.codec.size_bytes(len(values)), dtype=torch.uint8)
        # The same for all who send a share of this piece, and for who sends the sum.
        seed = 0
        for part in (self.place.rounds, self.key, owner, number):
            seed = (seed * _SPREAD + part) % 2**62
        self.codec.encode(values, data, seed=seed)
        return data

    def _room(self, piece: slice) -> Tensor:
        return torch.empty(self.codec.size_bytes(piece.stop - piece.start), dtype=torch.uint8)


class CompressedAllReducer(ThreadedAllReducer):
    """Compressed sums as the engine wants them: see ``Summation``."""

    is_exact = False

    def __init__(self, transport: Transport, compressed: LossyAllReduce) -> None:
        super().__init__(transport, compressed)
        self._compressed = compressed

    def commit(self) -> None:
        """The step was taken; between steps, like all that follows."""
        self._compressed.commit()

    def revert(self) -> None:
        """The step was left out or given up."""
        self._compressed.revert()

    def error(self) -> float | None:
        """See ``Summation``."""
        return self._compressed.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals by name; also after a failure: those of before it."""
        return self._compressed.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with residuals: those of the same worker, or what ``share_out`` made of all of them."""
        self._compressed.restore(state)


def make_compressed_allreducer(
    transport: Transport,
    codec_name: str,
    *,
    block: int | None = None,
    share: float = 0.01,
    rank: int = 4,
    matrices: Mapping[int, Sequence[MatrixSlice]] | None = None,
    feedback: bool | None = None,
    clip_norm: float | None = None,
) -> CompressedAllReducer:
    """Sums by a codec or by PowerSGD, for the engine.

    Args:
        wire: Closed with what is returned.
        codec_name: One of ``CODECS``, or ``powersgd``.
        block: See ``make_codec``.
        share: See ``make_codec``.
        rank: Of PowerSGD's factors.
        matrices: For PowerSGD, which matrices the tensor of each key holds.
        feedback: See ``CompressedAllReduce``.
        clip_norm: What the job bounds the gradient's norm by: see ``clip_worker_gradient``.
    """
    if codec_name == "powersgd":
        return CompressedAllReducer(
            transport, PowerSgdAllReduce(matrices or {}, rank=rank, clip_norm=clip_norm)
        )
    codec = make_codec(codec_name, block=block, share=share)
    return CompressedAllReducer(
        transport, CompressedAllReduce(codec, feedback=feedback, clip_norm=clip_norm)
    )


def _cut(length: int, parts: int) -> list[slice]:
    """Parts of equal length, or nearly; some may be empty."""
    blocks = -(-length // _ALIGNED)
    bounds = [min(blocks * number // parts * _ALIGNED, length) for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _segments(part: slice) -> list[slice]:
    starts = range(part.start, part.stop, _PIECE)
    return [slice(start, min(start + _PIECE, part.stop)) for start in starts]
