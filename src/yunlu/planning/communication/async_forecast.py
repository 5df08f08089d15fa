"""Forecast of asynchronous training: throughput of workers over parameter servers. Pure.

Each worker takes a ticket, pulls the weights, computes, and pushes its gradient; nobody waits for another
as long as the oldest ticket under way is not too old. All servers are on the first worker's host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.planning.communication.measurements import SharedWork, WireFigures
    from yunlu.planning.communication.step_forecast import MethodSetting

_VALUE_BYTES = 4
_WORDS = 4
"""Short messages of a ticket, there and back: assignment and completion."""
_UPDATE_PASSES = 5.0
"""Passes over memory, each as long as an addition: optimiser, log, and the copy that is sent."""
_MEMORY_BYTES_PER_S = 4e9
"""Memory bandwidth for weights and moments, which do not fit into the cache."""
_PULLED = {"none": 1.0, "bf16": 0.5}
"""Weights are not compressed below half."""


@dataclass(frozen=True, slots=True)
class AsyncForecast:
    """Predicted step of asynchronous workers."""

    step_s: float
    exchange_s: float
    """Of a typical ticket: pull, encode and push."""
    sent_bytes: float
    """Bytes that one worker sends for a ticket."""


def forecast_async(
    figures: WireFigures, work: SharedWork, setting: MethodSetting, *, staleness: int
) -> AsyncForecast:
    """Predict a step, which is as many tickets as there are workers.

    Args:
        figures: Links, and what a ticket takes each worker to compute.
        work: What travels.
        setting: How it is packed.
        staleness: How many steps after the oldest that is not over one may begin.
    """
    spans = figures.compute_s or (work.compute_s,) * figures.size
    values = work.bytes / _VALUE_BYTES
    cost = figures.codec(setting.codec)
    pushed = work.bytes if cost is None else values * cost.bytes_per_value
    pulled = work.bytes * _PULLED.get(setting.codec, 0.5)
    served_s = _UPDATE_PASSES * work.bytes / min(figures.add_bytes_per_s, _MEMORY_BYTES_PER_S)
    packed_s = 0.0
    if cost is not None:
        served_s += values * cost.decode_s_per_value + cost.call_s
        # A worker decodes what it encoded, to compute the residual.
        packed_s = values * (cost.encode_s_per_value + cost.decode_s_per_value) + 2 * cost.call_s
    hosts = [int(host) for host in figures.host_numbers]
    home = hosts[0]
    travels_s: list[float] = []
    for host in hosts:
        there, back = figures.bytes_per_s[host][home], figures.bytes_per_s[home][host]
        words_s = _WORDS * (figures.latency_s[host][home] + figures.latency_s[home][host]) / 2
        travels_s.append(pushed / there + pulled / back + words_s + packed_s + served_s)
    tickets_s = [span + travel_s for span, travel_s in zip(spans, travels_s, strict=True)]
    rates = [1 / max(span, 1e-9) for span in tickets_s]
    here = sum(rate for rate, host in zip(rates, hosts, strict=True) if host == home)
    # Traffic from other hosts shares the link of the servers' host.
    away = min(
        sum(rates) - here,
        figures.receive_bytes_per_s[home] / max(pushed, 1),
        figures.send_bytes_per_s[home] / max(pulled, 1),
    )
    # Serving uses CPU time of the workers on the servers' host.
    here *= max(1 - away * served_s, 0.0)
    oldest = (staleness + 1) * figures.size / max(*tickets_s, 1e-9)
    tickets_per_s = min(here + away, oldest, 1 / max(served_s, 1e-9))
    usual_s = sum(r * span for r, span in zip(rates, travels_s, strict=True)) / sum(rates)
    step_s = figures.size / tickets_per_s
    return AsyncForecast(step_s=step_s, exchange_s=min(usual_s, step_s), sent_bytes=pushed)
