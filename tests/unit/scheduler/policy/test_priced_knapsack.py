"""Choosing one option per job under several capacities."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.scheduler.policy.knapsack import (
    IDLE,
    DeviceOptions,
    OpenChoices,
    PricedSolution,
    solve_core,
    solve_priced,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MISSED = 1e3


def make_options(capacities: list[int]) -> DeviceOptions:
    columns = [
        (size, kind)
        for kind, capacity in enumerate(capacities)
        for size in (1, 2, 4, 8, 16)
        if size <= capacity
    ]
    return DeviceOptions(
        sizes=np.array([size for size, _ in columns], dtype=np.float64),
        kinds=np.array([kind for _, kind in columns], dtype=np.int64),
        capacities=np.array(capacities, dtype=np.float64),
    )


def make_worth(options: DeviceOptions, jobs: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    speed = np.array([1.0, 3.0, 1.5, 0.5])[options.kinds]
    scaling = rng.uniform(0.1, 0.9, (jobs, 1))
    noise = rng.uniform(0.7, 1.3, (jobs, len(options.sizes)))
    worth = rng.lognormal(0, 1, (jobs, 1)) * options.sizes**scaling * speed**0.3 * noise
    worth[rng.uniform(size=worth.shape) < 0.15] = -np.inf
    return worth


def count_used(choice: PricedSolution, options: DeviceOptions) -> NDArray[np.float64]:
    used = np.zeros(len(options.capacities))
    for pick in choice.picks:
        if pick != IDLE:
            used[options.kinds[pick]] += options.sizes[pick]
    return used


def value_of(
    picks: tuple[int, ...], worth: NDArray[np.float64], must_run: NDArray[np.bool_]
) -> float:
    return sum(
        worth[job, pick] if pick != IDLE else -MISSED * must_run[job]
        for job, pick in enumerate(picks)
    )


def try_all(
    worth: NDArray[np.float64], options: DeviceOptions, must_run: NDArray[np.bool_]
) -> float:
    best = -np.inf
    for picks in itertools.product(range(-1, len(options.sizes)), repeat=len(worth)):
        used = np.zeros(len(options.capacities))
        for pick in picks:
            if pick != IDLE:
                used[options.kinds[pick]] += options.sizes[pick]
        if (used <= options.capacities).all():
            best = max(best, value_of(picks, worth, must_run))
    return best


@settings(max_examples=60, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    jobs=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    must=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_nothing_is_better_than_the_choice(
    capacities: list[int], jobs: int, seed: int, must: list[bool]
) -> None:
    options = make_options(capacities)
    worth = make_worth(options, jobs, seed)
    must_run = np.array(must[:jobs])
    choice = solve_priced(worth, options, must_run=must_run, gap=0.0)
    found = value_of(tuple(int(pick) for pick in choice.picks), worth, must_run)
    assert found == pytest.approx(try_all(worth, options, must_run), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    jobs=st.integers(0, 60),
    seed=st.integers(0, 10_000),
)
def test_every_capacity_is_kept_and_the_bound_holds(
    capacities: list[int], jobs: int, seed: int
) -> None:
    options = make_options(capacities)
    worth = make_worth(options, jobs, seed)
    choice = solve_priced(worth, options)
    assert (count_used(choice, options) <= options.capacities).all()
    chosen = np.flatnonzero(choice.picks != IDLE)
    assert np.isfinite(worth[chosen, choice.picks[chosen]]).all()
    assert choice.value <= choice.bound * (1 + 1e-9)


def test_a_large_pool_is_filled_nearly_as_well_as_possible() -> None:
    options = make_options([768, 512, 768])
    worth = make_worth(options, 1024, seed=3)
    choice = solve_priced(worth, options)
    assert choice.bound - choice.value < 1e-3 * choice.value


def test_equal_jobs_share_what_does_not_go_round() -> None:
    options = make_options([4, 4])
    worth = np.tile(options.sizes**0.5, (20, 1))
    choice = solve_priced(worth, options)
    assert choice.value == pytest.approx(8.0)
    assert (count_used(choice, options) == options.capacities).all()


def test_the_answer_does_not_depend_on_the_prices_it_starts_from() -> None:
    options = make_options([24, 16, 24])
    worth = make_worth(options, 12, seed=11)
    cold = solve_priced(worth, options, gap=0.0)
    warm = solve_priced(worth, options, gap=0.0, prices=np.array([5.0, 0.0, 0.1]))
    again = solve_priced(worth, options, gap=0.0)
    assert warm.value == pytest.approx(cold.value, rel=1e-9)
    assert again.picks.tolist() == cold.picks.tolist()


def test_who_must_run_goes_before_who_gains_more() -> None:
    options = make_options([4])
    worth = np.array([[10.0, 20.0, 40.0], [-np.inf, -np.inf, 0.1]])
    choice = solve_priced(worth, options, must_run=np.array([False, True]))
    assert choice.picks.tolist() == [IDLE, 2]


def test_nobody_and_nothing() -> None:
    options = make_options([4])
    assert solve_priced(np.zeros((0, 3)), options).picks.tolist() == []
    nothing = solve_priced(np.full((2, 3), -np.inf), options)
    assert nothing.picks.tolist() == [IDLE, IDLE]


def test_a_window_around_the_choice_so_far_never_makes_it_worse() -> None:
    rng = np.random.default_rng(0)
    jobs = np.repeat(np.arange(30), 3)
    load = np.zeros((90, 2), dtype=np.int64)
    load[np.arange(90), rng.integers(0, 2, 90)] = rng.choice([1, 2, 4, 8], 90)
    reference = np.arange(30) * 3
    worth = rng.uniform(0, 1, 90)
    room = load[reference].sum(axis=0) + 200  # far too much for one grid
    rest = OpenChoices(jobs=jobs, worth=worth, load=load, room=room, reference=reference)
    rows = solve_core(rest)
    assert (jobs[rows] == np.arange(30)).all()
    assert (load[rows].sum(axis=0) <= room).all()
    assert worth[rows].sum() >= worth[reference].sum()
