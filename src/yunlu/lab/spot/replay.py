"""Replays jobs on a market: cost of each policy, and whether it was late."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.lab.spot.policies import Greedy, OnDemandOnly, UniformProgress, find_optimum
from yunlu.lab.spot.traces import TraceError
from yunlu.scheduler.spot import (
    HOUR_S,
    PRIOR,
    Mode,
    PlannedSpotPolicy,
    SpotObservation,
    SpotOutcome,
    SpotPlanCache,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.scheduler.spot import DeadlineJob, DeadlinePolicy, SpotMarket, SpotModel

_DONE_S = 1e-6


def replay(
    policy: DeadlinePolicy, job: DeadlineJob, market: SpotMarket, *, start: int = 0
) -> SpotOutcome:
    """Run one job in one zone from tick ``start`` until it is done, or the trace ends.

    Each tick the policy sees whether spot is up and for how much, then chooses; what it chose holds
    for the tick. Every start costs ``restart_s`` of paid time without work; a start that is cut short
    is begun anew. Paid by the second.
    """
    return replay_zones(policy, job, (market,), start=start)


def replay_zones(
    policy: DeadlinePolicy, job: DeadlineJob, zones: Sequence[SpotMarket], *, start: int = 0
) -> SpotOutcome:
    """The same where several zones may be used: spot starts in the cheapest that is up, and stays there."""
    step_s, on_demand = zones[0].step_s, min(zone.on_demand_dollars_per_hour for zone in zones)
    ticks = min(len(zones[0]) - start, math.ceil(job.deadline_s / step_s) + 1)
    job_state = _JobState(job=job, left_s=job.work_s)
    modes: list[int] = []
    done: list[float] = []
    for tick in range(ticks):
        zone = _choose_zone(
            zones, start + tick, job_state.zone if job_state.mode is Mode.SPOT else None
        )
        if job_state.mode is Mode.SPOT and zone != job_state.zone:
            job_state.mode, job_state.starting_s = Mode.IDLE, 0.0
        price = zones[zone or 0].spot_dollars_per_hour[start + tick]
        wanted = policy.choose(
            SpotObservation(
                elapsed_s=tick * step_s,
                left_s=job_state.left_s,
                mode=job_state.mode,
                starting_s=job_state.starting_s,
                is_spot_up=zone is not None,
                spot_dollars_per_hour=float(price),
                on_demand_dollars_per_hour=on_demand,
                spent_dollars=job_state.spent_dollars,
                step_s=step_s,
            )
        )
        assert wanted is not Mode.SPOT or zone is not None, f"{policy.name} wants what is not there"
        job_state.zone = zone
        run_s = job_state.run(wanted, step_s, float(price) if wanted is Mode.SPOT else on_demand)
        modes.append(wanted)
        done.append(job.work_s - job_state.left_s)
        if job_state.left_s <= _DONE_S:
            job_state.finished_s = tick * step_s + run_s
            break
    return SpotOutcome(
        cost_dollars=job_state.spent_dollars,
        on_demand_cost_dollars=job.work_s / HOUR_S * on_demand,
        finished_s=job_state.finished_s,
        is_late=job_state.finished_s is None or job_state.finished_s > job.deadline_s + _DONE_S,
        spot_s=job_state.paid_s[Mode.SPOT],
        on_demand_s=job_state.paid_s[Mode.ON_DEMAND],
        starts=job_state.starts,
        modes=np.array(modes, dtype=np.int8),
        work_done_s=np.array(done),
    )


@dataclass(slots=True, kw_only=True)
class _JobState:
    """State of a running job."""

    job: DeadlineJob
    left_s: float
    mode: Mode = Mode.IDLE
    zone: int | None = None
    starting_s: float = 0.0
    spent_dollars: float = 0.0
    starts: int = 0
    finished_s: float | None = None
    paid_s: dict[Mode, float] = field(
        default_factory=lambda: {Mode.IDLE: 0.0, Mode.SPOT: 0.0, Mode.ON_DEMAND: 0.0}
    )

    def run(self, mode: Mode, step_s: float, dollars_per_hour: float) -> float:
        """One tick; returns how much of it was used."""
        if mode is not self.mode:
            self.starting_s = 0.0 if mode is Mode.IDLE else self.job.restart_s
            self.starts += mode is not Mode.IDLE
        self.mode = mode
        if mode is Mode.IDLE:
            return 0.0
        lost_s = min(step_s, self.starting_s)
        run_s = min(step_s, lost_s + self.left_s)
        self.starting_s -= lost_s
        self.left_s -= run_s - lost_s
        self.paid_s[mode] += run_s
        self.spent_dollars += run_s / HOUR_S * dollars_per_hour
        return run_s


def _choose_zone(zones: Sequence[SpotMarket], tick: int, held: int | None) -> int | None:
    """Its zone, while that is up; else the cheapest that is."""
    if held is not None and zones[held].is_up[tick]:
        return held
    up = [index for index, zone in enumerate(zones) if zone.is_up[tick]]
    return min(up, key=lambda index: zones[index].spot_dollars_per_hour[tick], default=None)


BASELINES = {
    "on-demand": OnDemandOnly,
    "greedy": Greedy,
    "uniform progress": UniformProgress,
}
OURS = "planned"
OPTIMUM = "optimum"
_PAST_MEMORIES = 2.0
"""How many memory spans of a zone back the past still has weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """One job, replayed under every policy."""

    zone: str
    start: int
    outcomes: dict[str, SpotOutcome]
    optimum_dollars: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """Result of one policy over all trials."""

    policy: str
    ratio: float
    """Mean cost relative to on-demand."""
    worst_ratio: float
    late: int
    starts: float
    """Mean number of starts."""
    spot_share: float
    """Share of the paid time on spot."""


