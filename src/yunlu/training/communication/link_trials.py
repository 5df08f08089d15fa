"""Messages that measure links between workers; see ``links``."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.json_decode import decode_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.training.communication.transport import Transport

FIRST_BYTES, LARGEST_BYTES = 16 << 10, 8 << 20
MAX_MESSAGES = 12
_PINGS = 3, 15
_ROW_BYTES = 1 << 20
_LONG_S = 0.01
_SLOWEST = 1e3
"""Bytes per second; below it the clock must be wrong."""


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Measuring messages on a transport."""

    transport: Transport
    tag: int

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
            tag=self.tag,
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
                self.transport.send(peer, bytes([go_on]), tag=self.tag)
                self.transport.receive(peer, answer, tag=self.tag)
                spans.append((time.perf_counter() - began) / 2)
            else:
                self.transport.receive(peer, answer, tag=self.tag)
                go_on = bool(answer[0])
                self.transport.send(peer, answer, tag=self.tag)
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
            self.transport.send(peer, size.to_bytes(8, "little"), tag=self.tag)
            self.transport.receive(peer, memoryview(into)[:size], tag=self.tag)
            return time.perf_counter() - began

        request(1)  # the peer may have started late
        both_s = min(request(1) for _ in range(3))
        begun = time.perf_counter()
        size = FIRST_BYTES
        spent_s = min(request(size), request(size))
        # Even if over budget: a short message passes as a burst and shows no rate.
        while spent_s < _LONG_S and size < LARGEST_BYTES:
            size *= 2
            spent_s = min(request(size), request(size))
        while time.perf_counter() - begun + spent_s < budget_s:
            spent_s = min(spent_s, request(size))
        self.transport.send(peer, bytes(8), tag=self.tag)
        # Even a single byte takes a round trip.
        return max(size / max(spent_s - both_s, spent_s / 2), _SLOWEST)

    def _send_stream(self, peer: int) -> None:
        header = bytearray(8)
        data = bytes(LARGEST_BYTES)
        while True:
            self.transport.receive(peer, header, tag=self.tag)
            size = int.from_bytes(header, "little")
            if not 0 < size <= LARGEST_BYTES:
                return
            self.transport.send(peer, memoryview(data)[:size], tag=self.tag)

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
            self.transport.exchange(sent, into, tag=self.tag)
            spans.append(time.perf_counter() - began)
        return min(map(max, zip(*self.share(spans), strict=True)))

    def share(self, value: Any) -> list[Any]:
        """Gather a JSON value of every worker, by rank."""
        data = json.dumps(value).encode()
        rate = self.transport.gather(
            dict.fromkeys(self.others, data), self.others, limit_bytes=_ROW_BYTES, tag=self.tag
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
            self.transport.exchange({after: b"."}, {before: into}, tag=self.tag)
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
