"""The policy: what it must always do, and that it does what brings jobs to their end."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.policy.found_states import TWINS_ONE_ON_A_LEAVING_NODE
from tests.unit.scheduler.policy.states import (
    PowerSpeed,
    check,
    follow,
    live,
    make_job,
    make_nodes,
    make_state,
    on,
    states,
)
from yunlu.hardware.fleet import Node
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.fairness import FairnessRules
from yunlu.scheduler.policy.shapes import count_nodes, lay_out_pool
from yunlu.scheduler.policy.value_table import PolicyParams
from yunlu.scheduler.policy.values import Decision, Demand, PoolState, Team


def decide(state: PoolState, **options: object) -> dict[str, int]:
    """Devices of each job."""
    decision = Allocator(AllocatorOptions(**options)).decide(state)  # pyright: ignore[reportArgumentType]
    check(state, decision)
    return {
        job.id: decision.placements[job.id].devices
        for job in state.jobs
        if job.id in decision.placements
    }


@given(states())
@settings(max_examples=150, deadline=None)
def test_no_decision_breaks_a_rule(state: PoolState) -> None:
    check(state, Allocator().decide(state))


@given(states(teams=True))
@settings(max_examples=80, deadline=None)
def test_no_team_holds_more_than_it_may(state: PoolState) -> None:
    decision = Allocator().decide(state)
    check(state, decision)
    capacity = sum(node.devices for node in state.nodes if not node.is_leaving)
    asked = sum(team.quota or 0 for team in state.teams)
    for team in state.teams:
        if team.quota is None or team.borrow is None or asked > capacity:
            continue
        own = [job for job in state.jobs if job.team == team.name]
        held = sum(
            decision.placements[job.id].devices for job in own if job.id in decision.placements
        )
        pinned = sum(job.held.devices for job in own if job.is_pinned)
        fixed = sum(job.held.devices for job in own if job.held and not job.is_preemptible)
        assert held <= max(team.quota + team.borrow, pinned, fixed) or fixed


@given(states(), st.sampled_from((0.0, 1.0)))
@example(TWINS_ONE_ON_A_LEAVING_NODE, 0.0)
@settings(max_examples=150, deadline=None)
def test_a_decision_is_not_undone_while_nothing_changes(state: PoolState, later_s: float) -> None:
    policy = Allocator()
    if later_s:  # patience, turns and deadlines that run out meanwhile are changes
        fairness = FairnessRules(max_wait_s=math.inf, min_run_s=0.0)
        policy = Allocator(AllocatorOptions(fairness=fairness))
        state = replace(state, jobs=tuple(replace(job, deadline_at=None) for job in state.jobs))
    decisions = [policy.decide(state)]
    while len(decisions) < 2 or decisions[-1].placements != decisions[-2].placements:
        state = follow(state, decisions[-1], later_s=later_s)
        decisions.append(policy.decide(state))
        assert len(decisions) <= 8, "it never comes to rest"
    if is_packed(state, decisions[0]):
        assert decisions[1].placements == decisions[0].placements


def is_packed(state: PoolState, decision: Decision) -> bool:
    """Whether every job lies on as few nodes as the policy counted on.

    Where the floor does not allow that, the next decision knows better and may change its mind.
    """
    node_sizes = lay_out_pool(state.nodes, state.jobs).groups[0].node_sizes
    given = [decision.placements.get(job.id) for job in state.jobs if not job.is_pinned]
    return all(one.nodes <= count_nodes(node_sizes, one.devices) for one in given if one)


@given(states(most_jobs=6))
@settings(max_examples=60, deadline=None)
def test_it_depends_on_no_notes(state: PoolState) -> None:
    used = Allocator()
    used.decide(make_state([make_job("other", work_s=50.0)]))
    known = [job for job in state.jobs if job.remaining is not None]
    state = replace(state, jobs=tuple(known))
    assert used.decide(state).placements == Allocator().decide(state).placements


def test_a_job_alone_gets_all_it_can_use() -> None:
    assert decide(make_state([make_job()])) == {"a": 16}
    assert decide(make_state([make_job(speed=PowerSpeed(most=4))])) == {"a": 4}


def test_who_is_nearly_done_gets_more() -> None:
    state = make_state([make_job("short", work_s=600.0), make_job("long", work_s=1e6)])
    gets = decide(state, params=PolicyParams())
    assert gets["short"] > gets["long"] > 0
    guarded = decide(state, params=PolicyParams(longest_weight=3.0))
    assert guarded["long"] > gets["long"]


def test_the_end_of_all_counts_once_nobody_comes_any_more() -> None:
    jobs = [make_job("short", work_s=3e5), make_job("long", work_s=1e6)]
    at_once, later = (make_state(jobs, make_nodes(16), now=now) for now in (0.0, 1e5))
    plain, late = (
        PolicyParams(expected_jobs=1.0, late_expected_jobs=1.0),
        PolicyParams(expected_jobs=1.0, late_expected_jobs=9.0),
    )
    assert decide(at_once, params=plain) == decide(at_once, params=late)
    assert decide(later, params=late)["long"] > decide(later, params=plain)["long"]


def test_where_many_are_the_longest_is_not_left_with_nothing() -> None:
    jobs = [make_job(f"short{each}", work_s=3e4) for each in range(4)]
    state = make_state([*jobs, make_job("long", work_s=1e6)])
    alone, crowded = (
        decide(state, params=PolicyParams(expected_jobs_per_job=crowd)) for crowd in (0.0, 2.0)
    )
    assert crowded.get("long", 0) > alone.get("long", 0)


def test_who_scales_better_gets_more() -> None:
    jobs = [
        make_job("well", speed=PowerSpeed(power=0.95)),
        make_job("badly", speed=PowerSpeed(power=0.2)),
    ]
    gets = decide(make_state(jobs))
    assert gets["well"] > gets["badly"] > 0


def test_a_restart_must_pay() -> None:
    nodes = make_nodes(1)
    nearly = make_job(work_s=20.0, held=on(("n0", 2)), held_since=0.0)
    assert decide(make_state([nearly], nodes)) == {"a": 2}
    long = make_job(work_s=20_000.0, held=on(("n0", 2)), held_since=0.0)
    assert decide(make_state([long], nodes)) == {"a": 4}


def test_a_short_job_is_not_passed_over_because_its_start_is_long() -> None:
    alone = PowerSpeed(most=1)
    running = [
        make_job(f"j{n}", work_s=40.0, speed=alone, held=on(("n0", 1)), held_since=0.0)
        for n in range(3)
    ]
    short = make_job("short", work_s=16.0, speed=alone, restart_s=20.0)
    longer = make_job("longer", work_s=60.0, speed=alone, restart_s=20.0)
    gets = decide(make_state([*running, longer, short], make_nodes(1)))
    assert gets == {"j0": 1, "j1": 1, "j2": 1, "short": 1}


def test_rigid_jobs_get_their_size_or_nothing() -> None:
    jobs = [make_job(f"j{n}", min_devices=6, max_devices=6, asked_devices=6) for n in range(4)]
    gets = decide(make_state(jobs))
    assert sorted(gets.values()) == [6, 6]


def test_sizes_are_multiples() -> None:
    gets = decide(make_state([make_job(multiple=3, min_devices=3)]))
    assert gets["a"] % 3 == 0


def test_higher_priority_is_served_first_and_the_lower_waits() -> None:
    low = [
        make_job(f"low{n}", held=on((f"n{n}", 4)), held_since=0.0, min_devices=4, max_devices=4)
        for n in range(4)
    ]
    high = make_job("high", min_devices=8, max_devices=8, priority=1, work_s=1e6)
    state = make_state([*low, high])
    gets = decide(state)
    assert gets["high"] == 8
    assert len(gets) == 3
    stopped = next(job.id for job in low if job.id not in gets)
    assert Allocator().decide(state).reasons[stopped].code == "stopped"


def test_who_may_not_be_stopped_is_not() -> None:
    low = [
        make_job(f"low{n}", held=on((f"n{n}", 4)), held_since=0.0, min_devices=4, max_devices=4,
                 is_preemptible=False)
        for n in range(4)
    ]  # fmt: skip
    high = make_job("high", min_devices=8, max_devices=8, priority=1)
    assert set(decide(make_state([*low, high]))) == {job.id for job in low}


def test_a_quota_is_claimed_back_from_those_who_borrowed() -> None:
    teams = [Team(name="red", quota=8), Team(name="blue", quota=8)]
    red = [
        make_job(f"red{n}", team="red", held=on((f"n{n}", 4)), held_since=0.0, work_s=10.0)
        for n in range(4)
    ]
    alone = decide(make_state(red, teams=teams))
    assert sum(alone.values()) == 16
    blue = make_job("blue", team="blue", work_s=1e7)
    gets = decide(make_state([*red, blue], teams=teams))
    assert gets["blue"] == 8


def test_a_team_borrows_no_more_than_it_may() -> None:
    teams = [Team(name="red", quota=4, borrow=4), Team(name="blue", quota=12)]
    jobs = [make_job(f"red{n}", team="red") for n in range(10)]
    state = make_state(jobs, teams=teams)
    gets = decide(state)
    assert sum(gets.values()) == 8
    waiting = next(job.id for job in jobs if job.id not in gets)
    assert Allocator().decide(state).reasons[waiting].code == "over_quota"


def test_a_deadline_is_met_where_it_can_be() -> None:
    others = [make_job(f"j{n}", work_s=100.0) for n in range(12)]
    late = make_job("late", work_s=8000.0, speed=PowerSpeed(power=1.0))
    assert decide(make_state([*others, late])).get("late", 0) <= 4
    due = replace(late, deadline_at=1000.0 + 1400.0)
    assert decide(make_state([*others, due]))["late"] >= 8
    hopeless = replace(late, deadline_at=1000.0 + 60.0)
    state = make_state([*others, hopeless])
    assert decide(state).get("late", 0) <= 4
    fewer = make_state([*others[:2], hopeless])
    assert Allocator().decide(fewer).reasons["late"].figures["misses_deadline"]


def test_money_decides_how_fast_it_may_be() -> None:
    nodes = make_nodes(4, dollars_per_hour=4.0)
    rich = make_job(work_s=3600.0, speed=PowerSpeed(power=0.5))
    assert decide(make_state([rich], nodes))["a"] == 16
    poor = replace(rich, budget_dollars=2.1)  # 4 devices take half an hour: 2 dollars
    assert decide(make_state([poor], nodes))["a"] == 4
    broke = replace(rich, budget_dollars=0.0)
    state = make_state([broke], nodes)
    assert decide(state) == {}
    assert Allocator().decide(state).reasons["a"].code == "over_budget"


def test_what_has_just_been_given_is_not_taken_back() -> None:
    held = make_job("a", work_s=1e6, held=on(("n0", 4)), held_since=950.0)
    jobs = [held, *(make_job(f"j{n}", work_s=50.0) for n in range(3))]
    gets = decide(make_state(jobs, make_nodes(1)), fairness=FairnessRules(min_run_s=300.0))
    assert "a" in gets
    gets = decide(make_state(jobs, make_nodes(1)), fairness=FairnessRules(min_hold_s=100.0))
    assert gets == {"a": 4}


def test_who_has_waited_too_long_goes_first() -> None:
    running = [
        make_job(
            f"j{n}",
            work_s=100.0,
            min_devices=4,
            max_devices=4,
            held=on((f"n{n}", 4)),
            held_since=0.0,
        )
        for n in range(4)
    ]
    old = make_job("old", work_s=1e9, min_devices=16, max_devices=16)
    assert "old" not in decide(make_state([*running, old]))
    assert decide(make_state([*running, old], now=10_000.0)) == {"old": 16}


def test_a_node_that_leaves_is_left() -> None:
    nodes = [replace(node, is_leaving=node.name == "n0") for node in make_nodes(2)]
    job = make_job(held=on(("n0", 4)), held_since=0.0, max_devices=4)
    decision = Allocator().decide(make_state([job], nodes))
    assert decision.placements["a"].shares == (("n1", 4),)
    assert decision.reasons["a"].code == "moved"


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (make_job(min_devices=64, max_devices=64), "too_large"),
        (make_job(speed=PowerSpeed(rate=0.0)), "cannot_run"),
        (make_job(types=frozenset({"h100"})), "cannot_run"),
        (make_job(), "started"),
        (make_job(held=on(("n0", 4), ("n1", 4), ("n2", 4), ("n3", 4)), held_since=0.0), "kept"),
        (make_job(held=on(("n0", 1)), held_since=0.0, work_s=1e5), "grown"),
        (make_job(held=on(("n0", 1)), held_since=0.0, is_pinned=True), "pinned"),
    ],
)
def test_every_job_is_told_why(job: Demand, code: str) -> None:
    assert Allocator().decide(make_state([job])).reasons["a"].code == code


def test_a_job_that_waits_is_told_when_it_may_start() -> None:
    running = make_job("r", min_devices=16, max_devices=16, work_s=1000.0, held_since=900.0,
                       held=on(("n0", 4), ("n1", 4), ("n2", 4), ("n3", 4)))  # fmt: skip
    waiting = make_job("w", min_devices=16, max_devices=16, work_s=9000.0)
    decision = Allocator().decide(make_state([running, waiting]))
    starts_at = decision.reasons["w"].figures["starts_at"]
    assert starts_at == decision.predicted_end_at["r"] > 1000.0
    assert decision.predicted_end_at["w"] > starts_at


def test_an_empty_pool_and_no_jobs_are_no_trouble() -> None:
    assert Allocator().decide(make_state([])).placements == {}
    empty = PoolState(now=0.0, nodes=(), jobs=(make_job(),))
    decision = Allocator().decide(empty)
    assert decision.placements == {}
    assert decision.reasons["a"].text
    leaving = make_state([make_job()], [Node(name="n0", devices=4, is_leaving=True)])
    assert Allocator().decide(leaving).placements == {}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None)
def test_every_job_starts_and_ends_however_many_short_ones_come(seed: int) -> None:
    dice = np.random.default_rng(seed)
    nodes = make_nodes(2, 2)
    jobs = [
        make_job(
            f"j{number}",
            work_s=float(dice.choice([50.0, 200.0, 4000.0])),
            submitted_at=float(60 * (number // 2)),
            min_devices=int(dice.choice([1, 1, 2, 4])),
            speed=PowerSpeed(power=float(dice.uniform(0.3, 1.0))),
            restart_s=10.0,
        )
        for number in range(24)
    ]
    patience_s = 900.0
    options = AllocatorOptions(fairness=FairnessRules(max_wait_s=patience_s, min_run_s=120.0))
    started, ended = live(Allocator(options), jobs, nodes, rounds=1500, round_s=60.0)
    assert len(ended) == len(jobs)
    waits = [started[job.id] - job.submitted_at for job in jobs]
    # At worst everyone who was impatient before it gets a turn first.
    assert max(waits) <= patience_s + 180.0 * len(jobs)


def test_who_waited_long_gets_nothing_beyond_what_pinned_jobs_leave_of_its_teams_limit() -> None:
    nodes = Node(name="n0", devices=1, is_leaving=True), Node(name="n1", devices=1)
    pinned = make_job("pinned", held=on(("n0", 1)), held_since=0.0, is_pinned=True, team="blue")
    teams = Team(name="red"), Team(name="blue", quota=0, borrow=1)
    jobs = pinned, make_job("waiting", team="blue")
    state = make_state(jobs, nodes, now=10_000.0, teams=teams)
    decision = Allocator().decide(state)
    assert set(decision.placements) == {"pinned"}
