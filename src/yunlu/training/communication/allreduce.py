"""All-reduce algorithms: in place, bitwise equal on all workers and in every run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from yunlu.training.communication.transport import Transport, TransportSession

    Values = NDArray[Any]

P = ParamSpec("P")

_SEGMENT_BYTES = 16 << 10, 256 << 10
_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of a transport, each with a position in the group."""

    transport: Transport
    ranks: Sequence[int]
    tag: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Position of this worker."""
        return self.ranks.index(self.transport.rank)

    def session(self) -> TransportSession:
        """Open a session."""
        return self.transport.session(tag=self.tag)


def collective(
    function: Callable[Concatenate[Transport, P], None],
) -> Callable[Concatenate[Transport, P], None]:
    """Collective that aborts the transport if it fails, so that it ends on all workers."""

    @wraps(function)
    def run(transport: Transport, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(transport, *args, **kwargs)
        except BaseException:
            transport.abort()
            raise

    return run


def all_ranks(transport: Transport, tag: int) -> RankGroup:
    """All workers of a transport."""
    return RankGroup(transport, range(transport.size), tag)


def values_of(flat: Tensor) -> Values:
    """The same memory as a NumPy array, whose additions use no threads."""
    return flat.detach().numpy()


def split_evenly(length: int, parts: int) -> list[slice]:
    """Parts of nearly equal length; some may be empty."""
    bounds = [length * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def segments(part: slice, item_bytes: int) -> list[slice]:
    """Split a part so that one segment is reduced while the next is received; none is empty."""
    length = part.stop - part.start
    min_items, max_items = (max(1, limit // item_bytes) for limit in _SEGMENT_BYTES)
    step = min(max(-(-length // _SEGMENTS), min_items), max_items)
    return [
        slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step)
    ]


def collect(
    session: TransportSession,
    peers: Sequence[int],
    template: Values,
    on_complete: Callable[[list[Values]], object],
    *,
    channel: int = 0,
) -> None:
    """Receive an array like ``template`` from each peer; ``on_complete`` gets all of them, in order.

    Not summed on arrival: the sum must not depend on timing.
    """
    shares = [np.empty_like(template) for _ in peers]
    missing = len(shares)

    def count_down() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            on_complete(shares)

    for peer, share in zip(peers, shares, strict=True):
        session.receive(peer, share, count_down, channel=channel)
    if not peers:
        on_complete([])


def add(total: Values, share: Values) -> None:
    """Add in place."""
    np.add(total, share, out=total)


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


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A worker's parent and children in a tree."""

    parent: int | None
    """None for the root."""
    children: tuple[int, ...]


@collective
def tree_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """One binary tree: few rounds; the leaves, half of the workers, use half of their links."""
    values = values_of(flat)
    node = heap_tree_node(transport.rank, transport.size)
    with all_ranks(transport, tag).session() as session:
        for piece in segments(slice(0, len(values)), values.itemsize):
            _run_node(session, node, values[piece], channel=0)


@collective
def double_tree_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Two trees with half of the values each; leaves of one are inner nodes of the other (Sanders et al. 2009)."""
    values = values_of(flat)
    middle = len(values) // 2
    halves = (
        segments(half, values.itemsize) for half in (slice(0, middle), slice(middle, len(values)))
    )
    nodes = double_tree_nodes(transport.rank, transport.size)
    with all_ranks(transport, tag).session() as session:
        for pieces in zip_longest(*halves):
            for channel, (node, piece) in enumerate(zip(nodes, pieces, strict=True)):
                if piece is not None:
                    _run_node(session, node, values[piece], channel=channel)


def heap_tree_node(rank: int, size: int) -> TreeNode:
    """Node of a binary heap."""
    below = range(2 * rank + 1, min(2 * rank + 3, size))
    return TreeNode((rank - 1) // 2 if rank else None, tuple(below))


def double_tree_nodes(rank: int, size: int) -> tuple[TreeNode, TreeNode]:
    """Nodes in two trees whose leaves have odd numbers; the second is the first mirrored or shifted."""

    def relabel(number: int, shift: int) -> int:
        return (number + shift) % size if size % 2 else size - 1 - number

    first, second = _inorder_node(rank, size), _inorder_node(relabel(rank, -1), size)
    parent = None if second.parent is None else relabel(second.parent, 1)
    return first, TreeNode(parent, tuple(relabel(child, 1) for child in second.children))


def _inorder_node(number: int, size: int) -> TreeNode:
    children = [other for other in range(1, size) if _inorder_parent(other, size) == number]
    return TreeNode(_inorder_parent(number, size) if number else None, tuple(children))


def _inorder_parent(number: int, size: int) -> int:
    """0 is the root; below it, the height is the number of trailing zero bits."""
    height = number & -number
    above = (number ^ height) | (height << 1)
    return above if above < size else number ^ height


def _run_node(session: TransportSession, node: TreeNode, own: Values, *, channel: int) -> None:
    """Add the children's shares, send the sum to the parent, and the result to the children."""

    def broadcast() -> None:
        for child in node.children:
            session.send(child, own, channel=channel)

    def reduce(shares: list[Values]) -> None:
        for share in shares:
            add(own, share)
        if node.parent is None:
            broadcast()
        else:
            session.send(node.parent, own, channel=channel)

    if node.parent is not None:
        session.receive(node.parent, own, broadcast, channel=channel)
    collect(session, node.children, own, reduce, channel=channel)


_SMALL_BYTES, _LARGE_BYTES = 8 << 10, 128 << 10


@collective
def hierarchical_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Each machine sends and receives as much as one worker would."""
    values = values_of(flat)
    machines = group_ranks(transport.hosts)
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


def group_ranks(names: Sequence[str]) -> list[list[int]]:
    """Ranks that share a name (of a machine, of a site), in order; the first is the leader."""
    groups: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        groups.setdefault(name, []).append(rank)
    return list(groups.values())


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


class AllReduceFunction(Protocol):
    """Sum a flat CPU tensor over the workers of a transport, in place."""

    def __call__(self, transport: Transport, /, flat: Tensor, *, tag: int) -> None:
        """See the class."""
        ...


ALGORITHMS: dict[str, AllReduceFunction] = {
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "double-tree": double_tree_allreduce,
    "doubling": doubling_allreduce,
    "direct": direct_allreduce,
    "server": server_allreduce,
    "hierarchical": hierarchical_allreduce,
}
