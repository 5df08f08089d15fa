"""Measure the links between workers, in a fraction of a second.

Workers may be busy and their hosts noisy: disturbances make a link look slow, never fast. So the
best of several trials counts, long messages count more than short ones, and a link slower
than its hosts achieve elsewhere is measured again.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.limits import decode_json
from yunlu.planning.communication.timing import WireFigures
from yunlu.planning.machine_profile import MessageTime
from yunlu.training.communication.allreduce import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.planning.communication.timing import CodecCost
    from yunlu.training.communication.transport import Transport


FIRST_BYTES, LARGEST_BYTES = 16 << 10, 8 << 20
MAX_MESSAGES = 12
_PINGS = 3, 15
_ROW_BYTES = 1 << 20
_LONG_TRIAL_S = 0.01
_SLOWEST = 1e3
"""Bytes per second; below it the clock must be wrong."""


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Measuring messages on a transport."""

    transport: Transport

    @property
    def others(self) -> list[int]:
        """All other workers."""
        return [peer for peer in range(self.transport.size) if peer != self.transport.rank]

    def barrier(self) -> float:
        """Wait for all workers; returns the time of the empty messages."""
        began = time.perf_counter()
        self.transport.exchange(
            dict.fromkeys(self.others, b""),
            {peer: bytearray(0) for peer in self.others},
        )
        return time.perf_counter() - began

    def ping(self, peer: int, budget_s: float) -> float:
        """One-way latency from some round trips; measured by the lower rank."""
        spans: list[float] = []
        least, most = _PINGS
        begun = time.perf_counter()
        answer = bytearray(1)
        is_first = self.transport.rank < peer
        go_on = True
        while go_on:
            if is_first:
                began = time.perf_counter()
                enough = len(spans) + 1 >= least and began - begun > budget_s
                go_on = not enough and len(spans) + 1 < most
                self.transport.send(peer, bytes([go_on]))
                self.transport.receive(peer, answer)
                spans.append((time.perf_counter() - began) / 2)
            else:
                self.transport.receive(peer, answer)
                go_on = bool(answer[0])
                self.transport.send(peer, answer)
        return typical(spans) if is_first else math.nan

    def stream(self, peer: int, budget_s: float) -> float:
        """Rate from ``peer`` to this worker, then in the other direction."""
        if self.transport.rank < peer:
            rate = self._receive_stream(peer, budget_s)
            self._send_stream(peer)
            return rate
        self._send_stream(peer)
        return self._receive_stream(peer, budget_s)

    def _receive_stream(self, peer: int, budget_s: float) -> float:
        """Request ever larger messages until one takes long enough; the best of a few counts."""
        into = bytearray(LARGEST_BYTES)

        def request(size: int) -> float:
            began = time.perf_counter()
            self.transport.send(peer, size.to_bytes(8, "little"))
            self.transport.receive(peer, memoryview(into)[:size])
            return time.perf_counter() - began

        request(1)  # the peer may have started late
        both_s = min(request(1) for _ in range(3))
        begun = time.perf_counter()
        size = FIRST_BYTES
        spent_s = min(request(size), request(size))
        # Even if over budget: a short message passes as a burst and shows no rate.
        while spent_s < _LONG_TRIAL_S and size < LARGEST_BYTES:
            size *= 2
            spent_s = min(request(size), request(size))
        while time.perf_counter() - begun + spent_s < budget_s:
            spent_s = min(spent_s, request(size))
        self.transport.send(peer, bytes(8))
        # Even a single byte takes a round trip.
        return max(size / max(spent_s - both_s, spent_s / 2), _SLOWEST)

    def _send_stream(self, peer: int) -> None:
        header = bytearray(8)
        data = bytes(LARGEST_BYTES)
        while True:
            self.transport.receive(peer, header)
            size = int.from_bytes(header, "little")
            if not 0 < size <= LARGEST_BYTES:
                return
            self.transport.send(peer, memoryview(data)[:size])

    def time_exchange(
        self, outgoing: Mapping[int, int], incoming: Mapping[int, int], rounds: int
    ) -> float:
        """Seconds of an exchange of so many bytes with each peer, until all are done; called by all workers.

        All start together, and the last one's time counts: to a late worker, messages that already arrived
        seem to take no time. Of several rounds the fastest was disturbed least.
        """
        sent = {peer: bytes(size) for peer, size in outgoing.items()}
        into = {peer: bytearray(size) for peer, size in incoming.items()}
        spans: list[float] = []
        for _ in range(rounds):
            self.barrier()
            began = time.perf_counter()
            self.transport.exchange(sent, into)
            spans.append(time.perf_counter() - began)
        return min(map(max, zip(*self.share(spans), strict=True)))

    def share(self, value: Any) -> list[Any]:
        """Gather a JSON value of every worker, by rank."""
        data = json.dumps(value).encode()
        rate = self.transport.gather(
            dict.fromkeys(self.others, data), self.others, limit_bytes=_ROW_BYTES
        )
        gathered = {**{peer: bytes(text) for peer, text in rate.items()}, self.transport.rank: data}
        return [decode_json(gathered[rank]) for rank in range(self.transport.size)]

    def turns(self) -> tuple[float, float]:
        """Time of a round in which each sends to the next, and of each further message in a round with all."""
        size, rank = self.transport.size, self.transport.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        into = bytearray(1)

        def time_round() -> float:
            began = time.perf_counter()
            self.transport.exchange({after: b"."}, {before: into})
            return time.perf_counter() - began

        if size == 1:
            return 0.0, 0.0
        next_s = typical([time_round() for _ in range(MAX_MESSAGES)])
        all_s = typical([self.barrier() for _ in range(MAX_MESSAGES)])
        ones, alls = (sorted(times) for times in zip(*self.share([next_s, all_s]), strict=True))
        next_s, all_s = statistics.median(ones), statistics.median(alls)
        return next_s, max(all_s - next_s, 0.0) / max(size - 2, 1)


