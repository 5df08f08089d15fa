"""Tree all-reduce: reduce to a root, then broadcast."""

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
