"""Time of message rounds over measured links: latency, bandwidth, host limits. Pure.

The model of Hockney (1994), a latency and a rate for each message, with two limits more: what leaves a
host in a round shares its upload, and what enters it shares its download.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.planning.collectives import sent_share
from yunlu.planning.communication.rounds import SCHEDULES, direct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.planning.communication.measurements import CodecCost, WireFigures
    from yunlu.planning.communication.rounds import MessageRound

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