def typical(spans: Sequence[float]) -> float:
    """First quartile: disturbances only add time, and values that are too short are rare."""
    return sorted(spans)[len(spans) // 4]


_LATENCY_SHARE, _PAIR_SHARE, _RING_SHARE, _ALL_SHARE, _BOTH_SHARE = 0.1, 0.3, 0.2, 0.25, 0.15
_ROUNDS = 3
_MAX_PASSES = 3
_SUSPECT_RATE_SHARE = 0.7
"""Links with less than this share of what their hosts achieve elsewhere are measured again."""
_SUSPECT_LATENCY_RATIO = 3.0
"""Links with this multiple of the usual latency are measured again, too."""
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
) -> WireFigures:
    """Latency and rate between all hosts; called by all workers, with equal results.

    A slow link takes longer than the budget: each must carry at least one message.

    Args:
        transport: Not used by others meanwhile; no worker should compute either.
        budget_s: Approximate time to spend.
        compute_s: Step time of this worker without communication, if known.
        all_reduce: All-reduces so many bytes with torch.
        codecs: Cost of each codec here; the slowest worker's counts.
        add_bytes_per_s: Addition speed; the slowest worker's counts.
    """
    trial = LinkTrial(transport)
    trial.barrier()
    matrix = _LinkMatrix(transport.hosts)
    for _ in range(_MAX_PASSES):
        pairings = matrix.pairings_to_measure(_pairings(transport.hosts))
        if not pairings:
            break
        matrix.add(trial.share(_measure_pairs(trial, pairings, budget_s)))
    rate = matrix.smoothed_rates()
    rate *= np.where(np.eye(len(rate), dtype=bool), 1.0, _measure_ring(trial, rate, budget_s))
    send, receive = _measure_all(trial, rate, budget_s)
    turn_s, extra_message_s = trial.turns()
    # With shared cores, a round of all workers takes longer than a message between two.
    contention = max(turn_s / matrix.neighbours_s(), 1.0) if transport.size > 1 else 1.0
    rows = trial.share(
        {
            "compute_s": compute_s,
            "add_bytes_per_s": add_bytes_per_s,
            "codecs": [codec.model_dump() for codec in codecs],
        }
    )
    return WireFigures(
        hosts=transport.hosts,
        latency_s=_rows(matrix.latency_s * contention),
        bytes_per_s=_rows(rate),
        send_bytes_per_s=send,
        receive_bytes_per_s=receive,
        both_ways=_measure_both_ways(trial, rate, budget_s),
        extra_message_s=extra_message_s,
        all_reduce=None if all_reduce is None else _measure_torch(trial, all_reduce),
        **_worst(rows),
    )


