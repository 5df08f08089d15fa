"""Averaging on a site worker that is not the site's leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.local.averaging import WeightAveraging

if TYPE_CHECKING:
    from yunlu.training.communication.local.averaging import PendingRound


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
