"""The policy ``yunlu``: devices go where they bring the most progress towards finished jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from yunlu.scheduler.policy.fairness import FairnessRules
from yunlu.scheduler.policy.mixed import MixedRound
from yunlu.scheduler.policy.mixed_worth import SEVERAL_TYPES_PARAMS, SeveralTypesParams
from yunlu.scheduler.policy.remaining_work import WorkHistory
from yunlu.scheduler.policy.uniform import UniformRound
from yunlu.scheduler.policy.urgency import PolicyParams
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from yunlu.scheduler.policy.values import Demand, PoolState


DEFAULT_PARAMS = PolicyParams(guard=0.3, crowd=0.25, late_company=3.0, growth=2.5)
"""Numbers chosen on one public workload (Pollux's sixth, as it is and with its jobs shuffled)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """What can be set."""

    taste: PolicyParams = DEFAULT_PARAMS
    """For pools with one type of device."""
    mixed_taste: SeveralTypesParams = SEVERAL_TYPES_PARAMS
    """For pools with several."""
    manners: FairnessRules = field(default_factory=FairnessRules)
    learns_from_programs: bool = True
    """Whether what a program took before tells how long it will take again."""


class Allocator:
    """Maximises the sum over jobs of what their speed is worth, exactly, in every decision."""

    name = "yunlu"

    def __init__(self, options: AllocatorOptions | None = None) -> None:
        """Starts without notes."""
        self.options = options or AllocatorOptions()
        self._notes = _Notes()

    def decide(self, state: PoolState) -> Decision:
        """Who holds what from now on."""
        notes = self._notes
        notes.read(state, self.options)
        if not state.jobs:
            return Decision(placements={})
        round_ = self._weigh(state)
        decision = round_.decide()
        notes.write(state, round_, decision)
        return decision

    def _weigh(self, state: PoolState) -> UniformRound | MixedRound:
        manners, notes = self.options.manners, self._notes
        if len({node.type for node in state.nodes}) <= 1:
            return UniformRound(
                state,
                taste=_settle(self.options.taste, state),
                manners=manners,
                lengths=notes.lengths,
                waiting_since=notes.since,
                stopped_at_devices=notes.tell_stopped(state, manners.turn_s),
            )
        return MixedRound(
            state,
            taste=self.options.mixed_taste,
            manners=manners,
            lengths=notes.lengths,
            waiting_since=notes.since,
            prices=notes.prices,
        )


_EVENING_S = 3600.0


def _settle(taste: PolicyParams, state: PoolState) -> PolicyParams:
    """What is given lasts the longer, the longer nobody new has come; then the end of all counts."""
    quiet_s = max(state.now - max(job.submitted_at for job in state.jobs), 0.0)
    share = min(quiet_s / _EVENING_S, 1.0)
    company = taste.company + taste.crowd * len(state.jobs)
    return replace(
        taste,
        dwell_s=max(taste.dwell_s, min(taste.calm * quiet_s, taste.calmest_s)),
        refill=taste.refill + (taste.late_refill - taste.refill) * share,
        company=company + (taste.late_company - company) * share,
    )


@dataclass(slots=True)
class _Last:
    """What a job was like when it was last seen."""

    program: str
    done: float
    slowest: float
    """Useful samples a second of one device."""
    goodput: float
    """With what it was given then."""
    at: float
    runs: bool
    devices: int
    """What it was given then, or held when it was last stopped."""


@dataclass(slots=True)
class _Notes:
    """What is remembered between decisions; lost, the next decision is only a little worse."""

    lengths: WorkHistory = field(default_factory=WorkHistory)
    since: dict[str, float] = field(default_factory=dict[str, float])
    """Since when each job runs, or waits."""
    last: dict[str, _Last] = field(default_factory=dict[str, _Last])
    prices: NDArray[np.float64] | None = None
    """Of each type of device, where there are several."""

    def read(self, state: PoolState, options: AllocatorOptions) -> None:
        """Learn from who has left since the last decision, and who waits."""
        here = {job.id for job in state.jobs}
        for job in [job for job in self.last if job not in here]:
            was = self.last.pop(job)
            # It ended somewhere between then and now.
            done = was.done + was.goodput * (state.now - was.at) / 2
            program = was.program if options.learns_from_programs else ""
            self.lengths.note(program, done, done / was.slowest if was.slowest > 0 else 0.0)
        self.since = {job.id: self._since(job, state.now) for job in state.jobs}

    def _since(self, job: Demand, now: float) -> float:
        """Since when a job runs, if it does; else since it was submitted or stopped."""
        was = self.last.get(job.id)
        if was is not None and was.runs == bool(job.held):
            return self.since.get(job.id, was.at)
        if job.held:
            return now if job.held_since is None else job.held_since
        has_run = job.served_device_s > 0 or (was is not None and was.runs)
        return now if has_run else job.submitted_at

    def write(
        self, state: PoolState, round_: UniformRound | MixedRound, decision: Decision
    ) -> None:
        """Remember what jobs are like now."""
        if isinstance(round_, MixedRound):
            self.prices = round_.prices
        slowest, rates = round_.outlook.slowest.tolist(), round_.tell_rates().tolist()
        for job, slow, rate in zip(state.jobs, slowest, rates, strict=True):
            runs = job.id in decision.placements
            if runs != bool(job.held):
                self.since[job.id] = state.now
            devices = decision.placements[job.id].devices if runs else self._held(job)
            self.last[job.id] = _Last(job.program, job.done, slow, rate, state.now, runs, devices)

    def _held(self, job: Demand) -> int:
        was = self.last.get(job.id)
        return job.held.devices if job.held or was is None else was.devices

    def tell_stopped(self, state: PoolState, turn_s: float) -> dict[str, int]:
        """Devices that each job held that was stopped less than a turn ago."""
        return {
            job.id: self.last[job.id].devices
            for job in state.jobs
            if not job.held and job.id in self.last and state.now - self.since[job.id] < turn_s
        }
