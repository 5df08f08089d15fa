"""Compressed all-reduce with error feedback on workers and owners (Tang et al. 2019, DoubleSqueeze)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from yunlu.training.communication.allreduce import direct_allreduce
from yunlu.training.communication.allreducer import ThreadedAllReducer
from yunlu.training.communication.codecs.codec import make_codec
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
    from yunlu.training.communication.transport import Transport, TransportSession

_ALIGNED = 512
"""Alignment of parts: only the last block of a tensor is short."""
_SEGMENT = 1 << 16
"""Values encoded at a time: a segment is sent while the next is reduced."""
_SPREAD = 0x9E3779B97F4A7C15
_PRECISE_CODECS = "none", "fp16", "bf16"
"""Their error is below the gradient noise: not worth the memory of a residual."""


class LossyAllReduce(Protocol):
    """All-reduce that keeps its compression error for the next call."""

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum over all workers in ``flat``."""
        ...

    def commit(self) -> None:
        """The step was applied."""
        ...

    def revert(self) -> None:
        """The step was discarded."""
        ...

    def error(self) -> float | None:
        """Relative compression error of the last sums."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Residuals by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state``."""
        ...


class CompressedAllReduce:
    """All-reduce on a transport; bitwise equal on all workers.

    Each worker owns a part: it receives the others' encoded shares, sums them, and sends the encoded sum to
    all. Both encoding errors are added to the next message. If any share is not
    finite, the sum is NaN on all workers and all residuals stay unchanged.

    Args:
        codec: Encodes messages.
        feedback: Whether to keep residuals; by default for the codecs that need it.
        clip_norm: Gradient clipping norm of the job; see ``clip_worker_gradient``.
    """

    def __init__(
        self, codec: Codec, *, feedback: bool | None = None, clip_norm: float | None = None
    ) -> None:
        self._clip_norm = clip_norm
        self.switch(codec, feedback=feedback)
        self._worker, self._owner = ErrorFeedback(), ErrorFeedback()
        self._owner_parts: dict[str, OwnerPart] = {}
        self._restored: dict[str, Tensor] = {}

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum in ``flat``; exact for negative keys, which are not gradients."""
        if key < 0 or not len(flat):
            direct_allreduce(transport, flat, tag=tag)
            return
        name = str(key)
        self._prepare(transport, name, len(flat))
        values = flat if flat.dtype == torch.float32 else flat.float()
        clip_worker_gradient(values, self._clip_norm, transport.size)
        norm = self._worker.add_to(name, values)
        if transport.size == 1:
            self._worker.drop(name)
            flat.copy_(values)
            return
        exchange = _CompressedRound(
            transport, self.codec, values, self._owner_parts[name], self._owner, key
        )
        exchange.run(tag)
        if exchange.is_finite():
            self._store_residuals(name, exchange, norm)
        flat.copy_(exchange.result)

    def switch(self, codec: Codec, *, feedback: bool | None = None) -> None:
        """Use another codec; called by all workers between the same two steps."""
        self.codec = codec
        self._has_feedback = codec.name not in _PRECISE_CODECS if feedback is None else feedback

    def commit(self) -> None:
        """The step was applied; implied by the next step."""
        self._worker.commit()
        self._owner.commit()

    def revert(self) -> None:
        """The step was discarded: return to the residuals before it."""
        self._worker.revert()
        self._owner.revert()

    def error(self) -> float | None:
        """Relative compression error of this worker's last messages."""
        return self._worker.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals by name."""
        return self._restored | pack_state(self._worker, self._owner, self._owner_parts)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residuals of the same worker, or those of ``redistribute_residuals``."""
        self._worker, self._owner, self._owner_parts = ErrorFeedback(), ErrorFeedback(), {}
        self._restored = dict(state)

    def _store_residuals(self, name: str, exchange: _CompressedRound, norm: float) -> None:
        if not self._has_feedback:
            given, residual = exchange.sample_error()
            self._worker.record_norms(name, given=given, residual=residual)
            self._worker.drop(name)
            self._owner.drop(name)
            return
        residual = exchange.worker_residual(self._worker.buffer(name, len(exchange.values)))
        self._worker.store_residual(name, residual)
        self._worker.record_norms(
            name, given=norm, residual=float(torch.linalg.vector_norm(residual))
        )
        length = sum(len(total) for _, total in exchange.totals)
        self._owner.store_residual(name, exchange.owner_residual(self._owner.buffer(name, length)))

    def _prepare(self, transport: Transport, name: str, length: int) -> None:
        """Prepare the next sum of a tensor, with its restored residuals."""
        start = _split(length, transport.size)[transport.rank].start
        owner_part = self._owner_parts.get(name)
        rounds = 0 if owner_part is None else owner_part.rounds
        own_state = {
            key: residual
            for key, residual in self._restored.items()
            if key.partition("/")[2] == name
        }
        for key in own_state:
            del self._restored[key]
        if own_state:
            worker, owner, owner_parts = unpack_state(own_state)
            rounds = owner_parts[name].rounds if name in owner_parts else 0
            now = (transport.size, transport.rank, start, length)
            is_same = name in owner_parts and now == owner_parts[name].key_fields
            if not is_same:
                worker, owner, _ = unpack_state(fold_owner_residuals(own_state))
            self._worker.residuals |= worker
            self._owner.residuals |= owner
        self._owner_parts[name] = OwnerPart(
            size=transport.size, rank=transport.rank, start=start, length=length, rounds=rounds + 1
        )


