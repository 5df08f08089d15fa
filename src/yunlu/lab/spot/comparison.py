"""Compares policies on many jobs of many zones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.lab.spot.baselines import Greedy, OnDemandOnly, UniformProgress
from yunlu.lab.spot.optimum import find_optimum
from yunlu.lab.spot.replay import replay, replay_zones
from yunlu.lab.spot.traces import TraceError
from yunlu.scheduler.spot.policy import PlannedSpotPolicy, SpotPlanCache
from yunlu.scheduler.spot.prior import PRIOR
from yunlu.scheduler.spot.values import HOUR_S, SpotOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.scheduler.spot.model import SpotModel
    from yunlu.scheduler.spot.values import DeadlineJob, SpotMarket

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
