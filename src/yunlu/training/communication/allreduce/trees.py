"""Sums over trees: shares go up to a root, the sum comes down again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from yunlu.training.communication.allreduce.rank_group import (
    add,
    all_ranks,
    collect,
    collective,
    segments,
    values_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.allreduce.rank_group import Values
    from yunlu.training.communication.transport import Transport
    from yunlu.training.communication.transport_session import TransportSession


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A worker's place in a tree."""

    parent: int | None
    """None for the root."""
    children: tuple[int, ...]


@collective
def tree_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """One binary tree: few steps; its leaves, half of the workers, use their links half."""
    values = values_of(flat)
    place = heap_tree_node(transport.rank, transport.size)
    with all_ranks(transport, tag).session() as session:
        for piece in segments(slice(0, len(values)), values.itemsize):
            _take_part(session, place, values[piece], channel=0)


@collective
def double_tree_allreduce(transport: Transport, flat: Tensor, *, tag: int) -> None:
    """Two trees, half of the values over each: leaves of one are inside the other (Sanders et al. 2009)."""
    values = values_of(flat)
    middle = len(values) // 2
    halves = (
        segments(half, values.itemsize) for half in (slice(0, middle), slice(middle, len(values)))
    )
    twins = double_tree_nodes(transport.rank, transport.size)
    with all_ranks(transport, tag).session() as session:
        for pieces in zip_longest(*halves):
            for channel, (place, piece) in enumerate(zip(twins, pieces, strict=True)):
                if piece is not None:
                    _take_part(session, place, values[piece], channel=channel)


def heap_tree_node(rank: int, size: int) -> TreeNode:
    """In the tree in which those below a worker have the next numbers after twice its own."""
    below = range(2 * rank + 1, min(2 * rank + 3, size))
    return TreeNode((rank - 1) // 2 if rank else None, tuple(below))


def double_tree_nodes(rank: int, size: int) -> tuple[TreeNode, TreeNode]:
    """In two trees whose leaves have odd numbers; the second is the first one mirrored or moved on."""

    def swap(number: int, shift: int) -> int:
        return (number + shift) % size if size % 2 else size - 1 - number

    first, second = _place_in_order(rank, size), _place_in_order(swap(rank, -1), size)
    parent = None if second.parent is None else swap(second.parent, 1)
    return first, TreeNode(parent, tuple(swap(child, 1) for child in second.children))


def _place_in_order(number: int, size: int) -> TreeNode:
    children = [other for other in range(1, size) if _parent_in_order(other, size) == number]
    return TreeNode(_parent_in_order(number, size) if number else None, tuple(children))


def _parent_in_order(number: int, size: int) -> int:
    """0 is the root; below it, how often a number can be halved is its height."""
    height = number & -number
    above = (number ^ height) | (height << 1)
    return above if above < size else number ^ height


def _take_part(session: TransportSession, place: TreeNode, mine: Values, *, channel: int) -> None:
    """Add the children's shares to ours, pass it up, and what comes back down."""

    def pass_down() -> None:
        for child in place.children:
            session.send(child, mine, channel=channel)

    def pass_up(shares: list[Values]) -> None:
        for share in shares:
            add(mine, share)
        if place.parent is None:
            pass_down()
        else:
            session.send(place.parent, mine, channel=channel)

    if place.parent is not None:
        session.receive(place.parent, mine, pass_down, channel=channel)
    collect(session, place.children, mine, pass_up, channel=channel)