@dataclass(slots=True, eq=False)
class _CompressedRound:
    """One compressed all-reduce; its messages are kept until the sum is known to be finite."""

    transport: Transport
    codec: Codec
    values: Tensor
    owner_part: OwnerPart
    owner: ErrorFeedback
    key: int
    result: Tensor = field(init=False)
    sent: list[tuple[slice, Tensor]] = field(default_factory=list[tuple[slice, Tensor]])
    totals: list[tuple[slice, Tensor]] = field(default_factory=list[tuple[slice, Tensor]])

    def run(self, tag: int) -> None:
        transport, rank = self.transport, self.transport.rank
        self.result = torch.empty_like(self.values)
        others = [(rank + turn) % transport.size for turn in range(1, transport.size)]
        pieces = [_segments(part) for part in _split(len(self.values), transport.size)]
        with transport.session(tag=tag) as session:
            # Between any two workers, all shares precede all sums.
            for number in range(max(len(owner_parts) for owner_parts in pieces)):
                for other in others:
                    for piece in pieces[other][number : number + 1]:
                        data = self._encode(self.values[piece], other, number)
                        self.sent.append((piece, data))
                        session.send(other, data.numpy())
            for number, piece in enumerate(pieces[rank]):
                self._collect(session, piece, number, others)
            for other in others:
                for piece in pieces[other]:
                    data = self._message_buffer(piece)
                    then = partial(self.codec.decode, data, self.result[piece])
                    session.receive(other, data.numpy(), then)

    def is_finite(self) -> bool:
        """Equal on all workers, whichever share was not finite."""
        total = float(torch.linalg.vector_norm(self.result))
        return total - total == 0.0

    def worker_residual(self, buffer: Tensor) -> Tensor:
        """Compression error of the shares this worker sent; its own part has none."""
        buffer.zero_()
        for piece, data in self.sent:
            self.codec.decode(data, buffer[piece])
            torch.sub(self.values[piece], buffer[piece], out=buffer[piece])
        return buffer

    def owner_residual(self, buffer: Tensor) -> Tensor:
        """Compression error of the sums this worker sent."""
        for piece, total in self.totals:
            owner_part = slice(
                piece.start - self.owner_part.start, piece.stop - self.owner_part.start
            )
            torch.sub(total, self.result[piece], out=buffer[owner_part])
        return buffer

    def sample_error(self) -> tuple[float, float]:
        """Norms of one message before encoding, and of its error."""
        if not self.sent:
            return 0.0, 0.0
        piece, data = self.sent[0]
        decoded = torch.empty_like(self.values[piece])
        self.codec.decode(data, decoded)
        norm = torch.linalg.vector_norm
        return float(norm(self.values[piece])), float(norm(self.values[piece] - decoded))

    def _collect(
        self, session: TransportSession, piece: slice, number: int, others: list[int]
    ) -> None:
        shares = {other: self._message_buffer(piece) for other in sorted(others)}
        missing = set(others)

        def on_share(other: int) -> None:
            missing.remove(other)
            if missing:
                return
            data = self._reduce(piece, number, shares)
            for peer in others:
                session.send(peer, data.numpy())

        for other in others:
            session.receive(other, shares[other].numpy(), partial(on_share, other))

    def _reduce(self, piece: slice, number: int, shares: Mapping[int, Tensor]) -> Tensor:
        total = self.values[piece].clone()
        for share in shares.values():  # in a fixed order, not in that of arrival
            self.codec.decode(share, total, add=True)
        residual = self.owner.residuals.get(str(self.key))
        if residual is not None:
            start = self.owner_part.start
            total.add_(residual[piece.start - start : piece.stop - start])
        if not bool(torch.isfinite(total.sum())):
            total.fill_(torch.nan)
        self.totals.append((piece, total))
        data = self._encode(total, self.transport.rank, number)
        self.codec.decode(data, self.result[piece])
        return data

    def _encode(self, values: Tensor, owner: int, number: int) -> Tensor:
        data = torch.empty(self.codec.size_bytes(len(values)), dtype=torch.uint8)
        # Equal for all senders of this segment, and for its owner.
        seed = 0
        for part in (self.owner_part.rounds, self.key, owner, number):
            seed = (seed * _SPREAD + part) % 2**62
        self.codec.encode(values, data, seed=seed)
        return data

    def _message_buffer(self, piece: slice) -> Tensor:
        return torch.empty(self.codec.size_bytes(piece.stop - piece.start), dtype=torch.uint8)


