"""Baseline policies: on-demand only, greedy, and Uniform Progress.

Rules of greedy and Uniform Progress after Wu et al., "Can't Be Late: Optimizing Spot Instance Savings
under Deadlines" (NSDI'24), sections 3.3, 3.4 and 5.2.2. Their safety net is meant for a policy that is
asked at every moment; asked once a tick, it has to hold back one tick more, or it is late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.scheduler.spot.values import Mode

if TYPE_CHECKING:
    from yunlu.scheduler.spot.values import DeadlineJob, SpotObservation


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
