"""Sums round a ring: the fewest bytes, over the most steps (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from yunlu.training.communication.allreduce.rank_group import (
    RankGroup,
    add,
    all_ranks,
    collective,
    segments,
    split_evenly,
    values_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession


@collective
def ring_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Each part goes round once to be added up and once more to be known."""
    allreduce_ring(all_ranks(transport, tag), values_of(flat))


def allreduce_ring(group: RankGroup, values: Values) -> None:
    """See ``ring_allreduce``."""
    size, position = group.size, group.position
    parts = [segments(part, values.itemsize) for part in split_evenly(len(values), size)]
    before, after = group.ranks[position - 1], group.ranks[(position + 1) % size]
    last = 2 * size - 3
    with group.session() as session:
        for place in parts[position]:
            session.send(after, values[place])
        for step in range(last + 1):
            is_partial = step < size - 1
            for place in parts[(position - step - 1) % size]:
                mine = values[place]
                into = np.empty_like(mine) if is_partial else mine
                share = into if is_partial else None
                goes_to = after if step < last else None
                session.receive(before, into, partial(_go_on, session, mine, share, goes_to))


def _go_on(
    session: TransportSession, mine: Values, share: Values | None, after: int | None
) -> None:
    # What is written here was sent on long ago where it was ever sent: it has come round since.
    if share is not None:
        add(mine, share)
    if after is not None:
        session.send(after, mine)
