"""Quotas, weights and claims."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.scheduler.policy.states import make_job, on
from yunlu.scheduler.policy.fairness import (
    FairnessRules,
    compute_quotas,
    find_must_run,
    weigh_jobs,
)
from yunlu.scheduler.policy.values import Demand, Team

RULES = FairnessRules(max_wait_s=100.0, min_run_s=50.0)


def claim(jobs: list[Demand], capacity: int, *, now: float = 60.0) -> list[bool]:
    least = np.array([job.min_devices for job in jobs])
    return find_must_run(
        jobs,
        least,
        now=now,
        capacity=capacity,
        rules=RULES,
        quotas={},
        waiting_since={},
        pinned_devices={},
    ).tolist()


def test_teams_without_a_quota_share_what_is_left_by_weight() -> None:
    teams = [Team(name="a", quota=4), Team(name="b"), Team(name="c", weight=2.0, borrow=1)]
    found = compute_quotas(teams, [], 16)
    assert [(one.quota, one.limit) for one in found.values()] == [(4, 16), (4, 16), (8, 9)]


def test_quotas_beyond_the_pool_shrink_alike() -> None:
    found = compute_quotas([Team(name="a", quota=24), Team(name="b", quota=8)], [], 16)
    assert [one.quota for one in found.values()] == [12, 4]


def test_a_job_of_no_known_team_has_one_of_its_own() -> None:
    found = compute_quotas([Team(name="a", quota=12)], [make_job(team="b")], 16)
    assert found["b"].quota == 4
    assert compute_quotas([], [make_job(team="b")], 16) == {}


def test_who_had_much_lately_counts_less() -> None:
    teams = [Team(name="a", used_device_s=900.0), Team(name="b", used_device_s=100.0)]
    jobs = [make_job("x", team="a"), make_job("y", team="b"), make_job("z", team="b", priority=1)]
    weights = weigh_jobs(jobs, compute_quotas(teams, jobs, 16))
    assert weights[0] < weights[1]
    assert weights[2] == pytest.approx(2 * weights[1])


def test_claims_are_served_in_order() -> None:
    unstoppable = make_job("a", held=on(("n0", 1)), held_since=0.0, is_preemptible=False)
    begun = make_job("b", held=on(("n0", 1)), held_since=20.0)
    patient = make_job("c", submitted_at=-50.0)
    urgent = make_job("d", submitted_at=50.0, priority=1)
    usual = make_job("e", held=on(("n0", 1)), held_since=0.0)
    jobs = [usual, urgent, patient, begun, unstoppable]
    orders = [claim(jobs, capacity) for capacity in range(6)]
    served = [[job.id for job, must in zip(jobs, order, strict=True) if must] for order in orders]
    assert served[1] == ["a"]
    assert set(served[2]) == {"a", "b"}
    assert set(served[3]) == {"a", "b", "c"}
    assert set(served[5]) == {"a", "b", "c", "d"}


def test_a_claim_that_does_not_fit_does_not_block_the_next() -> None:
    large = make_job("large", submitted_at=-500.0, min_devices=8)
    small = make_job("small", submitted_at=-400.0)
    assert claim([large, small], 4) == [False, True]
    assert claim([large, small], 8) == [True, False]
