"""When runs that wait will start, and when all will end, if things go on as they are. Pure."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from yunlu.pool.allocation.values import Decision, Demand, Placement, PoolState


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one run; infinite where its length or its speed is unknown."""

    start_at: float | None
    """None where it has started."""
    end_at: float
    samples_per_s: float


def forecast(
    state: PoolState, decision: Decision, unknown: AbstractSet[str] = frozenset()
) -> dict[str, Forecast]:
    """Each run as soon as as many devices are free as it needs, in the order of the queue.

    Args:
        state: As it was decided on.
        decision: Who holds what from now on.
        unknown: Runs of which nobody has seen a step: they are taken to last as long as others do.
    """
    type_ = state.nodes[0].type if state.nodes else ""
    types = {node.name: node.type for node in state.nodes}
    free = sum(node.devices for node in state.nodes)
    spans_s = [_span_s(job, _pace(job, job.held, types)) for job in state.jobs
               if job.held and job.id not in unknown]  # fmt: skip
    usual_s = median(spans_s) if spans_s else math.inf
    found: dict[str, Forecast] = {}
    ends: list[tuple[float, int]] = []
    for job in state.jobs:
        placement = decision.placements.get(job.id) or job.held
        if not placement:
            continue
        pace = _pace(job, placement, types)
        end_at = decision.predicted_end_at.get(job.id, state.now + _span_s(job, pace))
        end_at = state.now + usual_s if job.id in unknown else end_at
        found[job.id] = Forecast(
            start_at=None if job.held else state.now, end_at=end_at, samples_per_s=pace
        )
        heapq.heappush(ends, (end_at, placement.devices))
        free -= placement.devices
    waiting = [job for job in state.jobs if job.id not in found]
    at = state.now
    for job in sorted(waiting, key=lambda job: -job.priority):
        while free < job.min_devices and ends:
            ended_at, devices = heapq.heappop(ends)
            at, free = max(at, ended_at), free + devices
        if free < job.min_devices:  # more than there is
            found[job.id] = Forecast(start_at=math.inf, end_at=math.inf, samples_per_s=0.0)
            continue
        devices = max(job.min_devices, min(job.asked_devices, free))
        pace = _goodput(job, type_, 1, devices)
        end_at = at + (usual_s if job.id in unknown else _span_s(job, pace))
        found[job.id] = Forecast(start_at=at, end_at=end_at, samples_per_s=pace)
        heapq.heappush(ends, (end_at, devices))
        free -= devices
    return found


def _pace(job: Demand, placement: Placement, types: dict[str, str]) -> float:
    name = placement.shares[0][0]
    return _goodput(job, types.get(name, ""), placement.nodes, placement.devices)


def _goodput(job: Demand, type_: str, nodes: int, devices: int) -> float:
    found = job.speed.goodput(type_, np.array([nodes]), np.array([devices]))
    return float(found[0])


def _span_s(job: Demand, pace: float) -> float:
    return job.remaining / pace if job.remaining is not None and pace > 0 else math.inf
