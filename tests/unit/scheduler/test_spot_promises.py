"""What must hold on every trace: in time, and never much dearer than on-demand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.lab.spot.replay import (
    Greedy,
    OnDemandOnly,
    UniformProgress,
    find_optimum,
    replay,
    replay_zones,
)
from yunlu.scheduler.spot import (
    HOUR_S,
    DeadlineJob,
    Mode,
    PlannedSpotPolicy,
    SpotMarket,
    SpotObservation,
    SpotPlanCache,
    apply_safety_net,
)

PRICE = 1.0


@dataclass
class Wishes:
    """Wants anything; the nets have to hold."""

    job: DeadlineJob
    wishes: list[Mode]
    name: str = "wishes"

    def choose(self, sight: SpotObservation) -> Mode:
        tick = round(sight.elapsed_s / sight.step_s)
        return apply_safety_net(self.job, sight, self.wishes[tick % len(self.wishes)])


@st.composite
def markets(draw: st.DrawFn) -> SpotMarket:
    """Spells of any length, also ones shorter than a start; prices up to on-demand's."""
    step_s = draw(st.sampled_from([30.0, 195.0, 600.0]))
    spells = draw(st.lists(st.integers(1, 12), min_size=1, max_size=30))
    up = draw(st.booleans())
    is_up = np.concatenate([np.full(n, up ^ bool(place % 2)) for place, n in enumerate(spells)])
    is_up = np.resize(is_up, 400)
    price = draw(st.floats(0.05, PRICE))
    return SpotMarket(
        name="drawn",
        step_s=step_s,
        is_up=is_up,
        spot_dollars_per_hour=np.full(len(is_up), price),
        on_demand_dollars_per_hour=PRICE,
    )


@st.composite
def jobs_on(draw: st.DrawFn, market: SpotMarket) -> DeadlineJob:
    work_s = draw(st.floats(0.3, 100.0)) * market.step_s
    restart_s = draw(st.floats(0.0, 6.0)) * market.step_s
    slack_s = draw(st.one_of(st.just(0.0), st.floats(0.0, 200.0))) * market.step_s
    return DeadlineJob(work_s=work_s, deadline_s=work_s + restart_s + slack_s, restart_s=restart_s)


def most_dollars(job: DeadlineJob) -> float:
    """On-demand with its start, and one start more."""
    return PRICE * (job.work_s + 2 * job.restart_s) / HOUR_S


@given(data=st.data(), market=markets(), wishes=st.lists(st.sampled_from(list(Mode)), min_size=1))
def test_whatever_is_wished_the_nets_keep_deadline_and_cost(
    data: st.DataObject, market: SpotMarket, wishes: list[Mode]
) -> None:
    job = data.draw(jobs_on(market))
    outcome = replay(Wishes(job, wishes), job, market)
    assert not outcome.is_late
    assert outcome.cost_dollars <= most_dollars(job) + 1e-9


@given(data=st.data(), market=markets())
def test_the_planned_policy_is_never_late_and_never_much_dearer(
    data: st.DataObject, market: SpotMarket
) -> None:
    job = data.draw(jobs_on(market))
    outcome = replay(PlannedSpotPolicy(SpotPlanCache(job, levels=30)), job, market)
    assert not outcome.is_late
    assert outcome.cost_dollars <= most_dollars(job) + 1e-9
    assert outcome.cost_dollars >= find_optimum(job, market) - 1e-6 * outcome.cost_dollars - 1e-9


@given(data=st.data(), market=markets(), other=markets())
def test_several_zones_keep_the_promises_too(
    data: st.DataObject, market: SpotMarket, other: SpotMarket
) -> None:
    job = data.draw(jobs_on(market))
    second = SpotMarket(
        name="second",
        step_s=market.step_s,
        is_up=other.is_up,
        spot_dollars_per_hour=other.spot_dollars_per_hour,
        on_demand_dollars_per_hour=PRICE,
    )
    outcome = replay_zones(PlannedSpotPolicy(SpotPlanCache(job, levels=30)), job, (market, second))
    assert not outcome.is_late
    assert outcome.cost_dollars <= most_dollars(job) + 1e-9


@given(data=st.data(), market=markets())
def test_baselines_are_in_time(data: st.DataObject, market: SpotMarket) -> None:
    job = data.draw(jobs_on(market))
    for policy in (OnDemandOnly(job), Greedy(job), UniformProgress(job)):
        assert not replay(policy, job, market).is_late


def test_without_spot_it_costs_on_demand_and_one_start() -> None:
    job = DeadlineJob(work_s=36_000.0, deadline_s=50_000.0, restart_s=700.0)
    market = SpotMarket(
        name="none",
        step_s=195.0,
        is_up=np.zeros(300, dtype=bool),
        spot_dollars_per_hour=np.full(300, 0.3),
        on_demand_dollars_per_hour=2.0,
    )
    outcome = replay(PlannedSpotPolicy(SpotPlanCache(job, levels=100)), job, market)
    assert outcome.cost_dollars == pytest.approx(2.0 * 36_700 / 3600)
    assert outcome.starts == 1


def test_with_spot_always_up_it_is_all_spot() -> None:
    job = DeadlineJob(work_s=36_000.0, deadline_s=50_000.0, restart_s=700.0)
    market = SpotMarket(
        name="all",
        step_s=195.0,
        is_up=np.ones(300, dtype=bool),
        spot_dollars_per_hour=np.full(300, 0.6),
        on_demand_dollars_per_hour=2.0,
    )
    outcome = replay(PlannedSpotPolicy(SpotPlanCache(job, levels=100)), job, market)
    assert outcome.cost_dollars == pytest.approx(0.6 * 36_700 / 3600)
    assert outcome.spot_s == pytest.approx(36_700)
