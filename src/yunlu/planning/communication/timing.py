"""Message rounds of each all-reduce algorithm, and their time over measured links, codecs and workers. Pure.

Told as messages and not as formulas, so that the same few lines give the time with any number of
workers, with slow and uneven links, and with several workers on a host. Rounds and their counts are
those of Thakur, Rabenseifner and Gropp (2005); the two trees those of Sanders, Speck and Träff (2009).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import Field, model_validator

from yunlu.planning.collectives import sent_share
from yunlu.planning.machine_profile import FiniteFigures, MessageTime

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


_VALUE_BYTES = 4
_DIGITS = 3
_TORCH_OVER_OURS = 1.05
"""gloo over the bound 2(n - 1)/n·bytes/bandwidth at 100 Mbit/s and 256 KB or more: 1.05 to 1.13."""
_TORCH_MESSAGE_S = 7e-4
"""A round of gloo among 4 hosts, of a few bytes: 4.6 ms for its 6 or 7 of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Duration and traffic of an exchange."""

    seconds: float
    sent_bytes: float
    """Mean over workers."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Predicts the time of exchanges over given links, cached."""

    figures: WireFigures
    known: dict[tuple[object, ...], Span] = field(default_factory=dict[tuple[object, ...], Span])

    def sum_s(self, method: str, size_bytes: float) -> Span:
        """All-reduce of so many bytes of fp32."""
        size = _rounded(size_bytes)
        key = "sum", method, size
        if key not in self.known:
            self.known[key] = self._sum(method, size)
        return self.known[key]

    def compressed_s(self, codec: CodecCost, size_bytes: float) -> Span:
        """Reduce-scatter and all-gather of encoded parts."""
        size = _rounded(size_bytes)
        key = "compressed", codec.name, size
        if key not in self.known:
            self.known[key] = self._compressed(codec, size)
        return self.known[key]

    def _sum(self, method: str, size_bytes: float) -> Span:
        workers = self.figures.size
        if workers == 1:
            return Span(0.0, 0.0)
        if method == "all-reduce":
            return self._torch_sum(size_bytes)
        rounds = SCHEDULES[method](self.figures.host_numbers.tolist(), size_bytes)
        return Span(elapse(self.figures, rounds), _sent(rounds) / workers)

    def _torch_sum(self, size_bytes: float) -> Span:
        workers = self.figures.size
        sent = sent_share("all-reduce", workers) * size_bytes
        measured = self.figures.all_reduce
        if measured is not None:
            return Span(max(measured.message_s, size_bytes / measured.bytes_per_s), sent)
        rounds = SCHEDULES["ring"](self.figures.host_numbers.tolist(), size_bytes)
        span = elapse(self.figures, rounds)
        return Span(_TORCH_OVER_OURS * span + len(rounds) * _TORCH_MESSAGE_S, sent)

    def _compressed(self, codec: CodecCost, size_bytes: float) -> Span:
        workers = self.figures.size
        if workers == 1:
            return Span(0.0, 0.0)
        values = size_bytes / _VALUE_BYTES
        rounds = direct(self.figures.host_numbers.tolist(), values * codec.bytes_per_value)
        # Each encodes its gradients and the sums it owns; it decodes the other workers' versions
        # of its own part, and their sums.
        packed = values * (1 + 1 / workers) * codec.encode_s_per_value
        unpacked = values * 2 * (workers - 1) / workers * codec.decode_s_per_value
        calls = 2 * workers * codec.call_s
        spent = elapse(self.figures, rounds) + packed + unpacked + calls
        return Span(spent, _sent(rounds) / workers)


def elapse(figures: WireFigures, rounds: Sequence[MessageRound]) -> float:
    """Seconds until the last worker has finished; each forwards pieces as they arrive."""
    hosts, size = figures.host_numbers, figures.size
    latency, rate = np.array(figures.latency_s), np.array(figures.bytes_per_s)
    # Per worker: when it has something to forward, has all of it, and is free to send and receive.
    ready, whole, sent, got = (np.zeros(size) for _ in range(4))
    used = np.zeros((size, size))
    for item in rounds:
        ends = item.sources, item.targets
        source, target = hosts[item.sources], hosts[item.targets]
        delay = latency[source, target]
        alone = item.bytes / rate[source, target]
        if item.is_two_way:
            alone = alone / figures.both_ways
        uploaded, downloaded = _shared_s(figures, item)
        travel = np.maximum(alone, np.maximum(uploaded, downloaded))
        begun = np.maximum(ready[item.sources], sent[item.sources])
        begun = np.maximum(begun, np.maximum(got[item.targets], used[ends]))
        piece = travel / item.pieces
        first = begun + delay + piece
        last = np.maximum(begun + travel, whole[item.sources] + piece) + delay
        if item.is_added:
            added = item.bytes / figures.add_bytes_per_s
            first, last = first + added / item.pieces, last + added
        extra = figures.extra_message_s * _extra(item, size)[item.targets]
        used[ends] = begun + travel
        np.maximum.at(sent, item.sources, begun + uploaded)
        np.maximum.at(got, item.targets, begun + downloaded)
        np.maximum.at(ready, item.targets, first + extra)
        np.maximum.at(whole, item.targets, last + extra)
    return float(max(whole.max(), used.max()))


