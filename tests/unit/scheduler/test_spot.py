from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from yunlu.scheduler.spot import (
    AGE_EDGES_S,
    HOUR_S,
    PRIOR,
    SHARES,
    DeadlineJob,
    Mode,
    SpotHistory,
    make_spot_plan,
    state_of,
    up_states,
)

JOB = DeadlineJob(work_s=24 * HOUR_S, deadline_s=36 * HOUR_S, restart_s=0.2 * HOUR_S)


def expected(job: DeadlineJob = JOB, *, spot: float = 0.3, on_demand: float = 1.0) -> np.ndarray:
    plan = make_spot_plan(
        job, PRIOR, spot_dollars_per_hour=spot, on_demand_dollars_per_hour=on_demand, levels=120
    )
    return plan.expected_dollars


def test_chances_of_each_state_add_up_to_one() -> None:
    for step_s in (30.0, 360.0, 3600.0):
        moves = PRIOR.transitions(step_s).toarray()
        assert (moves >= 0).all()
        assert moves.sum(axis=1) == pytest.approx(1.0)


def test_young_spells_end_sooner_than_old_ones() -> None:
    for is_up in (True, False):
        rates = PRIOR.rates_per_s(is_up)
        assert (np.diff(rates, axis=0) < 0).all()


def test_where_spot_was_up_it_stays_and_comes_back() -> None:
    assert (np.diff(PRIOR.rates_per_s(True)[:, 2:], axis=1) < 0).all()
    assert (np.diff(PRIOR.rates_per_s(False), axis=1) > 0).all()


def test_dearer_machines_make_a_dearer_plan() -> None:
    for one, next_one in pairwise([0.1, 0.3, 0.5, 0.9]):
        assert (expected(spot=next_one) >= expected(spot=one) - 1e-9).all()
    for one, next_one in pairwise([0.5, 1.0, 2.0]):
        assert (expected(on_demand=next_one) > expected(on_demand=one)).all()


def test_more_time_is_never_dearer_and_more_work_never_cheaper() -> None:
    longer = DeadlineJob(
        work_s=JOB.work_s, deadline_s=JOB.deadline_s * 1.25, restart_s=JOB.restart_s
    )
    assert (expected(longer) <= expected() * 1.01).all()
    more = DeadlineJob(work_s=JOB.work_s * 1.2, deadline_s=JOB.deadline_s, restart_s=JOB.restart_s)
    assert (expected(more) > expected()).all()


def test_a_plan_lies_between_all_spot_and_all_on_demand() -> None:
    costs = expected()
    assert (costs > 0.3 * 24).all()
    assert (costs <= 24.2 * 1.02).all()


def test_with_plenty_of_time_it_waits_and_with_little_it_does_not() -> None:
    plan = make_spot_plan(
        JOB, PRIOR, spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0, levels=240
    )
    down = state_of(False, 60.0, 0.6)
    early = plan.choose(Mode.IDLE, time_left_s=14 * HOUR_S, left_s=4 * HOUR_S, state=down)
    late = plan.choose(Mode.IDLE, time_left_s=4.3 * HOUR_S, left_s=4 * HOUR_S, state=down)
    assert (early, late) == (Mode.IDLE, Mode.ON_DEMAND)
    up = state_of(True, 2 * HOUR_S, 0.8)
    assert plan.choose(Mode.IDLE, time_left_s=14 * HOUR_S, left_s=4 * HOUR_S, state=up) is Mode.SPOT


def test_no_plan_wants_spot_that_is_not_up() -> None:
    plan = make_spot_plan(
        JOB, PRIOR, spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0, levels=60
    )
    down = plan.actions[1:, ~up_states(), :]
    assert not (down // 3 == Mode.SPOT).any()
    assert not (down % 3 == Mode.SPOT).any()


def test_memory_counts_age_and_share() -> None:
    memory = SpotHistory(PRIOR)
    assert memory.share == PRIOR.prior_share
    for _ in range(2000):
        memory.observe(True, 60.0)
    assert memory.share == pytest.approx(1.0, abs=0.01)
    assert memory.age_s > AGE_EDGES_S[-1]
    memory.observe(False, 60.0)
    assert memory.age_s == 0.0
    assert memory.state == state_of(False, 0.0, memory.share)
    for _ in range(5000):
        memory.observe(False, 60.0)
    assert memory.share == pytest.approx(0.0, abs=0.01)
    assert 0 <= memory.state < 2 * (len(AGE_EDGES_S) + 1) * len(SHARES)
