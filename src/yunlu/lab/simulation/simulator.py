"""Replays a workload: time jumps from decision to decision, jobs train as measured.

The order of things is that of Pollux's own simulator (OSDI'21, section 5.3), so that its published
results can be reproduced to the second: jobs first train with what they hold, then the policy
decides, then those whose devices changed restart.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.hardware.fleet import NOTHING
from yunlu.lab.simulation.job import SharedObservations, SimulatedJob
from yunlu.lab.simulation.profiles import SimulationError
from yunlu.scheduler.policy.values import PoolState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.hardware.fleet import Node, Placement
    from yunlu.lab.simulation.profiles import Profiles, Workload
    from yunlu.scheduler.policy.goodput import Estimator
    from yunlu.scheduler.policy.values import Demand, Policy

    Watch = Callable[[float, int], None]
    "Callback after each decision: the time, and how many jobs have ended."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRules:
    """Timing rules. The defaults are those of Pollux's own simulator."""

    interval_s: float = 60
    """A decision is made this often."""
    is_event_driven: bool = False
    """Decide also whenever a job comes or ends."""
    restart_s: float = 30
    """A job whose devices change holds the new ones this long without progress."""
    restart_s_by_application: Mapping[str, float] = field(default_factory=dict[str, float])
    slowdown_by_application: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor on step times: the measured system against the profiled one."""
    restarts_on_move: bool = True
    """Whether a move to other nodes of the same type and shape is a restart too."""
    declares_length: bool = True
    """Whether policies know the remaining length of a job."""
    is_shared: bool = False
    """Whether jobs of one application share timings and noise."""
    limit_s: float = 120 * 86400
    """The simulation fails if a policy has not ended all jobs by then."""
    idle_limit_s: float = 86400
    """The simulation fails if a policy gives out nothing for this long while jobs wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Random faults; the same for the same seed."""

    seed: int = 0
    length_error: float = 1.0
    """Declared lengths are wrong by a factor between 1/this and this, log-uniform."""
    crash_share: float = 0.0
    """Share of jobs that crash once, at a random point."""
    retry_s: float = 30.0
    """Seconds before a crashed job is queued again."""
    checkpoint_s: float = 300.0
    """A crash loses what was trained since the last checkpoint, made this often."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of step times, drawn anew with each measurement."""
    interference: float = 0.0
    """Share of its speed that a job on several nodes loses where it meets another such job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFaults:
    """Faults of one job."""

    declared_factor: float = 1.0
    crashes_at: float = math.inf
    """Share of its progress at which it crashes."""
    noise_seed: tuple[int, int] = (0, 0)


def draw_faults(faults: Faults, count: int) -> Sequence[JobFaults]:
    """Faults of each job, in the order of the workload; each kind has its own random stream."""
    lengths, crashes = (np.random.default_rng((faults.seed, kind)) for kind in range(2))
    spread = math.log(faults.length_error)
    factors = np.exp(lengths.uniform(-spread, spread, count)) if spread > 0 else np.ones(count)
    crash = crashes.uniform(size=count) < faults.crash_share
    places = crashes.uniform(size=count)
    return [
        JobFaults(
            declared_factor=float(factors[item]),
            crashes_at=float(places[item]) if crash[item] else math.inf,
            noise_seed=(faults.seed, 2 + item),
        )
        for item in range(count)
    ]


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


_SOUND = Faults()


def simulate(
    workload: Workload,
    profiles: Profiles,
    nodes: Sequence[Node],
    policy: Policy,
    *,
    rules: SimulationRules | None = None,
    estimator: Estimator | None = None,
    faults: Faults = _SOUND,
    watch: Watch | None = None,
) -> SimulationResult:
    """Replay a workload to its end.

    Args:
        workload: Which jobs come when.
        profiles: How they train.
        nodes: What they train on.
        policy: Who decides; must be new, where it keeps notes.
        rules: How often it decides, what a restart costs.
        estimator: What makes a speed of what was seen of a job, and chooses its batch. Without one,
            jobs keep the batch they ask for, and policies see their true speed at it.
        faults: What goes wrong.
        watch: Called after each decision.
    """
    run = _Run(
        workload,
        profiles,
        tuple(nodes),
        policy,
        rules=rules or SimulationRules(),
        estimator=estimator,
        faults=faults,
    )
    while run.is_open:
        run.advance()
        run.decide()
        if watch is not None:
            watch(run.now, run.ended)
    return run.outcome()


class _Run:
    def __init__(
        self,
        workload: Workload,
        profiles: Profiles,
        nodes: tuple[Node, ...],
        policy: Policy,
        *,
        rules: SimulationRules,
        estimator: Estimator | None,
        faults: Faults,
    ) -> None:
        self.now: float = 0
        self.ended = 0
        self._workload, self._policy, self._rules, self._faults = workload, policy, rules, faults
        self._nodes = {node.name: node for node in nodes}
        self._rounds: list[DecisionRecord] = []
        shared_by_application: dict[str, SharedObservations] = {}
        sizes = {node.type: node.devices for node in nodes}
        job_faults = draw_faults(faults, len(workload.jobs))
        self._jobs = [
            SimulatedJob(
                submission,
                profiles.find(submission.application),
                rules=rules,
                faults=faults,
                job_faults=job_faults,
                estimator=estimator,
                shared=shared_by_application.setdefault(
                    submission.application, SharedObservations()
                )
                if rules.is_shared
                else None,
                devices_per_node=sizes,
            )
            for submission, job_faults in zip(workload.jobs, job_faults, strict=True)
        ]
        for job in self._jobs:
            for times in job.application.times.values():
                times.prepare()
        self._waiting = list(reversed(self._jobs))
        """Not yet submitted, the next one last."""
        self._active: dict[str, SimulatedJob] = {}
        self._next_round: float = rules.interval_s
        self._idle_since: float = 0
        """When a job last held a device, or none waited for one."""

    @property
    def is_open(self) -> bool:
        return self.ended < len(self._jobs)

    def advance(self) -> None:
        """Advance time to the next decision."""
        while not self._pass(self._next_moment()):
            pass
        if self.now > self._rules.limit_s:
            stuck = ", ".join(list(self._active)[:5])
            raise SimulationError(
                f"{self._policy.name} has not ended {len(self._jobs) - self.ended} jobs "
                f"after {self.now / 86400:.0f} days: {stuck}."
            )
        if self._active and self.now - self._idle_since > self._rules.idle_limit_s:
            job = next(iter(self._active.values())).submission
            raise SimulationError(
                f"{self._policy.name} gives no job a device, although {len(self._active)} jobs wait: "
                f"{job.name} asks for {job.asked_devices} of "
                f"{sum(node.devices for node in self._nodes.values())}.",
                hint="give the cluster more devices, or leave out the jobs that never fit",
            )

    def _pass(self, then: float) -> bool:
        """Advance time to a moment; returns whether there is something to decide then."""
        span = then - self.now
        crowded = self._find_crowded() if self._faults.interference else ()
        for job in self._active.values():
            slowed = self._faults.interference if job.name in crowded else 0.0
            job.advance(self.now, span, slowed)
        self.now = then
        is_round = then >= self._next_round
        while self._next_round <= then:
            self._next_round += self._rules.interval_s
        comes = self._waiting and self._waiting[-1].submission.submitted_at <= then
        return is_round or bool(comes) or any(job.ended_at for job in self._active.values())

    def decide(self) -> None:
        """Call the policy, and apply its decision."""
        self._update_active()
        asking = [
            job for job in self._active.values() if job.retry_at is None or job.retry_at <= self.now
        ]
        if not asking:
            self._record(0.0)
            return
        demands = tuple(job.demand() for job in asking)
        state = PoolState(now=self.now, nodes=tuple(self._nodes.values()), jobs=demands)
        started = time.process_time()
        placements = self._policy.decide(state).placements
        took_s = time.process_time() - started
        self._check(demands, placements)
        # Releases come first: a device is never held twice.
        for job in asking:
            placement = placements.get(job.name, NOTHING)
            job.retry_at = None
            job.place(placement, self._type_of(placement), self.now)
        self._record(took_s)

    def outcome(self) -> SimulationResult:
        """Results of all jobs."""
        jobs = tuple(
            JobResult(
                name=job.name,
                application=job.application.name,
                submitted_at=job.submission.submitted_at,
                ended_at=job.ended_at if job.ended_at is not None else math.inf,
                restarts=job.restarts,
                device_s=job.served_device_s,
                placements=(*job.history, (job.ended_at or math.inf, NOTHING)),
                crashes=job.crashes,
            )
            for job in self._jobs
        )
        return SimulationResult(
            workload=self._workload.name,
            policy=self._policy.name,
            nodes=tuple(self._nodes.values()),
            jobs=jobs,
            rounds=tuple(self._rounds),
        )

    def _next_moment(self) -> float:
        """The next round; an event before it where those count; or the first round with a job."""
        if not self._active:
            # Nothing changes before the next job comes.
            at = self._waiting[-1].submission.submitted_at
            if self._rules.is_event_driven:
                return max(at, self.now)
            missed = math.ceil((at - self._next_round) / self._rules.interval_s)
            self._next_round += max(missed, 0) * self._rules.interval_s
            return self._next_round
        if not self._rules.is_event_driven:
            return self._next_round
        span = self._next_round - self.now
        events = [job.next_event_s(span) for job in self._active.values()]
        then = self.now + min(*events, span)
        if self._waiting:
            then = min(then, max(self._waiting[-1].submission.submitted_at, self.now))
        return then

    def _update_active(self) -> None:
        for job in [job for job in self._active.values() if job.ended_at is not None]:
            del self._active[job.name]
            self.ended += 1
        while self._waiting and self._waiting[-1].submission.submitted_at <= self.now:
            job = self._waiting.pop()
            self._active[job.name] = job

    def _find_crowded(self) -> set[str]:
        """Jobs on several nodes that share a node with another such job."""
        spread = [job for job in self._active.values() if job.placement.nodes > 1]
        meetings = Counter(name for job in spread for name, _ in job.placement.shares)
        return {
            job.name
            for job in spread
            if any(meetings[name] > 1 for name, _ in job.placement.shares)
        }

    def _check(self, demands: Sequence[Demand], placements: Mapping[str, Placement]) -> None:
        """A policy that gives out more than there is has a bug."""
        known = {demand.id: demand for demand in demands}
        used: Counter[str] = Counter()
        for name, placement in placements.items():
            if name not in known:
                raise SimulationError(
                    f"{self._policy.name} placed {name}, which asked for nothing."
                )
            for node, count in placement.shares:
                used[node] += count
            kinds = {self._nodes[node].type for node, _ in placement.shares if node in self._nodes}
            if len(kinds) > 1 or not kinds <= (known[name].types or kinds):
                raise SimulationError(
                    f"{self._policy.name} put {name} on devices of {', '.join(sorted(kinds))}, "
                    "where it cannot run."
                )
            if placement.devices > known[name].max_devices:
                raise SimulationError(
                    f"{self._policy.name} gave {name} {placement.devices} devices, "
                    f"more than its {known[name].max_devices}."
                )
        for name, count in used.items():
            if name not in self._nodes or count > self._nodes[name].devices:
                raise SimulationError(
                    f"{self._policy.name} gave away {count} devices of {name} at {self.now:.0f} s, "
                    f"which has {self._nodes[name].devices if name in self._nodes else 0}."
                )

    def _type_of(self, placement: Placement) -> str:
        return self._nodes[placement.shares[0][0]].type if placement else ""

    def _record(self, took_s: float) -> None:
        devices = [job.placement.devices for job in self._active.values()]
        if any(devices) or not devices:
            self._idle_since = self.now
        running = sum(count > 0 for count in devices)
        self._rounds.append(
            DecisionRecord(
                at=self.now,
                waiting=len(devices) - running,
                running=running,
                devices=sum(devices),
                decision_cpu_s=took_s,
            )
        )
