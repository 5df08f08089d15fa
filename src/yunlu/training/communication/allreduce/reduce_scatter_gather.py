"""Reduce-scatter and all-gather: each owner sums its part of the tensor and sends it to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.training.communication.allreduce.rank_group import (
    RankGroup,
    add,
    all_ranks,
    collect,
    collective,
    segments,
    split_evenly,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession


@collective
def direct_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Every worker owns a part: as few bytes as a ring, in two rounds, over all connections."""
    reduce_scatter_gather(all_ranks(transport, tag), values_of(flat), range(transport.size))


@collective
def server_allreduce(transport: Transport, flat: Tensor, *, tag: int, servers: int = 1) -> None:
    """The first workers own the parts: a parameter server, sharded over some of its clients."""
    reduce_scatter_gather(
        all_ranks(transport, tag), values_of(flat), range(min(servers, transport.size))
    )


def reduce_scatter_gather(group: RankGroup, values: Values, owners: Sequence[int]) -> None:
    """Sum in order of position, whatever the order of arrival.

    Args:
        group: The participating ranks.
        values: This worker's share, replaced by the sum.
        owners: Positions of the owners of parts.
    """
    position = group.position
    others = [(position + offset) % group.size for offset in range(1, group.size)]
    pieces = {
        owner: segments(part, values.itemsize)
        for owner, part in zip(owners, split_evenly(len(values), len(owners)), strict=True)
    }
    with group.session() as session:
        # Between any two workers, all shares precede all sums.
        for number in range(max(len(segments_of_owner) for segments_of_owner in pieces.values())):
            for other in others:
                for segment in pieces.get(other, [])[number : number + 1]:
                    session.send(group.ranks[other], values[segment])
        for segment in pieces.get(position, []):
            _reduce_own_part(group, session, values[segment], others)
        for other in others:
            for segment in pieces.get(other, []):
                session.receive(group.ranks[other], values[segment])


def _reduce_own_part(
    group: RankGroup, session: TransportSession, own: Values, others: list[int]
) -> None:
    position = group.position

    def finish(shares: list[Values]) -> None:
        add_in_order(own, shares, position)
        for other in others:
            session.send(group.ranks[other], own)

    collect(session, [group.ranks[other] for other in sorted(others)], own, finish)


def add_in_order(own: Values, shares: list[Values], position: int) -> None:
    """Add all shares in order of position; ``own`` is that of ``position``."""
    if position:
        total = shares[0]
        for share in shares[1:position]:
            add(total, share)
        np.add(total, own, out=own)
    for share in shares[position:]:
        add(own, share)
