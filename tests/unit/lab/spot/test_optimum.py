from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.lab.spot.replay import Greedy, UniformProgress, find_optimum, replay
from yunlu.scheduler.spot import DeadlineJob, Mode, SpotMarket, SpotObservation


@dataclass
class Script:
    """Does what is written."""

    modes: tuple[Mode, ...]
    name: str = "script"

    def choose(self, sight: SpotObservation) -> Mode:
        tick = round(sight.elapsed_s / sight.step_s)
        mode = self.modes[min(tick, len(self.modes) - 1)]
        return mode if sight.is_spot_up or mode is not Mode.SPOT else Mode.IDLE


def try_everything(job: DeadlineJob, market: SpotMarket, ticks: int) -> float:
    """The least over all ways to choose."""
    costs = [
        outcome.cost_dollars
        for modes in product(Mode, repeat=ticks)
        if not (outcome := replay(Script(modes), job, market)).is_late
    ]
    return min(costs, default=math.inf)


@settings(max_examples=25)
@given(
    ups=st.lists(st.booleans(), min_size=6, max_size=6),
    work=st.integers(1, 30),
    restart=st.integers(0, 12),
    deadline=st.integers(20, 36),
    price=st.floats(0.1, 1.4),
)
def test_it_finds_what_trying_everything_finds(
    ups: list[bool], work: int, restart: int, deadline: int, price: float
) -> None:
    market = SpotMarket(
        name="small",
        step_s=6.0,
        is_up=np.array([*ups, True]),
        spot_dollars_per_hour=np.full(7, price),
        on_demand_dollars_per_hour=1.0,
    )
    job = DeadlineJob(work_s=float(work), deadline_s=float(deadline), restart_s=float(restart))
    ticks = math.ceil(deadline / 6)
    best = try_everything(job, market, ticks)
    if math.isinf(best):
        assert math.isinf(find_optimum(job, market))
    else:
        assert find_optimum(job, market) == pytest.approx(best)


def test_no_policy_is_cheaper_than_the_optimum() -> None:
    random = np.random.default_rng(7)
    job = DeadlineJob(work_s=36_000.0, deadline_s=54_000.0, restart_s=720.0)
    for _ in range(5):
        is_up = np.repeat(random.random(60) < 0.6, 6)
        market = SpotMarket(
            name="drawn",
            step_s=195.0,
            is_up=is_up,
            spot_dollars_per_hour=np.full(360, 0.3),
            on_demand_dollars_per_hour=1.0,
        )
        least = find_optimum(job, market)
        for policy in (Greedy(job), UniformProgress(job)):
            assert replay(policy, job, market).cost_dollars >= least - 1e-9


def test_a_trace_that_is_too_short_has_no_optimum() -> None:
    market = SpotMarket(
        name="short",
        step_s=60.0,
        is_up=np.ones(10, dtype=bool),
        spot_dollars_per_hour=np.full(10, 0.3),
        on_demand_dollars_per_hour=1.0,
    )
    job = DeadlineJob(work_s=300.0, deadline_s=900.0, restart_s=60.0)
    assert math.isinf(find_optimum(job, market))
