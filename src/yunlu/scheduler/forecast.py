"""Queue forecast: predicted starts and ends of runs under the current policy. Pure."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from yunlu.hardware.fleet import Placement
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState
    from yunlu.scheduler.scaling import PendingNode


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueForecast:
    """Of one run; infinite where its length or its speed is unknown."""

    start_at: float | None
    """None where it has started."""
    end_at: float
    samples_per_s: float


def forecast(
    state: PoolState,
    decision: Decision,
    unknown: AbstractSet[str] = frozenset(),
    pending_nodes: Sequence[PendingNode] = (),
) -> dict[str, QueueForecast]:
    """Start each run as soon as enough devices are free, in the order of the queue.

    Args:
        state: As it was decided on.
        decision: Who holds what from now on.
        unknown: Runs of which nobody has seen a step: they are taken to last as long as others do.
        pending_nodes: Nodes that were requested and are not there yet.
    """
    types = {node.name: node.type for node in state.nodes}
    late = {
        pending_node.node: pending_node.at
        for pending_node in pending_nodes
        if pending_node.node in types
    }
    spans_s = [_span_s(job, _pace(job, job.held, types)) for job in state.jobs
               if job.held and job.id not in unknown]  # fmt: skip
    usual_s = median(spans_s) if spans_s else math.inf
    supply = _Supply.of(state, pending_nodes)
    result: dict[str, QueueForecast] = {}
    for job in state.jobs:
        placement = decision.placements.get(job.id) or job.held
        if not placement:
            continue
        pace = _pace(job, placement, types)
        wait_s = _wait_s(placement, late, state.now)
        end_at = decision.predicted_end_at.get(job.id, state.now + _span_s(job, pace))
        end_at = (state.now + usual_s if job.id in unknown else end_at) + wait_s
        has_started = bool(job.held) and not wait_s
        result[job.id] = QueueForecast(
            start_at=None if has_started else state.now + wait_s,
            end_at=end_at,
            samples_per_s=pace,
        )
        supply.take(placement.shares)
        supply.give_back(end_at, placement.devices)
    type_ = next((item.type for item in (*state.nodes, *pending_nodes)), "")
    waiting = [job for job in state.jobs if job.id not in result]
    for job in sorted(waiting, key=lambda job: -job.priority):
        at = supply.wait_for(job.min_devices)
        if math.isinf(at):  # more than the pool has, or unknown
            result[job.id] = QueueForecast(start_at=math.inf, end_at=math.inf, samples_per_s=0.0)
            continue
        devices = max(job.min_devices, min(job.asked_devices, supply.free))
        pace = _goodput(job, type_, 1, devices)
        end_at = at + (usual_s if job.id in unknown else _span_s(job, pace))
        result[job.id] = QueueForecast(start_at=at, end_at=end_at, samples_per_s=pace)
        supply.free -= devices
        supply.give_back(end_at, devices)
    return result


def with_start(
    figures: Mapping[str, object], queue_forecast: QueueForecast | None
) -> dict[str, object]:
    """Figures of a policy with the predicted start: a policy does not know about pending nodes."""
    if queue_forecast is None or queue_forecast.start_at is None:
        return dict(figures)
    rest = {name: value for name, value in figures.items() if name != "starts_at"}
    return rest | (
        {"starts_at": queue_forecast.start_at} if math.isfinite(queue_forecast.start_at) else {}
    )


@dataclass(slots=True, kw_only=True)
class _Supply:
    """Free devices, and devices that become free when runs end and pending nodes arrive."""

    at: float
    free: int
    late: dict[str, int]
    """Devices on pending nodes that no run is placed on."""
    later: list[tuple[float, str, int]]
    """Arrival time, node and number of devices that arrive late."""

    @classmethod
    def of(cls, state: PoolState, pending_nodes: Sequence[PendingNode]) -> _Supply:
        devices = {node.name: node.devices for node in state.nodes}
        late = {
            pending_node.node: devices[pending_node.node]
            for pending_node in pending_nodes
            if pending_node.node in devices
        }
        later = [
            (pending_node.at, pending_node.node, 0)
            if pending_node.node in late
            else (pending_node.at, "", pending_node.devices)
            for pending_node in pending_nodes
        ]
        heapq.heapify(later)
        free = sum(count for name, count in devices.items() if name not in late)
        return cls(at=state.now, free=free, late=late, later=later)

    def take(self, shares: Sequence[tuple[str, int]]) -> None:
        for name, count in shares:
            if name in self.late:
                self.late[name] -= count
            else:
                self.free -= count

    def give_back(self, at: float, devices: int) -> None:
        heapq.heappush(self.later, (at, "", devices))

    def wait_for(self, devices: int) -> float:
        """When so many devices are free; infinite if unknown: other runs do not wait for that."""
        predicted = sum(count + self.late.get(node, 0)
                       for at, node, count in self.later if at < math.inf)  # fmt: skip
        if self.free + predicted < devices:
            return math.inf
        while self.free < devices:
            at, node, count = heapq.heappop(self.later)
            self.at, self.free = max(self.at, at), self.free + count + self.late.pop(node, 0)
        return self.at


def _wait_s(placement: Placement, late: Mapping[str, float], now: float) -> float:
    """Seconds until its coordinator's node is there; it trains while it waits for the others."""
    return max(0.0, late.get(placement.shares[0][0], now) - now)


def _pace(job: Demand, placement: Placement, types: dict[str, str]) -> float:
    name = placement.shares[0][0]
    return _goodput(job, types.get(name, ""), placement.nodes, placement.devices)


def _goodput(job: Demand, type_: str, nodes: int, devices: int) -> float:
    result = job.speed.goodput(type_, np.array([nodes]), np.array([devices]))
    return float(result[0])


def _span_s(job: Demand, pace: float) -> float:
    return job.remaining / pace if job.remaining is not None and pace > 0 else math.inf
