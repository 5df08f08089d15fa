"""The same queue in the simulator, with step times as the live jobs showed them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pool_parts.queue import BATCH
from yunlu.hardware.fleet import Node
from yunlu.lab.simulate_command import make_policy
from yunlu.lab.simulation import simulator
from yunlu.lab.simulation.job import SimulatedJob
from yunlu.lab.simulation.profiles import (
    Application,
    Profiles,
    StepTimes,
    Submission,
    TrainingCurve,
    Workload,
)
from yunlu.lab.simulation.simulator import SimulationRules, simulate
from yunlu.scheduler.policy.fitting import fit_throughput
from yunlu.scheduler.policy.goodput import BatchLimits, GradientNoise, StepTiming

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from benchmarks.pool_parts.live import JobRecord
    from benchmarks.pool_parts.queue import Arrival
    from yunlu.hardware.fleet import Placement

_NODE = "here"
_TYPE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePrediction:
    """What the simulator says of a queue."""

    average_s: float
    makespan_s: float
    restarts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the live jobs of one kind showed."""

    step_s: dict[int, float]
    """By number of devices, a whole step."""
    overhead_s: float
    """What a job takes besides its steps: to start, and to evaluate and export at its end."""


def measure(records: Sequence[JobRecord], *, devices: int) -> dict[str, Measured]:
    """Each kind from all jobs of it; sizes that nobody had are told by the fitted model."""
    found: dict[str, Measured] = {}
    for name in {job.kind for job in records}:
        jobs = [job for job in records if job.kind == name]
        step_s = _step_times(jobs, devices)
        calm = [job for job in jobs if job.attempts == 1]
        overheads = [job.ended_at - job.started_at - job.trained_s - sum(job.resize_s)
                     for job in calm or jobs]  # fmt: skip
        found[name] = Measured(step_s=step_s, overhead_s=max(0.0, median(overheads)))
    return found


def predict_queue(
    queue: Sequence[Arrival],
    measured: dict[str, Measured],
    *,
    policy: str,
    devices: int,
    round_s: float,
    resize_s: float,
) -> QueuePrediction:
    """Run the queue in the simulator under the same policy."""
    kinds = {arrival.kind.name: arrival.kind for arrival in queue}
    applications = {
        name: _application(name, kind.steps, kind.most, measured[name])
        for name, kind in kinds.items()
    }
    jobs = tuple(
        Submission(
            name=arrival.name,
            submitted_at=arrival.at_s,
            application=arrival.kind.name,
            asked_devices=arrival.kind.asked,
            asked_batch=BATCH,
        )
        for arrival in queue
    )
    contestant = make_policy(policy)
    rules = SimulationRules(interval_s=round_s, is_event_driven=True, restart_s=resize_s)
    with _slow_starts({name: each.overhead_s for name, each in measured.items()}):
        outcome = simulate(
            Workload("live", jobs),
            Profiles(applications),
            [Node(name=_NODE, devices=devices, type=_TYPE)],
            contestant.policy,
            rules=contestant.adapt_rules(rules),
            estimator=contestant.estimator,
        )
    return QueuePrediction(
        average_s=outcome.average_s,
        makespan_s=outcome.makespan_s,
        restarts=sum(job.restarts for job in outcome.jobs),
    )


@contextmanager
def _slow_starts(overheads_s: dict[str, float]) -> Generator[None]:
    """A first start takes long here (imports, data), a live resize does not; published rules know one."""

    class SlowStarter(SimulatedJob):
        def place(self, placement: Placement, device_type: str, now: float) -> None:
            had_none = not self.placement
            super().place(placement, device_type, now)
            if had_none and placement:
                self._restart_left_s = overheads_s[self.application.name]

    simulator.SimulatedJob = SlowStarter
    try:
        yield
    finally:
        simulator.SimulatedJob = SimulatedJob


def _step_times(jobs: Sequence[JobRecord], devices: int) -> dict[int, float]:
    whole: dict[int, list[float]] = {}
    timings: list[StepTiming] = []
    for job in jobs:
        for seen in job.seen:
            passes = -(-BATCH // seen.devices // seen.local_batch)
            whole_s = seen.step_s + (passes - 1) * seen.accumulate_s
            whole.setdefault(seen.devices, []).append(whole_s)
            # One pass over all of a device's samples: what is fitted is told in the same terms.
            local = -(-BATCH // seen.devices)
            timings.append(
                StepTiming(_TYPE, 1, seen.devices, local, passes * seen.accumulate_s, whole_s)
            )
    known = {count: median(times) for count, times in whole.items()}
    if len(known) == devices:
        return known
    model = fit_throughput(timings)
    for count in range(1, devices + 1):
        if count not in known:
            local = np.array([-(-BATCH // count)], dtype=np.float64)
            told = model.predict_step_s(np.array([1]), np.array([count]), local, np.zeros(1))
            known[count] = float(told[0])
    return known


def _application(name: str, steps: int, most: int, measured: Measured) -> Application:
    curves = {
        (count,): [(-(-BATCH // count), (step_s, 0.0))] for count, step_s in measured.step_s.items()
    }
    training = TrainingCurve((float(steps),), (float(steps),), (GradientNoise(1.0, 1.0),))
    limits = BatchLimits(base=BATCH, most=BATCH, local_least=1, local_most=BATCH, fixed=BATCH)
    return Application(
        name,
        {_TYPE: StepTimes(name, curves, [])},
        {BATCH: training},
        1,
        limits,
        most,
        (0.0, float(steps)),
    )
