"""The policy ``yunlu``: devices go where they bring jobs closest to their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.scheduler.policy.allocation_round import AllocationRound
from yunlu.scheduler.policy.fairness import FairnessRules
from yunlu.scheduler.policy.one_type import ONE_TYPE_PARAMS, OneTypeSizing
from yunlu.scheduler.policy.remaining_work import WorkHistory
from yunlu.scheduler.policy.several_types import (
    SEVERAL_TYPES_PARAMS,
    SeveralTypesParams,
    SeveralTypesSizing,
)
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from yunlu.scheduler.policy.allocation_round import Sizing
    from yunlu.scheduler.policy.urgency import PolicyParams
    from yunlu.scheduler.policy.values import Demand, PoolState


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """What can be set."""

    params: PolicyParams = ONE_TYPE_PARAMS
    """For pools with one device type."""
    several_types_params: SeveralTypesParams = SEVERAL_TYPES_PARAMS
    """For pools with several device types."""
    fairness: FairnessRules = field(default_factory=FairnessRules)
    learns_from_programs: bool = True
    """Whether the work of earlier jobs of a program predicts that of later ones."""


class Allocator:
    """Maximises the total value of progress over all jobs, for one or several device types."""

    name = "yunlu"

    def __init__(self, options: AllocatorOptions | None = None) -> None:
        """Starts without memory of earlier decisions."""
        self.options = options or AllocatorOptions()
        self._memory = _Memory()

    def decide(self, state: PoolState) -> Decision:
        """Who holds what from now on."""
        memory, fairness = self._memory, self.options.fairness
        memory.observe(state, self.options)
        if not state.jobs:
            return Decision(placements={})
        round_ = AllocationRound(
            state,
            sizing=self._choose_sizing(state),
            fairness=fairness,
            history=memory.history,
            waiting_since=memory.since,
            stopped_devices=memory.find_stopped(state, fairness.min_run_s),
            prices=memory.prices,
        )
        decision = round_.decide()
        memory.record(state, round_, decision)
        return decision

    def _choose_sizing(self, state: PoolState) -> Sizing:
        if len({node.type for node in state.nodes}) <= 1:
            return OneTypeSizing(self.options.params)
        return SeveralTypesSizing(self.options.several_types_params)


@dataclass(slots=True)
class _LastSeen:
    """A job as of the last decision."""

    program: str
    done: float
    device_goodput: float
    """Useful samples per second of one device."""
    goodput: float
    """With what it was given then."""
    at: float
    runs: bool
    devices: int
    """Devices it was given then, or held when it was last stopped."""


@dataclass(slots=True)
class _Memory:
    """What is remembered between decisions; if lost, the next decision is only a little worse."""

    history: WorkHistory = field(default_factory=WorkHistory)
    since: dict[str, float] = field(default_factory=dict[str, float])
    """Since when each job runs, or waits."""
    last: dict[str, _LastSeen] = field(default_factory=dict[str, _LastSeen])
    prices: NDArray[np.float64] | None = None
    """Of each group of devices, where there are several types."""

    def observe(self, state: PoolState, options: AllocatorOptions) -> None:
        """Learn from jobs that have left since the last decision, and note who waits."""
        present = {job.id for job in state.jobs}
        for job in [job for job in self.last if job not in present]:
            last = self.last.pop(job)
            # It ended somewhere between then and now.
            done = last.done + last.goodput * (state.now - last.at) / 2
            program = last.program if options.learns_from_programs else ""
            device_s = done / last.device_goodput if last.device_goodput > 0 else 0.0
            self.history.record(program, done, device_s)
        self.since = {job.id: self._find_since(job, state.now) for job in state.jobs}

    def find_stopped(self, state: PoolState, within_s: float) -> dict[str, int]:
        """Devices that each job held that was stopped less than so many seconds ago."""
        return {
            job.id: self.last[job.id].devices
            for job in state.jobs
            if not job.held and job.id in self.last and state.now - self.since[job.id] < within_s
        }

    def record(self, state: PoolState, round_: AllocationRound, decision: Decision) -> None:
        """Remember jobs as they are now."""
        self.prices = round_.prices
        device_goodputs = round_.table.device_goodputs.tolist()
        rates = round_.compute_rates().tolist()
        for job, device_goodput, rate in zip(state.jobs, device_goodputs, rates, strict=True):
            runs = job.id in decision.placements
            if runs != bool(job.held):
                self.since[job.id] = state.now
            devices = decision.placements[job.id].devices if runs else self._find_devices(job)
            self.last[job.id] = _LastSeen(
                job.program, job.done, device_goodput, rate, state.now, runs, devices
            )

    def _find_since(self, job: Demand, now: float) -> float:
        """Since when a job runs, if it does; else since it was submitted or stopped."""
        last = self.last.get(job.id)
        if last is not None and last.runs == bool(job.held):
            return self.since.get(job.id, last.at)
        if job.held:
            return now if job.held_since is None else job.held_since
        has_run = job.served_device_s > 0 or (last is not None and last.runs)
        return now if has_run else job.submitted_at

    def _find_devices(self, job: Demand) -> int:
        last = self.last.get(job.id)
        return job.held.devices if job.held or last is None else last.devices