def _shared_s(
    figures: WireFigures, messages: MessageRound
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Transfer time of everything that leaves a message's source host, and enters its target host, in a round."""
    source, target = figures.host_numbers[messages.sources], figures.host_numbers[messages.targets]
    crossing = np.where(source == target, 0.0, messages.bytes)
    upload, download = np.array(figures.send_bytes_per_s), np.array(figures.receive_bytes_per_s)
    if not messages.is_two_way:
        # Both were measured with all connections in use in both directions.
        apart = np.where(np.eye(len(upload), dtype=bool), 0.0, np.array(figures.bytes_per_s))
        upload = np.maximum(upload, apart.max(axis=1))
        download = np.maximum(download, apart.max(axis=0))
    uploaded = np.bincount(source, crossing, len(upload)) / upload
    downloaded = np.bincount(target, crossing, len(download)) / download
    crosses = crossing > 0
    return np.where(crosses, uploaded[source], 0.0), np.where(crosses, downloaded[target], 0.0)


def _extra(messages: MessageRound, workers: int) -> NDArray[np.int64]:
    sends = np.bincount(messages.sources, minlength=workers)
    receives = np.bincount(messages.targets, minlength=workers)
    return np.maximum(np.maximum(sends, receives) - 1, 0)


def _sent(rounds: Sequence[MessageRound]) -> float:
    return float(sum(one_round.bytes.sum() for one_round in rounds))


def _rounded(size_bytes: float) -> float:
    """Rounded, so that buckets of nearly the same size are computed once."""
    return float(f"{size_bytes:.{_DIGITS}g}")


Row = tuple[float, ...]


class CodecCost(FiniteFigures):
    """Time of encoding and decoding on this machine."""

    name: str
    bytes_per_value: float = Field(gt=0)
    encode_s_per_value: float = Field(ge=0)
    decode_s_per_value: float = Field(ge=0)
    call_s: float = Field(default=0.0, ge=0)
    """Fixed cost of a call."""


class WireFigures(FiniteFigures):
    """Links between hosts, in the order in which the workers' ``hosts`` first name them.

    By host and not by worker: a host's upload and download are what is limited, and its workers share
    them.
    """

    hosts: tuple[str, ...] = Field(min_length=1)
    """Host of each worker."""
    latency_s: tuple[Row, ...]
    """From one host (row) to another, one way, of a message of next to no bytes; within it, on the diagonal."""
    bytes_per_s: tuple[Row, ...]
    """Of one message alone; on the diagonal between two workers of the host."""
    send_bytes_per_s: Row
    """Upload of a host while all hosts send to all."""
    receive_bytes_per_s: Row
    both_ways: float = Field(default=1.0, gt=0, le=1)
    """Share of the rate left while the same connection carries as much in the other direction."""
    extra_message_s: float = Field(default=0.0, ge=0)
    """Cost of each further message that a worker sends and receives at the same time."""
    add_bytes_per_s: float = Field(default=4e9, gt=0)
    """Rate at which one worker adds received values."""
    compute_s: Row = ()
    """Step time of each worker without exchange; empty before the first step."""
    all_reduce: MessageTime | None = None
    """torch's own sum, where it was tried: it passes messages in another way than ours.

    It takes the longer of the two: of gloo, what a small one takes is no part of a large one.
    """
    codecs: tuple[CodecCost, ...] = ()

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        count = len(self.host_names)
        tables = self.latency_s, self.bytes_per_s
        if any(len(table) != count or any(len(row) != count for row in table) for table in tables):
            raise ValueError(f"latency and rate must be given between {count} hosts")
        if {len(self.send_bytes_per_s), len(self.receive_bytes_per_s)} != {count}:
            raise ValueError(f"upload and download must be given for {count} hosts")
        rates = *self.send_bytes_per_s, *self.receive_bytes_per_s, *sum(self.bytes_per_s, ())
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError("rates must be above 0")
        if not all(math.isfinite(span) and span >= 0 for span in sum(self.latency_s, ())):
            raise ValueError("latencies cannot be below 0")
        if self.compute_s and len(self.compute_s) != len(self.hosts):
            raise ValueError("compute_s must be given for each worker")
        return self

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Each host once."""
        return tuple(dict.fromkeys(self.hosts))

    @property
    def host_numbers(self) -> NDArray[np.int64]:
        """Host index of each worker."""
        names = {name: number for number, name in enumerate(self.host_names)}
        return np.array([names[host] for host in self.hosts], dtype=np.int64)

    @property
    def slowest_compute_s(self) -> float | None:
        """Step time of the slowest worker."""
        return max(self.compute_s, default=None)

    def without(self, host: str) -> Self:
        """The same without the workers of a host; the others take over their samples."""
        numbers = [number for number, name in enumerate(self.host_names) if name != host]
        stay = [rank for rank, name in enumerate(self.hosts) if name != host]
        more = self.size / len(stay)

        def keep(row: Row) -> Row:
            return tuple(row[number] for number in numbers)

        return self.model_copy(
            update={
                "hosts": tuple(self.hosts[rank] for rank in stay),
                "latency_s": tuple(keep(self.latency_s[number]) for number in numbers),
                "bytes_per_s": tuple(keep(self.bytes_per_s[number]) for number in numbers),
                "send_bytes_per_s": keep(self.send_bytes_per_s),
                "receive_bytes_per_s": keep(self.receive_bytes_per_s),
                "compute_s": tuple(self.compute_s[rank] * more for rank in stay)
                if self.compute_s
                else (),
                "all_reduce": None,  # not measured among these
            }
        )

    def codec(self, name: str) -> CodecCost | None:
        """Cost of a codec, if measured."""
        return next((one_codec for one_codec in self.codecs if one_codec.name == name), None)


class SharedWork(FiniteFigures):
    """Compute between two exchanges, and the gradients to exchange."""

    gradient_bytes: tuple[int, ...]
    """Of each weight in fp32, in the order in which the backward pass yields them: the last weight first."""
    compute_s: float = Field(gt=0)
    """Step time of one worker without exchange: all passes and the optimiser."""
    backward_s: float = Field(ge=0)
    """Last backward pass of a step, which can overlap with the exchange."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Shapes of the weights that PowerSGD compresses."""
    can_freeze: bool = True
    """Whether the optimiser can freeze its second moment."""
    memory_steps: int = Field(default=1000, ge=0)
    """Time constant of the second moment, in steps."""
    steps: int | None = None
    """Steps left."""
    is_replicated: bool = True
    """Whether each worker holds the whole model."""
    staleness: int = Field(default=4, ge=0)
    """Staleness bound of asynchronous workers, in steps."""
    hides: float = Field(default=1.0, ge=0, le=1)
    """Share of an exchange that overlaps with compute: below 1 where it uses the same cores."""
    staging_bytes_per_s: float | None = None
    """Bandwidth between a GPU and its host: our transports use host memory."""

    @property
    def bytes(self) -> int:
        """Size of all gradients."""
        return sum(self.gradient_bytes)


_ALIKE = 1.25
"""Bursts that differ by less differ by chance."""


class WorkerSpeed(FiniteFigures):
    """Compute speed of a worker."""

    turns_per_s: float = Field(gt=0)
    """From a burst that all workers made at the same time."""
    step_s: float | None = Field(default=None, gt=0)
    """Forward and backward of its share of a step, if it has made steps."""


def is_doubtful(paces: Sequence[WorkerSpeed]) -> bool:
    """Whether a worker differs so much from most that it should be measured again."""
    usual = statistics.median(pace.turns_per_s for pace in paces)
    return any(not 1 / _ALIKE < pace.turns_per_s / usual < _ALIKE for pace in paces)


def steps_of(paces: Sequence[WorkerSpeed], *, planned_s: float) -> tuple[float, ...]:
    """Step time of each worker: measured, or in proportion to a worker whose time is known.

    Args:
        paces: Of all workers; the first is on the machine that the plan was made on.
        planned_s: What the first one's should take, where nobody has made a step.
    """
    usual = statistics.median(pace.turns_per_s for pace in paces)
    slower = [
        1.0 if 1 / _ALIKE < usual / pace.turns_per_s < _ALIKE else usual / pace.turns_per_s
        for pace in paces
    ]
    seen = [
        item.step_s / times
        for item, times in zip(paces, slower, strict=True)
        if item.step_s is not None
    ]
    unit_s = statistics.median(seen) if seen else planned_s / slower[0]
    return tuple(
        unit_s * times if item.step_s is None else item.step_s
        for item, times in zip(paces, slower, strict=True)
    )
