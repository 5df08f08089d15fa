"""One exchange of the workers' updates: a bitwise equal mean on all of them.

Every worker owns a slice. Encoded slices are sent to their owners; an owner computes the mean,
encodes it and sends it to all. Encoding errors are kept at sender and owner, and
added to the next exchange (error feedback: Seide et al. 2014; in both directions: Tang et al. 2019, DoubleSqueeze).
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import torch

from yunlu.training.communication.transport import RefusedMessageError

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.codecs.codec import Codec
    from yunlu.training.communication.transport import Transport

_HEADER = struct.Struct("<dQ")
_TAGS = 1 << 32


def owned_slice(length: int, rank: int, size: int) -> slice:
    """The slice that a worker owns."""
    return slice(length * rank // size, length * (rank + 1) // size)


class MeanExchange:
    """Successive exchanges of all workers; buffers are reused.

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
