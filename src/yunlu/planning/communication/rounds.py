"""Message rounds of each all-reduce algorithm: who sends how many bytes to whom. Pure.

Told as messages and not as formulas, so that the same few lines give the time with any number of
workers, with slow and uneven links, and with several workers on a host. Rounds and their counts are
those of Thakur, Rabenseifner and Gropp (2005); the two trees those of Sanders, Speck and Träff (2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Schedule = Callable[[Sequence[int], float], list["MessageRound"]]

_PIECE_BYTES = 16 << 10, 256 << 10
_SMALL_BYTES = 8 << 10
"""Between hosts: recursive doubling up to this size, reduce-scatter beyond."""
_PIECES = 4
"""Messages are pipelined in four pieces, within these sizes."""


@dataclass(frozen=True, slots=True)
class MessageRound:
    """Concurrent messages; a worker's next ones wait for a piece of these."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    bytes: NDArray[np.float64]
    is_added: bool = True
    """Whether the receiver adds it to its own."""
    pieces: int = 1
    """Number of pieces: once the first has arrived, its receiver can forward it."""
    is_two_way: bool = False
    """Whether a connection carries messages in both directions, so that acknowledgements wait."""


def make_round(
    messages: Iterable[tuple[int, int, float]],
    *,
    is_added: bool = True,
    pieces: int = 1,
    is_two_way: bool = False,
) -> MessageRound:
    """A round of (source, target, bytes)."""
    listed = list(messages)
    sources, targets, sizes = zip(*listed, strict=True) if listed else ((), (), ())
    return MessageRound(
        np.array(sources, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        np.array(sizes, dtype=np.float64),
        is_added,
        pieces,
        is_two_way,
    )


def ring(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Ring: n - 1 steps of reduce-scatter and n - 1 of all-gather."""
    count = len(hosts)
    turn = [(rank, (rank + 1) % count, size_bytes / count) for rank in range(count)]
    pieces = count_pieces(size_bytes / count)
    added = make_round(turn, pieces=pieces, is_two_way=count == 2)
    result = make_round(turn, is_added=False, pieces=pieces, is_two_way=count == 2)
    return [added] * (count - 1) + [result] * (count - 1)


def direct(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Direct: each worker owns a part, receives it from all, and sends the sum to all."""
    count = len(hosts)
    return serve(tuple(range(count)), count, size_bytes)


def serve(servers: Sequence[int], count: int, size_bytes: float) -> list[MessageRound]:
    """Some workers are servers and own a part each."""
    part = size_bytes / len(servers)
    there = [(rank, server, part) for server in servers for rank in range(count) if rank != server]
    back = [(server, rank, part) for rank, server, part in there]
    pieces = count_pieces(part)
    return [
        make_round(there, pieces=pieces, is_two_way=True),
        make_round(back, is_added=False, pieces=pieces, is_two_way=True),
    ]


def served(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """One server, the first worker."""
    return serve((0,), len(hosts), size_bytes)


def doubling(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Recursive doubling; workers beyond a power of two use a partner."""
    count = len(hosts)
    power = 1 << (count.bit_length() - 1)
    rounds: list[MessageRound] = []
    reach = 1
    while reach < power:
        turn = [(rank, rank ^ reach, size_bytes) for rank in range(power)]
        rounds.append(make_round(turn, is_two_way=True))
        reach *= 2
    rest = [(rank, rank - power, size_bytes) for rank in range(power, count)]
    if not rest:
        return rounds
    back = [(target, source, size) for source, target, size in rest]
    return [make_round(rest), *rounds, make_round(back, is_added=False)]


def tree(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Binary tree: reduce up, broadcast down, in pieces."""
    return _through_trees([_parents(len(hosts))], size_bytes)


def double_tree(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Two trees with half of the data each; an inner node of one is a leaf of the other."""
    count = len(hosts)
    first = [_parent_in_order(number, count) if number else -1 for number in range(count)]
    second = [-1] * count
    for number, parent in enumerate(first):
        second[_swap(number, count)] = -1 if parent < 0 else _swap(parent, count)
    return _through_trees([first, second], size_bytes)


def hierarchical(hosts: Sequence[int], size_bytes: float) -> list[MessageRound]:
    """Reduce within each host, all-reduce between hosts, broadcast within each host."""
    members = _members(hosts)
    leaders = [group[0] for group in members]
    inward = [(rank, group[0], size_bytes) for group in members for rank in group[1:]]
    outward = [(leader, rank, size_bytes) for rank, leader, _ in inward]
    among = doubling if size_bytes <= _SMALL_BYTES else direct
    between = _renamed(among(leaders, size_bytes), leaders) if len(leaders) > 1 else []
    if not inward:
        return between
    return [make_round(inward), *between, make_round(outward, is_added=False)]


SCHEDULES: dict[str, Schedule] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "doubling": doubling,
    "direct": direct,
    "server": served,
    "hierarchical": hierarchical,
}


def _parents(count: int) -> list[int]:
    return [(rank - 1) // 2 if rank else -1 for rank in range(count)]


def _through_trees(trees: Sequence[Sequence[int]], size_bytes: float) -> list[MessageRound]:
    """Level by level up and down, each forwarding the pieces that it has."""
    share = size_bytes / len(trees)
    pieces = count_pieces(share)
    depths = [_depths(parents) for parents in trees]
    up: list[MessageRound] = []
    down: list[MessageRound] = []
    for level in range(1, max(max(one_depth) for one_depth in depths) + 1):
        links = [
            (rank, parent, share)
            for parents, depth in zip(trees, depths, strict=True)
            for rank, parent in enumerate(parents)
            if depth[rank] == level
        ]
        up.append(make_round(links, pieces=pieces, is_two_way=pieces > 1))
        back = [(parent, rank, size) for rank, parent, size in links]
        down.append(make_round(back, is_added=False, pieces=pieces, is_two_way=pieces > 1))
    return up[::-1] + down


def count_pieces(size_bytes: float) -> int:
    """Number of pieces of a message of that size."""
    least, most = _PIECE_BYTES
    return max(math.ceil(size_bytes / min(max(size_bytes / _PIECES, least), most)), 1)


def _parent_in_order(number: int, count: int) -> int:
    """In-order binary tree: 0 is the root; odd numbers are leaves."""
    height = number & -number
    above = (number ^ height) | (height << 1)
    return above if above < count else number ^ height


def _swap(number: int, count: int) -> int:
    return (number + 1) % count if count % 2 else count - 1 - number


def _depths(parents: Sequence[int]) -> list[int]:
    def climb(rank: int) -> int:
        return 0 if parents[rank] < 0 else 1 + climb(parents[rank])

    return [climb(rank) for rank in range(len(parents))]


def _members(hosts: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(int(host), []).append(rank)
    return list(groups.values())


def _renamed(rounds: list[MessageRound], ranks: Sequence[int]) -> list[MessageRound]:
    names = np.array(ranks, dtype=np.int64)
    return [
        replace(one_round, sources=names[one_round.sources], targets=names[one_round.targets])
        for one_round in rounds
    ]
