"""Result of a workload under a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Node, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of one job."""

    name: str
    application: str
    submitted_at: float
    ended_at: float
    restarts: int
    device_s: float
    placements: tuple[tuple[float, Placement], ...]
    """Placements over time; none after its end."""
    crashes: int = 0

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.ended_at - self.submitted_at

    @property
    def wait_s(self) -> float:
        """Seconds until it first held devices."""
        return self.placements[0][0] - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision."""

    at: float
    waiting: int
    """Jobs that hold nothing after it."""
    running: int
    devices: int
    """Held after it."""
    decision_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Results of all jobs."""

    workload: str
    policy: str
    nodes: tuple[Node, ...]
    jobs: tuple[JobResult, ...]
    rounds: tuple[DecisionRecord, ...]

    @property
    def jct_s(self) -> dict[str, float]:
        """By job name."""
        return {job.name: job.jct_s for job in self.jobs}

    @property
    def average_s(self) -> float:
        """Mean completion time."""
        return sum(job.jct_s for job in self.jobs) / len(self.jobs)

    @property
    def makespan_s(self) -> float:
        """End of the last job, from the workload's zero."""
        return max(job.ended_at for job in self.jobs)

    @property
    def restarts_per_job(self) -> float:
        """On average."""
        return sum(job.restarts for job in self.jobs) / len(self.jobs)

    @property
    def device_hours(self) -> float:
        """Device-hours held, restarts included."""
        return sum(job.device_s for job in self.jobs) / 3600

    @property
    def dollars(self) -> float:
        """Cost of the nodes until the last job ended, idle or not."""
        return sum(node.dollars_per_hour for node in self.nodes) * self.makespan_s / 3600

    @property
    def decision_cpu_s(self) -> float:
        """Mean CPU time of one round."""
        return sum(one_round.decision_cpu_s for one_round in self.rounds) / max(len(self.rounds), 1)

    def percentile_s(self, percent: float) -> float:
        """Percentile of completion times."""
        return float(np.percentile([job.jct_s for job in self.jobs], percent))

    def summary(self) -> dict[str, Any]:
        """The figures for programs."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "jobs": len(self.jobs),
            "jct_average_s": self.average_s,
            "jct_p50_s": self.percentile_s(50),
            "jct_p99_s": self.percentile_s(99),
            "makespan_s": self.makespan_s,
            "restarts_per_job": self.restarts_per_job,
            "device_hours": self.device_hours,
            "waiting_average": self._mean_over_time("waiting"),
            "utilisation": self._utilisation(),
            "dollars": self.dollars,
            "rounds": len(self.rounds),
            "decision_cpu_s": self.decision_cpu_s,
        }

    def _utilisation(self) -> float:
        total = sum(node.devices for node in self.nodes)
        return self.device_hours * 3600 / (total * self.makespan_s)

    def _mean_over_time(self, field: str) -> float:
        spans = [
            (later.at - item.at, getattr(item, field))
            for item, later in zip(self.rounds, self.rounds[1:], strict=False)
        ]
        whole = sum(span for span, _ in spans)
        return sum(span * value for span, value in spans) / whole if whole else 0.0
