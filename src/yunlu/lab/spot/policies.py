"""Policies to compare with: on-demand only, greedy, Uniform Progress, and the optimum in hindsight.

Baseline policies: on-demand only, greedy, and Uniform Progress.
Rules of greedy and Uniform Progress after Wu et al., "Can't Be Late: Optimizing Spot Instance Savings
under Deadlines" (NSDI'24), sections 3.3, 3.4 and 5.2.2. Their safety net is meant for a policy that is
asked at every moment; asked once a tick, it has to hold back one tick more, or it is late.

Least cost of a job with knowledge of the future: exact dynamic programming over a trace.
For comparison only. The same rules as ``replay``: ticks, starts that cost time, paid by the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.spot import HOUR_S, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.spot import DeadlineJob, SpotMarket, SpotObservation


@dataclass(slots=True)
class OnDemandOnly:
    """Never uses spot."""

    job: DeadlineJob
    name: str = "on-demand"

    def choose(self, observed: SpotObservation) -> Mode:
        """On-demand, always."""
        del observed
        return Mode.ON_DEMAND


@dataclass(slots=True)
class Greedy:
    """Spot whenever available; at the last moment, on-demand to the end."""

    job: DeadlineJob
    name: str = "greedy"
    is_caught: bool = field(default=False, init=False)

    def choose(self, observed: SpotObservation) -> Mode:
        """Spot or idle, until the safety net applies."""
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        self.is_caught = self.is_caught or is_caught(self.job, observed)
        if self.is_caught:
            return Mode.ON_DEMAND
        return Mode.SPOT if observed.is_spot_up else Mode.IDLE


@dataclass(slots=True)
class UniformProgress:
    """Keeps up with the straight line from no work at the start to all work at the deadline."""

    job: DeadlineJob
    name: str = "uniform progress"
    is_caught: bool = field(default=False, init=False)

    def choose(self, observed: SpotObservation) -> Mode:
        """Spot if available; on-demand when behind, until two restarts ahead."""
        if observed.mode is Mode.SPOT:
            return Mode.SPOT
        self.is_caught = self.is_caught or is_caught(self.job, observed)
        if self.is_caught:
            return Mode.ON_DEMAND
        if observed.mode is Mode.ON_DEMAND and self._lead_s(observed, 2 * self.job.restart_s) < 0:
            return Mode.ON_DEMAND
        if observed.is_spot_up:
            return Mode.SPOT
        return Mode.ON_DEMAND if self._lead_s(observed, 0.0) < 0 else Mode.IDLE

    def _lead_s(self, observed: SpotObservation, ahead_s: float) -> float:
        expected_s = (observed.elapsed_s + ahead_s) * self.job.work_s / self.job.deadline_s
        return self.job.work_s - observed.left_s - expected_s


def is_caught(job: DeadlineJob, observed: SpotObservation) -> bool:
    """The safety net of the paper, one tick early."""
    time_left_s = job.deadline_s - observed.elapsed_s
    return time_left_s < observed.left_s + 2 * job.restart_s + observed.step_s


_MOST_UNITS = 20_000


def find_optimum(job: DeadlineJob, market: SpotMarket, *, start: int = 0) -> float:
    """Dollars; infinity where even on-demand would be late, or the trace is too short.

    Exact where step, restart, work and deadline are whole multiples of a unit that leaves at most
    20,000 units of work; else work and restarts are rounded down, so it is a lower bound.
    """
    step_s = market.step_s
    unit_s = _choose_unit_s(job, step_s)
    step, restart = round(step_s / unit_s), int(job.restart_s / unit_s + 1e-9)
    work, deadline = int(job.work_s / unit_s + 1e-9), math.ceil(job.deadline_s / unit_s - 1e-9)
    ticks = math.ceil(deadline / step)
    if start + ticks > len(market):
        return math.inf
    search = _Search(step, restart, work)
    for tick in reversed(range(ticks)):
        length = min(step, deadline - tick * step)
        price = market.spot_dollars_per_hour[start + tick] if market.is_up[start + tick] else None
        search.step_back(
            length,
            None if price is None else float(price) * unit_s / HOUR_S,
            market.on_demand_dollars_per_hour * unit_s / HOUR_S,
        )
    return float(search.idle[work])


def _choose_unit_s(job: DeadlineJob, step_s: float) -> float:
    spans = [step_s, job.restart_s, job.work_s, job.deadline_s]
    if all(float(span).is_integer() for span in spans):
        unit_s = math.gcd(*(int(span) for span in spans))
        if job.work_s / unit_s <= _MOST_UNITS:
            return float(unit_s)
    parts = max(1, int(_MOST_UNITS * step_s / job.work_s))
    return step_s / parts


class _Search:
    """Least cost to go by units of work left, for each mode and rest of its start."""

    def __init__(self, step: int, restart: int, work: int) -> None:
        self.levels = [max(0, restart - step * passed) for passed in range(restart // step + 2)]
        """Possible rests of a start at a tick: all of it, one tick less, ..., nothing."""
        never = np.full(work + 1, math.inf)
        never[0] = 0.0
        self.left = np.arange(work + 1)
        self.idle: NDArray[np.float64] = never
        self.spot: Sequence[NDArray[np.float64]] = [never] * len(self.levels)
        self.on_demand: Sequence[NDArray[np.float64]] = [never] * len(self.levels)

    def step_back(self, length: int, spot_price: float | None, on_demand_price: float) -> None:
        """One tick earlier; prices per unit of time, None where spot is down."""
        on_demand = self._run(self.on_demand, length, on_demand_price)
        idle = np.minimum(self.idle, on_demand[0])
        if spot_price is None:
            self.on_demand = [np.minimum(value, self.idle) for value in on_demand]
            self.spot = [idle] * len(self.levels)
        else:
            spot = self._run(self.spot, length, spot_price)
            idle = np.minimum(idle, spot[0])
            self.on_demand = [np.minimum(value, idle) for value in on_demand]
            self.spot = [np.minimum(value, idle) for value in spot]
        self.idle = idle

    def _run(
        self, after: Sequence[NDArray[np.float64]], length: int, price: float
    ) -> list[NDArray[np.float64]]:
        """Run for one tick, for each state of its start."""
        values: list[NDArray[np.float64]] = []
        for index, starting in enumerate(self.levels):
            lost = min(length, starting)
            then = after[min(index + 1, len(self.levels) - 1)]
            worked = min(length - lost, len(then))
            value = np.empty_like(then)
            value[worked:] = price * length + then[: len(then) - worked]
            value[:worked] = price * (lost + self.left[:worked])
            value[0] = 0.0
            values.append(value)
        return values
