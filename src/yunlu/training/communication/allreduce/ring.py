"""Ring all-reduce: fewest bytes, most rounds (Patarasuk and Yuan 2009)."""

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
    """Each part goes round once to be reduced and once to be gathered."""
    allreduce_ring(all_ranks(transport, tag), values_of(flat))


def allreduce_ring(group: RankGroup, values: Values) -> None:
    """See ``ring_allreduce``."""
    size, position = group.size, group.position
    parts = [segments(part, values.itemsize) for part in split_evenly(len(values), size)]
    previous, following = group.ranks[position - 1], group.ranks[(position + 1) % size]
    last = 2 * size - 3
    with group.session() as session:
        for segment in parts[position]:
            session.send(following, values[segment])
        for step in range(last + 1):
            is_reducing = step < size - 1
            for segment in parts[(position - step - 1) % size]:
                own = values[segment]
                into = np.empty_like(own) if is_reducing else own
                share = into if is_reducing else None
                target = following if step < last else None
                session.receive(previous, into, partial(_forward, session, own, share, target))


def _forward(
    session: TransportSession, own: Values, share: Values | None, following: int | None
) -> None:
    # This segment was sent on before it is overwritten: it has gone round the ring since.
    if share is not None:
        add(own, share)
    if following is not None:
        session.send(following, own)
