"""Hierarchical all-reduce: within each machine first, then between one worker of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from yunlu.training.communication.allreduce.doubling import recursive_doubling
from yunlu.training.communication.allreduce.rank_group import (
    RankGroup,
    add,
    all_ranks,
    collect,
    collective,
    segments,
    values_of,
)
from yunlu.training.communication.allreduce.reduce_scatter_gather import reduce_scatter_gather
from yunlu.training.communication.allreduce.ring import allreduce_ring

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport

_SMALL_BYTES, _LARGE_BYTES = 8 << 10, 128 << 10


@collective
def hierarchical_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Each machine sends and receives as much as one worker would."""
    values = values_of(flat)
    machines = group_by_host(transport.hosts)
    if len(machines) == 1:
        reduce_scatter_gather(all_ranks(transport, tag), values, range(transport.size))
        return
    site_ranks = next(ranks for ranks in machines if transport.rank in ranks)
    leader, *others = site_ranks
    if transport.rank != leader:
        _run_follower(RankGroup(transport, site_ranks, tag), leader, values)
        return
    _run_leader(RankGroup(transport, site_ranks, tag), others, values)
    leaders = RankGroup(transport, [ranks[0] for ranks in machines], tag)
    _allreduce_leaders(leaders, values)
    with leaders.session() as session:
        for piece in segments(slice(0, len(values)), values.itemsize):
            for other in others:
                session.send(other, values[piece])


def _allreduce_leaders(leaders: RankGroup, values: Values) -> None:
    """The fastest algorithm over 100 Mbit/s links for this size."""
    if values.nbytes <= _SMALL_BYTES:
        recursive_doubling(leaders, values)
    elif values.nbytes <= _LARGE_BYTES:
        reduce_scatter_gather(leaders, values, range(leaders.size))
    else:
        allreduce_ring(leaders, values)


def group_by_host(hosts: tuple[str, ...]) -> list[list[int]]:
    """Ranks on each machine, in order; the first is its leader."""
    machines: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(host, []).append(rank)
    return list(machines.values())


def _run_follower(group: RankGroup, leader: int, values: Values) -> None:
    with group.session() as session:
        for piece in segments(slice(0, len(values)), values.itemsize):
            session.send(leader, values[piece])
            session.receive(leader, values[piece])


def _run_leader(group: RankGroup, others: list[int], values: Values) -> None:
    with group.session() as session:
        for piece in segments(slice(0, len(values)), values.itemsize):
            collect(session, others, values[piece], partial(_add_all, values[piece]))


def _add_all(total: Values, shares: list[Values]) -> None:
    for share in shares:
        add(total, share)
