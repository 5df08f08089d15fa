"""Sums by owners: each adds up its part of the tensor and sends the sum to all."""

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
    """Every worker owns a part: as few bytes as a ring, in two steps, over all connections."""
    reduce_scatter_gather(all_ranks(transport, tag), values_of(flat), range(transport.size))


@collective
def server_allreduce(transport: Transport, flat: Tensor, *, tag: int, servers: int = 1) -> None:
    """The first workers own the parts: a parameter server, split over some of its own clients."""
    reduce_scatter_gather(
        all_ranks(transport, tag), values_of(flat), range(min(servers, transport.size))
    )


def reduce_scatter_gather(group: RankGroup, values: Values, owners: Sequence[int]) -> None:
    """Add up; the values of all in the order of their positions, whoever comes first.

    Args:
        team: Who takes part.
        values: Ours, replaced by the sum.
        owners: The positions of those who own a part each.
    """
    position = group.position
    others = [(position + turn) % group.size for turn in range(1, group.size)]
    pieces = {
        owner: segments(part, values.itemsize)
        for owner, part in zip(owners, split_evenly(len(values), len(owners)), strict=True)
    }
    with group.session() as session:
        # Between any two, all shares come before all sums.
        for number in range(max(len(places) for places in pieces.values())):
            for other in others:
                for place in pieces.get(other, [])[number : number + 1]:
                    session.send(group.ranks[other], values[place])
        for place in pieces.get(position, []):
            _own(group, session, values[place], others)
        for other in others:
            for place in pieces.get(other, []):
                session.receive(group.ranks[other], values[place])


def _own(group: RankGroup, session: TransportSession, mine: Values, others: list[int]) -> None:
    position = group.position

    def finish(shares: list[Values]) -> None:
        add_in_order(mine, shares, position)
        for other in others:
            session.send(group.ranks[other], mine)

    collect(session, [group.ranks[other] for other in sorted(others)], mine, finish)


def add_in_order(mine: Values, shares: list[Values], position: int) -> None:
    """Add the shares of all the others to ours, which stands at a position among them."""
    if position:
        total = shares[0]
        for share in shares[1:position]:
            add(total, share)
        np.add(total, mine, out=mine)
    for share in shares[position:]:
        add(mine, share)
