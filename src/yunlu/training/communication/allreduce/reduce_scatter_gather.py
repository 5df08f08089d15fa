"""Sums by owners: each adds up its part of the tensor and sends the sum to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.training.communication.allreduce.rank_group import (
    RankGroup,
    add,
    collect,
    collective,
    cut,
    everyone,
    segments,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession


@collective
def direct_sum(wire: Transport, flat: Tensor, *, tag: int) -> None:
    """Every worker owns a part: as few bytes as a ring, in two steps, over all connections."""
    sum_by_owners(everyone(wire, tag), values_of(flat), range(wire.size))


@collective
def served_sum(wire: Transport, flat: Tensor, *, tag: int, servers: int = 1) -> None:
    """The first workers own the parts: a parameter server, split over some of its own clients."""
    sum_by_owners(everyone(wire, tag), values_of(flat), range(min(servers, wire.size)))


def sum_by_owners(team: RankGroup, values: Values, owners: Sequence[int]) -> None:
    """Add up; the values of all in the order of their positions, whoever comes first.

    Args:
        team: Who takes part.
        values: Ours, replaced by the sum.
        owners: The positions of those who own a part each.
    """
    position = team.position
    others = [(position + turn) % team.size for turn in range(1, team.size)]
    pieces = {
        owner: segments(part, values.itemsize)
        for owner, part in zip(owners, cut(len(values), len(owners)), strict=True)
    }
    with team.flow() as flow:
        # Between any two, all shares come before all sums.
        for number in range(max(len(places) for places in pieces.values())):
            for other in others:
                for place in pieces.get(other, [])[number : number + 1]:
                    flow.send(team.ranks[other], values[place])
        for place in pieces.get(position, []):
            _own(team, flow, values[place], others)
        for other in others:
            for place in pieces.get(other, []):
                flow.receive(team.ranks[other], values[place])


def _own(team: RankGroup, flow: TransportSession, mine: Values, others: list[int]) -> None:
    position = team.position

    def finish(shares: list[Values]) -> None:
        add_in_order(mine, shares, position)
        for other in others:
            flow.send(team.ranks[other], mine)

    collect(flow, [team.ranks[other] for other in sorted(others)], mine, finish)


def add_in_order(mine: Values, shares: list[Values], position: int) -> None:
    """Add the shares of all the others to ours, which stands at a position among them."""
    if position:
        total = shares[0]
        for share in shares[1:position]:
            add(total, share)
        np.add(total, mine, out=mine)
    for share in shares[position:]:
        add(mine, share)
