"""Links between workers, measured over a wire in a fraction of a second, and watched while they are used.

Workers may be busy and their hosts noisy: what disturbs makes a link look slow and never fast. So the
best of several trials counts, long messages count more than short ones, and a link that does
worse than its hosts do elsewhere is tried again before it is believed.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.communication.measurements import WireFigures
from yunlu.planning.machine_profile import MessageTime
from yunlu.training.communication.link_trials import (
    FIRST_BYTES,
    LARGEST_BYTES,
    TURNS,
    LinkTrial,
    typical,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from yunlu.planning.communication.measurements import CodecCost
    from yunlu.training.communication.transport import Transport

_LATENCY_SHARE, _PAIR_SHARE, _RING_SHARE, _ALL_SHARE, _BOTH_SHARE = 0.1, 0.3, 0.2, 0.25, 0.15
_ROUNDS = 3
_PASSES = 3
_DOUBTFUL = 0.7
"""A link that carries less than that share of what its two hosts do elsewhere is tried again."""
_SLOW = 3.0
"""As is one with so many times the usual latency."""
_TORCH_BYTES = 1 << 10, 128 << 10, 512 << 10, 4 << 20
_LONG_S = 0.03
_INSIDE_S, _INSIDE_BYTES_PER_S = 1e-4, 1e9


def measure_links(
    transport: Transport,
    *,
    budget_s: float = 0.5,
    compute_s: float | None = None,
    all_reduce: Callable[[int], object] | None = None,
    codecs: Sequence[CodecCost] = (),
    add_bytes_per_s: float | None = None,
    tag: int = 0,
) -> WireFigures:
    """Latency and rate between all hosts; every worker calls this, and all get the same figures.

    A slow link takes longer than the budget: something has to go over each.

    Args:
        wire: Nobody else uses it meanwhile; nobody should compute either.
        budget_s: How long to take, about.
        compute_s: A step of ours without any exchange, if one was taken.
        all_reduce: Sums so many bytes over all workers in torch's own way.
        codecs: What packing costs here; the slowest worker's figure counts for all.
        add_bytes_per_s: How fast we add; the slowest worker's counts.
        tag: Of the messages.
    """
    talk = LinkTrial(transport, tag)
    talk.meet()
    told = _LinkMatrix(transport.hosts)
    for _ in range(_PASSES):
        meetings = told.doubtful(_pairings(transport.hosts))
        if not meetings:
            break
        told.add(talk.share(_measure_pairs(talk, meetings, budget_s)))
    rate = told.settled()
    rate *= np.where(np.eye(len(rate), dtype=bool), 1.0, _measure_ring(talk, rate, budget_s))
    send, receive = _measure_all(talk, rate, budget_s)
    turn_s, extra_message_s = talk.turns()
    # A round of all workers takes longer than a message of two, where workers share cores.
    busy = max(turn_s / told.neighbours_s(), 1.0) if transport.size > 1 else 1.0
    rows = talk.share(
        {
            "compute_s": compute_s,
            "add_bytes_per_s": add_bytes_per_s,
            "codecs": [each.model_dump() for each in codecs],
        }
    )
    return WireFigures(
        hosts=transport.hosts,
        latency_s=_rows(told.latency_s * busy),
        bytes_per_s=_rows(rate),
        send_bytes_per_s=send,
        receive_bytes_per_s=receive,
        both_ways=_measure_both_ways(talk, rate, budget_s),
        extra_message_s=extra_message_s,
        all_reduce=None if all_reduce is None else _measure_torch(talk, all_reduce),
        **_worst(rows),
    )


def _pairings(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Who meets whom, in order: within a host by twos, then one worker of each host all others.

    Pairs that meet at the same time have no host in common (a round-robin tournament), so each has
    its links for itself.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    pairs = [
        pair for group in members.values() for pair in zip(group[::2], group[1::2], strict=False)
    ]
    seats: list[int | None] = [group[0] for group in members.values()]
    if len(seats) % 2:
        seats.append(None)
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], seats[::-1], strict=False)
        pairs += [(one, other) for one, other in facing if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return pairs


def _measure_pairs(
    talk: LinkTrial, meetings: Sequence[tuple[int, int]], budget_s: float
) -> dict[str, Any]:
    """What we saw of those we met: latency, and the rate from them to us."""
    rank = talk.transport.rank
    mine = [one if other == rank else other for one, other in meetings if rank in (one, other)]
    counts = np.bincount(np.array(meetings).ravel())
    turns = int(counts.max())
    latency_s = {str(peer): talk.ping(peer, budget_s * _LATENCY_SHARE / turns) for peer in mine}
    share_s = budget_s * _PAIR_SHARE / (2 * turns)
    return {
        "latency_s": latency_s,
        "bytes_per_s": {str(peer): talk.stream(peer, share_s) for peer in mine},
    }


class _LinkMatrix:
    """What all workers said of their links: the best that was seen, since what disturbs makes it worse."""

    def __init__(self, hosts: Sequence[str]) -> None:
        names = list(dict.fromkeys(hosts))
        self._numbers = [names.index(host) for host in hosts]
        count = len(names)
        self._latency_s = np.full((count, count), np.inf)
        self._bytes_per_s = np.zeros((count, count))

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take in what each worker saw, by rank."""
        for rank, row in enumerate(rows):
            here = self._numbers[rank]
            for peer, span in row["latency_s"].items():
                there = self._numbers[int(peer)]
                if math.isfinite(span):
                    # Half of there and back: the same in both directions.
                    best = min(span, self._latency_s[here, there])
                    self._latency_s[here, there] = self._latency_s[there, here] = best
            for peer, rate in row["bytes_per_s"].items():
                there = self._numbers[int(peer)]
                self._bytes_per_s[there, here] = max(rate, self._bytes_per_s[there, here])

    def doubtful(self, meetings: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those to meet: all at first, then where a link does worse than its hosts do elsewhere."""
        if not self._bytes_per_s.any():
            return meetings
        seen = np.isfinite(self._latency_s)
        usual_s = float(np.median(self._latency_s[seen]))
        apart, reach = self._reach()
        is_doubtful = (apart < _DOUBTFUL * reach) | (seen & (self._latency_s > _SLOW * usual_s))
        np.fill_diagonal(is_doubtful, val=False)
        is_doubtful |= is_doubtful.T
        pairs = [(self._numbers[one], self._numbers[other]) for one, other in meetings]
        return [pair for pair, ends in zip(meetings, pairs, strict=True) if is_doubtful[ends]]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Between hosts; where a host has one worker, there is nothing within it to know."""
        return np.where(np.isfinite(self._latency_s), self._latency_s, _INSIDE_S)

    def neighbours_s(self) -> float:
        """The mean latency from each worker to the next."""
        latency, numbers = self.latency_s, self._numbers
        ring = zip(numbers, [*numbers[1:], numbers[0]], strict=True)
        return float(np.mean([latency[here, there] for here, there in ring]))

    def settled(self) -> NDArray[np.float64]:
        """Rates between hosts; where nothing but noise tells two links of a host apart, they are alike."""
        apart, reach = self._reach()
        alike = np.where(apart >= _DOUBTFUL * reach, reach, apart)
        rates = np.where(np.eye(len(apart), dtype=bool), self._bytes_per_s, alike)
        return np.where(rates > 0, rates, _INSIDE_BYTES_PER_S)

    def _reach(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rates between hosts, and what their two ends do elsewhere."""
        apart = np.where(np.eye(len(self._bytes_per_s), dtype=bool), 0.0, self._bytes_per_s)
        return apart, np.minimum(apart.max(axis=1)[:, None], apart.max(axis=0)[None, :])


def _worst(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The slowest worker's adding and packing: the others wait for it."""
    told: dict[str, Any] = {}
    adding = [row["add_bytes_per_s"] for row in rows if row["add_bytes_per_s"]]
    if adding:
        told["add_bytes_per_s"] = min(adding)
    spans = [row["compute_s"] for row in rows]
    if all(spans):
        told["compute_s"] = tuple(spans)
    slowest: dict[str, dict[str, Any]] = {}
    for each in (codec for row in rows for codec in row["codecs"]):
        known = slowest.setdefault(each["name"], dict(each))
        for field in ("encode_s_per_value", "decode_s_per_value", "call_s"):
            known[field] = max(known[field], each[field])
    told["codecs"] = tuple(slowest.values())
    return told


def _measure_all(
    talk: LinkTrial, rate: NDArray[np.float64], budget_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What each host sends and receives while all talk to all.

    Everyone sends in proportion to what each link carries alone, so that all are through at about the
    same time, and a slow host does not make the others look slow.
    """
    transport = talk.transport
    leaders = _leaders(transport.hosts)
    count = len(leaders)
    if count == 1:
        return (float(rate[0, 0]),), (float(rate[0, 0]),)
    sizes = _sizes(rate, budget_s * _ALL_SHARE / _ROUNDS / (count - 1))
    np.fill_diagonal(sizes, 0)
    outgoing: dict[int, int] = {}
    incoming: dict[int, int] = {}
    if transport.rank in leaders:
        here = leaders.index(transport.rank)
        for there in range(count):
            if there != here:
                outgoing[leaders[there]] = int(sizes[here, there])
                incoming[leaders[there]] = int(sizes[there, here])
    spent_s = talk.time_exchange(outgoing, incoming, _ROUNDS)
    alone = np.where(np.eye(count, dtype=bool), 0.0, rate)
    # Half of what a link carries alone is what it carries both ways at once, if it has to take turns.
    send = np.maximum(sizes.sum(axis=1) / spent_s, alone.max(axis=1) / 2)
    receive = np.maximum(sizes.sum(axis=0) / spent_s, alone.max(axis=0) / 2)
    return tuple(send.tolist()), tuple(receive.tolist())


def _measure_ring(talk: LinkTrial, rate: NDArray[np.float64], budget_s: float) -> float:
    """What long messages get of the rates that short ones saw, each host sending to the next, all at once.

    Links let a little through at once before they hold to their rate.
    """
    transport = talk.transport
    leaders = _leaders(transport.hosts)
    count = len(leaders)
    if count == 1:
        return 1.0
    span_s = budget_s * _RING_SHARE / _ROUNDS
    sizes = _sizes(rate, span_s)
    outgoing: dict[int, int] = {}
    incoming: dict[int, int] = {}
    ring = list(zip(range(count), [*range(1, count), 0], strict=True))
    for here, there in ring:
        if transport.rank == leaders[here]:
            outgoing[leaders[there]] = int(sizes[here, there])
        if transport.rank == leaders[there]:
            incoming[leaders[here]] = int(sizes[here, there])
    spent_s = talk.time_exchange(outgoing, incoming, _ROUNDS)
    return _remaining_share(max(sizes[pair] / rate[pair] for pair in ring), spent_s)


def _measure_both_ways(talk: LinkTrial, rate: NDArray[np.float64], budget_s: float) -> float:
    """What is left of the rate of two hosts that send to each other, each with one other."""
    transport = talk.transport
    leaders = _leaders(transport.hosts)
    pairs = list(zip(range(0, len(leaders), 2), range(1, len(leaders), 2), strict=False))
    if not pairs:
        return 1.0
    sizes = _sizes(rate, budget_s * _BOTH_SHARE / _ROUNDS)
    outgoing: dict[int, int] = {}
    incoming: dict[int, int] = {}
    ways = pairs + [(other, one) for one, other in pairs]
    for here, there in ways:
        if transport.rank == leaders[here]:
            outgoing[leaders[there]] = int(sizes[here, there])
            incoming[leaders[there]] = int(sizes[there, here])
    spent_s = talk.time_exchange(outgoing, incoming, _ROUNDS)
    return _remaining_share(max(sizes[way] / rate[way] for way in ways), spent_s)


def _leaders(hosts: Sequence[str]) -> list[int]:
    """The first worker of each host."""
    return [hosts.index(name) for name in dict.fromkeys(hosts)]


def _remaining_share(expected_s: float, spent_s: float) -> float:
    return float(min(max(expected_s / spent_s, 0.5), 1.0))


def _sizes(rate: NDArray[np.float64], span_s: float) -> NDArray[np.int64]:
    """Messages that take about so long."""
    return np.clip(rate * span_s, FIRST_BYTES, LARGEST_BYTES).astype(np.int64)


def _measure_torch(talk: LinkTrial, all_reduce: Callable[[int], object]) -> MessageTime:
    """A few sizes, as the median worker saw them: the smallest tells the latency, the largest the rate."""
    seconds: list[float] = []
    for size in _TORCH_BYTES:
        spans: list[float] = []
        for _ in range(TURNS if size == _TORCH_BYTES[0] else _ROUNDS):
            talk.meet()
            began = time.perf_counter()
            all_reduce(size)
            spans.append(time.perf_counter() - began)
        seconds.append(statistics.median(talk.share(typical(spans))))
        if len(seconds) > 2 and seconds[-1] > _LONG_S:
            break
    sizes = _TORCH_BYTES[: len(seconds)]
    return MessageTime(
        message_s=seconds[0],
        bytes_per_s=sizes[-1] / max(seconds[-1], 1e-9),
        sizes=sizes,
        seconds=tuple(seconds),
    )


def _rows(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())
