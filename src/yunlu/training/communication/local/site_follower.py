"""The averaging of a worker that makes its steps with others, one of whom speaks for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.local.averaging import WeightAveraging

if TYPE_CHECKING:
    from yunlu.training.communication.local.averaging import PendingRound


class SiteFollower(WeightAveraging):
    """Holds in every step what the speaker (rank 0 of the wire) holds, and is told what its exchanges moved."""

    @torch.no_grad()
    def _meet(self, flight: PendingRound) -> None:
        flag = bytearray(1)
        with self._transport.session(tag=flight.number % (1 << 32)) as session:
            session.receive(0, flag)
            for values in self.told(flight.part.whole):
                session.receive(0, values)
        self._rounds += 1
        flight.becomes_anchor = bool(flag[0])
        if not flight.becomes_anchor:
            torch.sub(self._anchor[flight.part.whole], flight.change, out=flight.change)
