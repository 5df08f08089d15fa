"""Messages between workers that measure their links; see ``links``."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.training.communication.transport import Transport

FIRST_BYTES, LARGEST_BYTES = 16 << 10, 8 << 20
TURNS = 12
_PINGS = 3, 15
_ROW_BYTES = 1 << 20
_LONG_S = 0.01
_SLOWEST = 1e3
"""Bytes per second: below it a clock was wrong."""


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Messages between workers that measure."""

    transport: Transport
    tag: int

    @property
    def others(self) -> list[int]:
        """All workers but us."""
        return [peer for peer in range(self.transport.size) if peer != self.transport.rank]

    def meet(self) -> float:
        """Wait for all; how long the empty messages took."""
        began = time.perf_counter()
        self.transport.exchange(
            dict.fromkeys(self.others, b""),
            {peer: bytearray(0) for peer in self.others},
            tag=self.tag,
        )
        return time.perf_counter() - began

    def ping(self, peer: int, budget_s: float) -> float:
        """One way, of some there and back; who has the lower rank counts them."""
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
        """The rate from ``peer`` to us; then from us to it."""
        if self.transport.rank < peer:
            found = self._draw(peer, budget_s)
            self._pour(peer)
            return found
        self._pour(peer)
        return self._draw(peer, budget_s)

    def _draw(self, peer: int, budget_s: float) -> float:
        """Ask for ever larger messages until one takes a good while; the best of some of these counts."""
        into = bytearray(LARGEST_BYTES)

        def ask(size: int) -> float:
            began = time.perf_counter()
            self.transport.send(peer, size.to_bytes(8, "little"), tag=self.tag)
            self.transport.receive(peer, memoryview(into)[:size], tag=self.tag)
            return time.perf_counter() - began

        ask(1)  # the other one may have been late
        both_s = min(ask(1) for _ in range(3))
        begun = time.perf_counter()
        size = FIRST_BYTES
        spent_s = min(ask(size), ask(size))
        # However late it is: links let a little through at once, so a short message says nothing.
        while spent_s < _LONG_S and size < LARGEST_BYTES:
            size *= 2
            spent_s = min(ask(size), ask(size))
        while time.perf_counter() - begun + spent_s < budget_s:
            spent_s = min(spent_s, ask(size))
        self.transport.send(peer, bytes(8), tag=self.tag)
        # Even a single byte takes some time there and back.
        return max(size / max(spent_s - both_s, spent_s / 2), _SLOWEST)

    def _pour(self, peer: int) -> None:
        asked = bytearray(8)
        data = bytes(LARGEST_BYTES)
        while True:
            self.transport.receive(peer, asked, tag=self.tag)
            size = int.from_bytes(asked, "little")
            if not 0 < size <= LARGEST_BYTES:
                return
            self.transport.send(peer, memoryview(data)[:size], tag=self.tag)

    def time_exchange(
        self, outgoing: Mapping[int, int], incoming: Mapping[int, int], rounds: int
    ) -> float:
        """Seconds of an exchange of so many bytes with each, until all are through; all workers call this.

        All set out together, and the last one's time counts: to who comes late, what came before
        seems to take no time. Of several rounds the quickest was disturbed least.
        """
        sent = {peer: bytes(size) for peer, size in outgoing.items()}
        into = {peer: bytearray(size) for peer, size in incoming.items()}
        spans: list[float] = []
        for _ in range(rounds):
            self.meet()
            began = time.perf_counter()
            self.transport.exchange(sent, into, tag=self.tag)
            spans.append(time.perf_counter() - began)
        return min(map(max, zip(*self.share(spans), strict=True)))

    def share(self, value: Any) -> list[Any]:
        """What every worker says, by rank, the same on all."""
        data = json.dumps(value).encode()
        found = self.transport.gather(
            dict.fromkeys(self.others, data), self.others, limit_bytes=_ROW_BYTES, tag=self.tag
        )
        said = {**{peer: bytes(text) for peer, text in found.items()}, self.transport.rank: data}
        return [json.loads(said[rank]) for rank in range(self.transport.size)]

    def turns(self) -> tuple[float, float]:
        """A round in which each sends to the next, and what each message more takes in one with all."""
        size, rank = self.transport.size, self.transport.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        into = bytearray(1)

        def turn() -> float:
            began = time.perf_counter()
            self.transport.exchange({after: b"."}, {before: into}, tag=self.tag)
            return time.perf_counter() - began

        if size == 1:
            return 0.0, 0.0
        one = typical([turn() for _ in range(TURNS)])
        everyone = typical([self.meet() for _ in range(TURNS)])
        ones, alls = (sorted(each) for each in zip(*self.share([one, everyone]), strict=True))
        one, everyone = statistics.median(ones), statistics.median(alls)
        return one, max(everyone - one, 0.0) / max(size - 2, 1)


def typical(spans: Sequence[float]) -> float:
    """A quarter are shorter: what disturbs only ever adds, and one that is too short is rare."""
    return sorted(spans)[len(spans) // 4]
