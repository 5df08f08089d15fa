"""Optimus (Peng et al., EuroSys'18): one device more to whom it saves the most time.

Everybody gets one device; then each further device goes to the job whose remaining time shrinks
most by it. Batches stay as asked.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from yunlu.scheduler.policy.baselines.packing import (
    Free,
    assign_types,
    explain,
    nodes_by_devices,
    place_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.scheduler.policy.values import Decision, Demand, PoolState


@runtime_checkable
class Stepped(Protocol):
    """A speed that also knows its steps, as a job of a fixed batch does."""

    @property
    def steps_left(self) -> float:
        """To the end of the job."""
        ...

    def step_s(self, device_type: str, nodes: int, devices: int) -> float | None:
        """Seconds of one; None where it cannot run."""
        ...


class Optimus:
    """Greedy by marginal gain."""

    name = "optimus"

    def decide(self, state: PoolState) -> Decision:
        """Deal devices out by what each saves."""
        sizes: dict[str, tuple[str, int]] = {}
        free = Free(state.nodes)
        for kind, jobs in assign_types(state).items():
            for name, count in _deal(state, kind, jobs, free.count(kind)).items():
                sizes[name] = (kind, count)
        order = sorted(state.jobs, key=lambda job: sizes.get(job.id, ("", 0))[1])
        return explain(state, place_sizes(state, sizes, order))


def _deal(state: PoolState, kind: str, jobs: list[Demand], left: int) -> dict[str, int]:
    given: dict[str, int] = {}
    gains: list[tuple[float, int]] = []
    savings = [_saving(state, kind, job) for job in jobs]
    for index, job in enumerate(jobs):
        least = job.held.devices if job.is_pinned and job.held else max(job.min_devices, 1)
        if least > left:
            continue
        given[job.id] = least
        left -= least
        if left > 0 and not job.is_pinned:
            gains.append((-savings[index](least), index))
    heapq.heapify(gains)
    while left > 0 and gains and gains[0][0] < 0:
        _, index = gains[0]
        job = jobs[index]
        given[job.id] += 1
        left -= 1
        heapq.heapreplace(gains, (-savings[index](given[job.id]), index))
    return given


def _saving(state: PoolState, kind: str, job: Demand) -> Callable[[int], float]:
    """How much of its remaining time one more device than so many saves."""
    speed = job.speed
    nodes = nodes_by_devices(state, kind)
    most = min(job.max_devices, len(nodes) - 1)
    if isinstance(speed, Stepped):
        left = speed.steps_left

        def save_steps(devices: int) -> float:
            if devices >= most:
                return 0.0
            now = speed.step_s(kind, nodes[devices], devices)
            then = speed.step_s(kind, nodes[devices + 1], devices + 1)
            return 0.0 if now is None or then is None else (now - then) * left

        return save_steps

    def save(devices: int) -> float:
        if devices >= most:
            return 0.0
        counts = np.array([devices, devices + 1])
        spread = np.array(nodes[devices : devices + 2])
        now, then = (float(rate) for rate in speed.goodput(kind, spread, counts))
        if then <= 0:
            return 0.0
        # Where nobody knows how long it is, every job is as long as any other.
        left = 1.0 if job.remaining is None else job.remaining
        return left / now - left / then if now > 0 else math.inf

    return save