def _pairings(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs to measure, in order: within a host by twos, then the leader of each host with all others.

    Pairs measured at the same time share no host (a round-robin tournament), so each has
    its links to itself.
    """
    machines = group_ranks(hosts)
    pairs = [pair for ranks in machines for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    players: list[int | None] = [ranks[0] for ranks in machines]
    if len(players) % 2:
        players.append(None)
    for _ in range(len(players) - 1):
        facing = zip(players[: len(players) // 2], players[::-1], strict=False)
        pairs += [(one, other) for one, other in facing if one is not None and other is not None]
        players = [players[0], players[-1], *players[1:-1]]
    return pairs


def _measure_pairs(
    trial: LinkTrial, pairings: Sequence[tuple[int, int]], budget_s: float
) -> dict[str, Any]:
    """Latency and incoming rate of each measured peer."""
    rank = trial.transport.rank
    peers = [one if other == rank else other for one, other in pairings if rank in (one, other)]
    counts = np.bincount(np.array(pairings).ravel())
    turns = int(counts.max())
    latency_s = {str(peer): trial.ping(peer, budget_s * _LATENCY_SHARE / turns) for peer in peers}
    share_s = budget_s * _PAIR_SHARE / (2 * turns)
    return {
        "latency_s": latency_s,
        "bytes_per_s": {str(peer): trial.stream(peer, share_s) for peer in peers},
    }


class _LinkMatrix:
    """Measurements of all workers; the best of each link, since disturbances only slow it down."""

    def __init__(self, hosts: Sequence[str]) -> None:
        names = list(dict.fromkeys(hosts))
        self._numbers = [names.index(host) for host in hosts]
        count = len(names)
        self._latency_s = np.full((count, count), np.inf)
        self._bytes_per_s = np.zeros((count, count))

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the measurements of each worker, by rank."""
        for rank, row in enumerate(rows):
            here = self._numbers[rank]
            for peer, span in row["latency_s"].items():
                there = self._numbers[int(peer)]
                if math.isfinite(span):
                    # Half of the round trip, in both directions.
                    best = min(span, self._latency_s[here, there])
                    self._latency_s[here, there] = self._latency_s[there, here] = best
            for peer, rate in row["bytes_per_s"].items():
                there = self._numbers[int(peer)]
                self._bytes_per_s[there, here] = max(rate, self._bytes_per_s[there, here])

    def pairings_to_measure(self, pairings: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs to measure: at first all, then links slower than their hosts achieve elsewhere."""
        if not self._bytes_per_s.any():
            return pairings
        seen = np.isfinite(self._latency_s)
        usual_s = float(np.median(self._latency_s[seen]))
        pairwise_rates, best_rates = self._host_rates()
        is_doubtful = (pairwise_rates < _SUSPECT_RATE_SHARE * best_rates) | (
            seen & (self._latency_s > _SUSPECT_LATENCY_RATIO * usual_s)
        )
        np.fill_diagonal(is_doubtful, val=False)
        is_doubtful |= is_doubtful.T
        pairs = [(self._numbers[one], self._numbers[other]) for one, other in pairings]
        return [pair for pair, ends in zip(pairings, pairs, strict=True) if is_doubtful[ends]]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Between hosts; within a host with one worker it is unknown."""
        return np.where(np.isfinite(self._latency_s), self._latency_s, _INSIDE_S)

    def neighbours_s(self) -> float:
        """Mean latency from each worker to the next."""
        latency, numbers = self.latency_s, self._numbers
        ring = zip(numbers, [*numbers[1:], numbers[0]], strict=True)
        return float(np.mean([latency[here, there] for here, there in ring]))

    def smoothed_rates(self) -> NDArray[np.float64]:
        """Rates between hosts; links of a host that differ only by noise are set equal."""
        pairwise_rates, best_rates = self._host_rates()
        smoothed = np.where(
            pairwise_rates >= _SUSPECT_RATE_SHARE * best_rates, best_rates, pairwise_rates
        )
        rates = np.where(np.eye(len(pairwise_rates), dtype=bool), self._bytes_per_s, smoothed)
        return np.where(rates > 0, rates, _INSIDE_BYTES_PER_S)

    def _host_rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rates between hosts, and the best that both ends achieve elsewhere."""
        pairwise_rates = np.where(
            np.eye(len(self._bytes_per_s), dtype=bool), 0.0, self._bytes_per_s
        )
        return pairwise_rates, np.minimum(
            pairwise_rates.max(axis=1)[:, None], pairwise_rates.max(axis=0)[None, :]
        )


def _worst(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The slowest worker's rates: the others wait for it."""
    matrix: dict[str, Any] = {}
    adding = [row["add_bytes_per_s"] for row in rows if row["add_bytes_per_s"]]
    if adding:
        matrix["add_bytes_per_s"] = min(adding)
    spans = [row["compute_s"] for row in rows]
    if all(spans):
        matrix["compute_s"] = tuple(spans)
    slowest: dict[str, dict[str, Any]] = {}
    for codec in (codec for row in rows for codec in row["codecs"]):
        slowest_of_codec = slowest.setdefault(codec["name"], dict(codec))
        for field in ("encode_s_per_value", "decode_s_per_value", "call_s"):
            slowest_of_codec[field] = max(slowest_of_codec[field], codec[field])
    matrix["codecs"] = tuple(slowest.values())
    return matrix


def _measure_all(
    trial: LinkTrial, rate: NDArray[np.float64], budget_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Send and receive rate of each host while all communicate with all.

    Messages are sized in proportion to each link's rate, so that all end at about the
    same time and a slow host does not make the others look slow.
    """
    transport = trial.transport
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
    spent_s = trial.time_exchange(outgoing, incoming, _ROUNDS)
    alone = np.where(np.eye(count, dtype=bool), 0.0, rate)
    # A half-duplex link carries half of its rate in each direction.
    send = np.maximum(sizes.sum(axis=1) / spent_s, alone.max(axis=1) / 2)
    receive = np.maximum(sizes.sum(axis=0) / spent_s, alone.max(axis=0) / 2)
    return tuple(send.tolist()), tuple(receive.tolist())


def _measure_ring(trial: LinkTrial, rate: NDArray[np.float64], budget_s: float) -> float:
    """Share of the rate that long messages achieve, each host sending to the next at once.

    Links pass a short burst before they limit the rate.
    """
    transport = trial.transport
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
    spent_s = trial.time_exchange(outgoing, incoming, _ROUNDS)
    return _remaining_share(max(sizes[pair] / rate[pair] for pair in ring), spent_s)


def _measure_both_ways(trial: LinkTrial, rate: NDArray[np.float64], budget_s: float) -> float:
    """Share of the rate left when two hosts send to each other, in disjoint pairs."""
    transport = trial.transport
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
    spent_s = trial.time_exchange(outgoing, incoming, _ROUNDS)
    return _remaining_share(max(sizes[way] / rate[way] for way in ways), spent_s)


def _leaders(hosts: Sequence[str]) -> list[int]:
    """First worker of each host."""
    return [hosts.index(name) for name in dict.fromkeys(hosts)]


def _remaining_share(expected_s: float, spent_s: float) -> float:
    return float(min(max(expected_s / spent_s, 0.5), 1.0))


def _sizes(rate: NDArray[np.float64], span_s: float) -> NDArray[np.int64]:
    """Message sizes that take about this long."""
    return np.clip(rate * span_s, FIRST_BYTES, LARGEST_BYTES).astype(np.int64)


def _measure_torch(trial: LinkTrial, all_reduce: Callable[[int], object]) -> MessageTime:
    """Torch's all-reduce at a few sizes, by the median worker: latency from the smallest, rate from the largest."""
    seconds: list[float] = []
    for size in _TORCH_BYTES:
        spans: list[float] = []
        for _ in range(MAX_MESSAGES if size == _TORCH_BYTES[0] else _ROUNDS):
            trial.barrier()
            began = time.perf_counter()
            all_reduce(size)
            spans.append(time.perf_counter() - began)
        seconds.append(statistics.median(trial.share(typical(spans))))
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