def draw_starts(
    markets: Sequence[SpotMarket], job: DeadlineJob, *, per_market: int, random: np.random.Generator
) -> list[tuple[SpotMarket, int]]:
    """Random starts in every zone, with time for the whole deadline."""
    starts: list[tuple[SpotMarket, int]] = []
    for market in markets:
        room = len(market) - int(job.deadline_s / market.step_s)
        if room <= 0:
            raise TraceError(
                f"{market.name}: {len(market) * market.step_s / HOUR_S:.1f} h are too short for a "
                f"deadline of {job.deadline_s / HOUR_S:g} h.",
                hint="give a longer trace or a shorter deadline",
            )
        starts += [(market, int(random.integers(0, room))) for _ in range(per_market)]
    return starts


def replay_jobs(
    job: DeadlineJob,
    starts: Sequence[tuple[SpotMarket, int]],
    *,
    model: SpotModel = PRIOR,
    knows_past: bool = True,
    with_optimum: bool = True,
) -> list[ReplayedJob]:
    """Replay the job from every start; our policy knows the zone's past where ``knows_past``."""
    plans = SpotPlanCache(job, model)
    trials: list[ReplayedJob] = []
    for market, start in starts:
        outcomes = {
            name: replay(make(job), job, market, start=start) for name, make in BASELINES.items()
        }
        outcomes[OURS] = replay(
            _prepare(plans, market, start, knows_past=knows_past), job, market, start=start
        )
        optimum = find_optimum(job, market, start=start) if with_optimum else None
        trials.append(
            ReplayedJob(zone=market.name, start=start, outcomes=outcomes, optimum_dollars=optimum)
        )
    return trials


def replay_jobs_in_any_zone(
    job: DeadlineJob,
    zones: Sequence[SpotMarket],
    starts: Sequence[int],
    *,
    model: SpotModel = PRIOR,
) -> list[SpotOutcome]:
    """Our policy where any of the zones may be used."""
    plans = SpotPlanCache(job, model)
    merged = np.logical_or.reduce([zone.is_up for zone in zones])
    outcomes: list[SpotOutcome] = []
    for start in starts:
        policy = PlannedSpotPolicy(plans)
        policy.recall(merged[_past(model, zones[0], start) : start], zones[0].step_s)
        outcomes.append(replay_zones(policy, job, zones, start=start))
    return outcomes


def summarise_policies(trials: Sequence[ReplayedJob]) -> list[PolicySummary]:
    """Mean of each policy; the optimum last, where it was computed."""
    standings = [
        summarise(name, [trial.outcomes[name] for trial in trials]) for name in trials[0].outcomes
    ]
    if trials[0].optimum_dollars is not None:
        ratios = [
            (trial.optimum_dollars or 0.0) / trial.outcomes[OURS].on_demand_cost_dollars
            for trial in trials
        ]
        standings.append(
            PolicySummary(
                policy=OPTIMUM,
                ratio=float(np.mean(ratios)),
                worst_ratio=max(ratios),
                late=sum(math.isinf(ratio) for ratio in ratios),
                starts=math.nan,
                spot_share=math.nan,
            )
        )
    return standings


def summarise(policy: str, outcomes: Sequence[SpotOutcome]) -> PolicySummary:
    """Means of one policy."""
    paid_s = sum(outcome.spot_s + outcome.on_demand_s for outcome in outcomes)
    return PolicySummary(
        policy=policy,
        ratio=float(np.mean([outcome.ratio for outcome in outcomes])),
        worst_ratio=max(outcome.ratio for outcome in outcomes),
        late=sum(outcome.is_late for outcome in outcomes),
        starts=float(np.mean([outcome.starts for outcome in outcomes])),
        spot_share=sum(outcome.spot_s for outcome in outcomes) / max(paid_s, 1e-9),
    )


def _prepare(
    plans: SpotPlanCache, market: SpotMarket, start: int, *, knows_past: bool
) -> PlannedSpotPolicy:
    price = market.on_demand_dollars_per_hour
    policy = PlannedSpotPolicy(
        plans, price_share=float(market.spot_dollars_per_hour[start]) / price
    )
    if knows_past:
        policy.recall(market.is_up[_past(plans.model, market, start) : start], market.step_s)
    return policy


def _past(model: SpotModel, market: SpotMarket, start: int) -> int:
    return max(0, start - int(_PAST_MEMORIES * model.place_memory_s / market.step_s))