class CompressedAllReducer(ThreadedAllReducer):
    """Compressed all-reduce as an ``AllReducer``."""

    is_exact = False

    def __init__(self, transport: Transport, compressed: LossyAllReduce) -> None:
        super().__init__(transport, compressed)
        self._compressed = compressed

    def commit(self) -> None:
        """The step was applied; called between steps."""
        self._compressed.commit()

    def revert(self) -> None:
        """The step was discarded."""
        self._compressed.revert()

    def error(self) -> float | None:
        """See ``AllReducer``."""
        return self._compressed.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals by name; after a failure those before it."""
        return self._compressed.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residuals of the same worker, or those of ``redistribute_residuals``."""
        self._compressed.restore(state)


def make_compressed_allreducer(
    transport: Transport,
    codec_name: str,
    *,
    block: int | None = None,
    share: float = 0.01,
    rank: int = 4,
    matrices: Mapping[int, Sequence[MatrixSlice]] | None = None,
    clip_norm: float | None = None,
) -> CompressedAllReducer:
    """All-reducer with a codec or PowerSGD.

    Args:
        transport: Closed with the result.
        codec_name: One of ``CODECS``, or ``powersgd``.
        block: See ``make_codec``.
        share: See ``make_codec``.
        rank: Of PowerSGD's factors.
        matrices: For PowerSGD, the matrices in the tensor of each key.
        clip_norm: Gradient clipping norm of the job; see ``clip_worker_gradient``.
    """
    if codec_name == "powersgd":
        return CompressedAllReducer(
            transport, PowerSgdAllReduce(matrices or {}, rank=rank, clip_norm=clip_norm)
        )
    codec = make_codec(codec_name, block=block, share=share)
    return CompressedAllReducer(transport, CompressedAllReduce(codec, clip_norm=clip_norm))


def _split(length: int, parts: int) -> list[slice]:
    """Parts of nearly equal length; some may be empty."""
    blocks = -(-length // _ALIGNED)
    bounds = [min(blocks * number // parts * _ALIGNED, length) for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _segments(part: slice) -> list[slice]:
    starts = range(part.start, part.stop, _SEGMENT)
    return [slice(start, min(start + _SEGMENT, part.stop)) for start in starts]
