"""Recursive-doubling all-reduce: the whole tensor, to ever more distant partners (Thakur et al. 2005, section 4)."""

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
    """Fewest rounds, log2 of the workers, each with the whole tensor: for small tensors."""
    recursive_doubling(all_ranks(transport, tag), values_of(flat))


def recursive_doubling(group: RankGroup, values: Values) -> None:
    """See ``doubling_allreduce``. Both partners add the same two numbers, so that they stay bitwise equal."""
    if not len(values) or group.size == 1:
        return
    transport, position = group.transport, group.position
    paired_size = 1 << (group.size.bit_length() - 1)
    share = np.empty_like(values)
    if position >= paired_size:
        # Beyond a power of two: a partner adds for this rank.
        deputy = group.ranks[position - paired_size]
        transport.exchange({deputy: values}, {deputy: values}, tag=group.tag)
        return
    extra_rank = (
        group.ranks[position + paired_size] if position + paired_size < group.size else None
    )
    if extra_rank is not None:
        transport.receive(extra_rank, share, tag=group.tag)
        add(values, share)
    distance = 1
    while distance < paired_size:
        partner = group.ranks[position ^ distance]
        transport.exchange({partner: values}, {partner: share}, tag=group.tag)
        add(values, share)
        distance *= 2
    if extra_rank is not None:
        transport.send(extra_rank, values, tag=group.tag)
