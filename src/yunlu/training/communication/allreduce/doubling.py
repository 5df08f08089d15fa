"""Sums by recursive doubling: everything, to ever more distant partners (Thakur et al. 2005, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.training.communication.allreduce.rank_group import (
    RankGroup,
    add,
    all_ranks,
    collective,
    values_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport


@collective
def doubling_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """The fewest steps, log2 of the workers, each with the whole tensor: for small ones."""
    recursive_doubling(all_ranks(transport, tag), values_of(flat))


def recursive_doubling(group: RankGroup, values: Values) -> None:
    """See ``doubling_allreduce``. Both of a pair add the same two numbers, so they get the same bits."""
    if not len(values) or group.size == 1:
        return
    transport, position = group.transport, group.position
    paired = 1 << (group.size.bit_length() - 1)
    share = np.empty_like(values)
    if position >= paired:
        # One too many for pairs: someone else adds for us.
        deputy = group.ranks[position - paired]
        transport.exchange({deputy: values}, {deputy: values}, tag=group.tag)
        return
    ward = group.ranks[position + paired] if position + paired < group.size else None
    if ward is not None:
        transport.receive(ward, share, tag=group.tag)
        add(values, share)
    distance = 1
    while distance < paired:
        partner = group.ranks[position ^ distance]
        transport.exchange({partner: values}, {partner: share}, tag=group.tag)
        add(values, share)
        distance *= 2
    if ward is not None:
        transport.send(ward, values, tag=group.tag)
