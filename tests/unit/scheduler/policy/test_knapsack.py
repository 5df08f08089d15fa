"""The sizes chosen are the best there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.scheduler.policy import knapsack
from yunlu.scheduler.policy.knapsack import IDLE, TeamLimits, solve_knapsack, solve_with_teams


def total(values: np.ndarray, sizes: np.ndarray, picks: np.ndarray) -> tuple[float, int]:
    value, used = 0.0, 0
    for row, pick in enumerate(picks):
        if pick != IDLE:
            value += float(values[row, pick])
            used += int(sizes[pick])
    return value, used


def search(values: np.ndarray, sizes: np.ndarray, capacity: int, must: np.ndarray) -> float:
    best = -np.inf
    for picks in itertools.product(range(-1, len(sizes)), repeat=len(values)):
        chosen = np.array(picks)
        if (must & (chosen == IDLE)).any():
            continue
        value, used = total(values, sizes, chosen)
        if used <= capacity:
            best = max(best, value)
    return best


tables = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(tables, st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_nothing_better_is_found_by_trying_everything(
    dice: np.random.Generator, jobs: int, capacity: int
) -> None:
    sizes = np.array([1, 2, 4])
    values = np.where(dice.random((jobs, 3)) < 0.2, -np.inf, dice.random((jobs, 3)))
    must = np.zeros(jobs, dtype=bool)
    if capacity and np.isfinite(values[0, 0]):
        must[0] = True
    picks = solve_knapsack(values, sizes, capacity, must).picks
    value, used = total(values, sizes, picks)
    assert used <= capacity
    assert not (must & (picks == IDLE)).any()
    assert value == pytest.approx(search(values, sizes, capacity, must))


@given(tables, st.integers(40, 120), st.floats(0.2, 3.0))
@settings(max_examples=15, deadline=None)
def test_a_large_pool_is_solved_as_a_small_one(
    dice: np.random.Generator, jobs: int, per_job: float
) -> None:
    sizes = np.array([1, 2, 4, 8, 12, 16])
    capacity = int(per_job * jobs)
    values = dice.random((jobs, 1)) * sizes ** dice.uniform(0.2, 0.9, (jobs, 1))
    must = np.zeros(jobs, dtype=bool)
    whole = solve_knapsack(values, sizes, capacity, must)
    priced = knapsack._choose_core(*knapsack._with_idle(values, sizes, must), capacity)  # pyright: ignore[reportPrivateUsage]
    best, _ = total(values, sizes, whole.picks)
    value, used = total(values, sizes, priced.picks)
    assert used <= capacity
    assert value <= best + 1e-9
    assert best - value <= priced.gap + 1e-9


def test_alike_jobs_in_a_large_pool_get_all_that_is_worth_something() -> None:
    sizes = np.array([1, 2, 4, 8])
    values = np.tile(sizes**0.5, (3000, 1)).astype(float)
    choice = solve_knapsack(values, sizes, 4096, np.zeros(3000, dtype=bool))
    value, used = total(values, sizes, choice.picks)
    assert used <= 4096
    assert choice.gap <= 0.01 * value
    assert (choice.picks >= 0).all()


def test_a_group_gets_its_least_and_no_more_than_its_most() -> None:
    sizes = np.array([1, 2, 4])
    values = np.array([[1.0, 1.5, 2.0]] * 2 + [[9.0, 18.0, 36.0]] * 2)
    groups = [
        TeamLimits(rows=np.array([0, 1]), min_devices=3, max_devices=8),
        TeamLimits(rows=np.array([2, 3]), min_devices=0, max_devices=8),
    ]
    must = np.zeros(4, dtype=bool)
    picks = solve_with_teams(values, sizes, 8, must, groups).picks
    first = sum(sizes[pick] for pick in picks[:2] if pick != IDLE)
    assert first >= 3
    capped = [groups[0], TeamLimits(rows=np.array([2, 3]), min_devices=0, max_devices=4)]
    picks = solve_with_teams(values, sizes, 8, must, capped).picks
    assert sum(sizes[pick] for pick in picks[2:] if pick != IDLE) == 4


def test_what_a_group_cannot_use_goes_to_others() -> None:
    sizes = np.array([1, 2, 4])
    values = np.array([[1.0, -np.inf, -np.inf], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    groups = [
        TeamLimits(rows=np.array([0]), min_devices=6, max_devices=8),
        TeamLimits(rows=np.array([1, 2]), min_devices=0, max_devices=8),
    ]
    picks = solve_with_teams(values, sizes, 9, np.zeros(3, dtype=bool), groups).picks
    assert picks.tolist() == [0, 2, 2]


@given(tables, st.integers(2, 5), st.integers(1, 9), st.integers(0, 6), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_groups_without_limits_change_nothing(
    dice: np.random.Generator, jobs: int, capacity: int, least: int, most: int
) -> None:
    sizes = np.array([1, 2, 4])
    values = dice.random((jobs, 3))
    must = np.zeros(jobs, dtype=bool)
    half = jobs // 2
    rows = np.arange(half), np.arange(half, jobs)
    open_ended = [TeamLimits(rows=own, min_devices=0, max_devices=capacity) for own in rows]
    plain, _ = total(values, sizes, solve_knapsack(values, sizes, capacity, must).picks)
    same, _ = total(
        values, sizes, solve_with_teams(values, sizes, capacity, must, open_ended).picks
    )
    assert same == pytest.approx(plain)
    limited = [TeamLimits(rows=rows[0], min_devices=least, max_devices=most), open_ended[1]]
    picks = solve_with_teams(values, sizes, capacity, must, limited).picks
    value, used = total(values, sizes, picks)
    assert used <= capacity
    assert value <= plain + 1e-9
    assert sum(sizes[pick] for pick in picks[:half] if pick != IDLE) <= most
