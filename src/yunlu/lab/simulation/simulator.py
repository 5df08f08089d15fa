"""Replays a workload: time jumps from decision to decision, jobs train as measured.

The order of things is that of Pollux's own simulator (OSDI'21, section 5.3), so that its published
results can be reproduced to the second: jobs first train with what they hold, then the policy
decides, then those whose devices changed restart.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import NOTHING
from yunlu.lab.simulation.job import SimulatedJob
from yunlu.lab.simulation.job_observations import SharedObservations
from yunlu.lab.simulation.result import DecisionRecord, JobResult, SimulationResult
from yunlu.lab.simulation.rules import Faults, SimulationRules, draw_faults
from yunlu.lab.simulation.tables import SimulationError
from yunlu.scheduler.policy.values import PoolState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.hardware.fleet import Node, Placement
    from yunlu.lab.simulation.profiles import Profiles
    from yunlu.lab.simulation.workload import Workload
    from yunlu.scheduler.policy.observations import Estimator
    from yunlu.scheduler.policy.values import Demand, Policy

    Watch = Callable[[float, int], None]
    """Callback after each decision: the time, and how many jobs have ended."""

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
