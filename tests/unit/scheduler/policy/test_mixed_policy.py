"""Decisions for a pool of several types of devices, ours and Sia's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.lab.simulation.sia import SiaPolicy
from yunlu.scheduler.policy.allocator import AllocationRound
from yunlu.scheduler.policy.fairness import FairnessRules
from yunlu.scheduler.policy.shapes import allow_shapes, group_nodes, lay_out_groups
from yunlu.scheduler.policy.value_table import SeveralTypesSizing
from yunlu.scheduler.policy.values import Decision, Demand, PoolState, Team

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = tuple[float | None, float, tuple[int, int, int], frozenset[str] | None, int]
SPEEDS = {"slow": 1.0, "fast": 4.0, "odd": 2.0}


@dataclass(frozen=True)
class PlainSpeed:
    """So many samples a second, less and less for each more device."""

    scaling: float = 0.8
    most: int = 1 << 30

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        del nodes
        return np.where(devices <= self.most, SPEEDS[device_type] * devices**self.scaling, 0.0)


def make_nodes(slow: int = 3, fast: int = 2, odd: int = 0) -> tuple[Node, ...]:
    return (
        *(Node(name=f"s{at}", devices=4, type="slow") for at in range(slow)),
        *(Node(name=f"f{at}", devices=8, type="fast") for at in range(fast)),
        *(Node(name=f"o{at}", devices=6, type="odd") for at in range(odd)),
    )


def make_job(name: str, **known: object) -> Demand:
    job = Demand(
        id=name,
        submitted_at=0.0,
        speed=PlainSpeed(),
        remaining=10_000.0,
        served_device_s=0.0,
    )
    return replace(job, **known)


def decide(state: PoolState) -> Decision:
    return AllocationRound(
        state,
        sizing=SeveralTypesSizing(),
        fairness=FairnessRules(),
        history=None,
        waiting_since={},
    ).decide()


def check(state: PoolState, decision: Decision) -> None:
    """No device twice, no type mixed, within every job's limits, and pinned jobs untouched."""
    types = {node.name: node.type for node in state.nodes}
    left = Counter({node.name: node.devices for node in state.nodes})
    jobs = {job.id: job for job in state.jobs}
    for name, placement in decision.placements.items():
        job = jobs[name]
        for node, count in placement.shares:
            assert count > 0
            left[node] -= count
        if job.is_pinned:
            assert placement == job.held
            continue
        assert len({types[node] for node, _ in placement.shares}) == 1
        assert job.types is None or types[placement.shares[0][0]] in job.types
        assert job.min_devices <= placement.devices <= job.max_devices
        assert placement.devices % job.multiple == 0
    assert min(left.values(), default=0) >= 0


jobs_of_a_pool = st.lists(
    st.tuples(
        st.sampled_from([100.0, 3_000.0, 1e5, None]),
        st.sampled_from([0.2, 0.7, 0.95]),
        st.sampled_from([(1, 64, 1), (2, 8, 2), (4, 4, 1), (3, 3, 1), (6, 64, 1)]),
        st.sampled_from([None, frozenset({"slow"}), frozenset({"fast", "odd"})]),
        st.integers(0, 2),
    ),
    max_size=14,
)


def build_jobs(rows: list[Row]) -> tuple[Demand, ...]:
    return tuple(
        make_job(
            f"job-{at}",
            remaining=remaining,
            done=50.0,
            speed=PlainSpeed(scaling),
            min_devices=limits[0],
            max_devices=limits[1],
            multiple=limits[2],
            asked_devices=limits[0],
            types=types,
            priority=priority,
            submitted_at=float(at),
        )
        for at, (remaining, scaling, limits, types, priority) in enumerate(rows)
    )


@settings(max_examples=40, deadline=None)
@given(rows=jobs_of_a_pool, odd=st.integers(0, 2), pins=st.integers(0, 3))
def test_decisions_can_be_carried_out_round_after_round(
    rows: list[Row],
    odd: int,
    pins: int,
) -> None:
    state = PoolState(now=100.0, nodes=make_nodes(odd=odd), jobs=build_jobs(rows))
    for turn in range(3):
        decision = decide(state)
        check(state, decision)
        assert decision == decide(state)
        jobs = [
            replace(
                job,
                held=decision.placements.get(job.id, NOTHING),
                held_since=state.now,
                is_pinned=at < pins and turn == 0 and job.id in decision.placements,
                remaining=None if job.remaining is None else job.remaining * 0.5,
            )
            for at, job in enumerate(state.jobs)
        ]
        state = replace(state, now=state.now + 60, jobs=tuple(jobs))


@settings(max_examples=15, deadline=None)
@given(rows=jobs_of_a_pool)
def test_sia_decides_within_the_pool(
    rows: list[Row],
) -> None:
    state = PoolState(now=100.0, nodes=make_nodes(), jobs=build_jobs(rows))
    decision = SiaPolicy().decide(state)
    check(state, decision)
    held = tuple(replace(job, held=decision.placements.get(job.id, NOTHING)) for job in state.jobs)
    check(again := replace(state, jobs=held, now=1000.0), SiaPolicy().decide(again))


def test_the_fast_devices_go_to_who_makes_more_of_them() -> None:
    picky = make_job("picky", speed=PlainSpeed(0.9), types=frozenset({"slow"}))
    other = make_job("other", speed=PlainSpeed(0.9))
    state = PoolState(now=0.0, nodes=make_nodes(slow=1, fast=1), jobs=(picky, other))
    placements = decide(state).placements
    assert {node for node, _ in placements["picky"].shares} == {"s0"}
    assert {node for node, _ in placements["other"].shares} == {"f0"}


def test_a_job_nearly_done_is_not_moved_to_better_devices() -> None:
    held = Placement((("s0", 4),))
    job = make_job("job", held=held, remaining=40.0, restart_s=30.0)
    state = PoolState(now=100.0, nodes=make_nodes(slow=1, fast=1), jobs=(job,))
    assert decide(state).placements["job"] == held
    long = replace(state, jobs=(replace(job, remaining=1e6),))
    assert decide(long).placements["job"].shares[0][0] == "f0"


def test_a_team_stays_below_what_it_may_borrow_and_gets_its_quota() -> None:
    jobs = tuple(
        make_job(f"{team}-{at}", team=team, remaining=1_000.0 if team == "many" else 1e6)
        for team, count in (("many", 12), ("few", 2))
        for at in range(count)
    )
    teams = (Team(name="many", quota=6, borrow=4), Team(name="few", quota=8))
    state = PoolState(now=0.0, nodes=make_nodes(), jobs=jobs, teams=teams)
    placements = decide(state).placements
    used: Counter[str] = Counter()
    for name, placement in placements.items():
        used[name.partition("-")[0]] += placement.devices
    assert used["many"] <= 10
    assert used["few"] >= 8


def test_what_is_told_about_a_job_fits_what_it_gets() -> None:
    jobs = tuple(make_job(f"job-{at}", min_devices=8, max_devices=8) for at in range(4))
    state = PoolState(now=0.0, nodes=make_nodes(slow=2, fast=1), jobs=jobs)
    decision = decide(state)
    assert len(decision.placements) == 2
    waiting = [decision.reasons[job.id].code for job in jobs if job.id not in decision.placements]
    assert waiting == ["waits_for_devices"] * 2
    for job in jobs:
        assert decision.predicted_end_at[job.id] > 0


def test_nodes_that_leave_get_nothing_new() -> None:
    nodes = tuple(replace(node, is_leaving=node.type == "fast") for node in make_nodes())
    state = PoolState(now=0.0, nodes=nodes, jobs=(make_job("job"),))
    assert {node[0] for node, _ in decide(state).placements["job"].shares} == {"s"}


def test_an_empty_pool_and_an_empty_queue() -> None:
    assert decide(PoolState(now=0.0, nodes=(), jobs=(make_job("job"),))).placements == {}
    assert decide(PoolState(now=0.0, nodes=make_nodes(), jobs=())).placements == {}
    assert SiaPolicy().decide(PoolState(now=0.0, nodes=(), jobs=())).placements == {}


def test_sia_keeps_who_is_pinned_and_counts_restarts() -> None:
    held = Placement((("s0", 2),))
    pinned = make_job("pinned", held=held, is_pinned=True, remaining=1e6)
    state = PoolState(now=50.0, nodes=make_nodes(), jobs=(pinned,))
    assert SiaPolicy().decide(state).placements["pinned"] == held
    free = replace(pinned, is_pinned=False)
    young = SiaPolicy().decide(replace(state, jobs=(free,), now=10.0)).placements["pinned"]
    assert young.devices > 2
    tired = replace(free, restarts=40)
    old = SiaPolicy().decide(replace(state, jobs=(tired,), now=1200.0)).placements["pinned"]
    assert old == held


def test_shapes_are_parts_of_a_node_or_whole_nodes() -> None:
    groups = group_nodes(make_nodes(slow=3, fast=2, odd=1))
    shapes = lay_out_groups(groups, named=(3,))
    names = [groups[group].type for group in shapes.group]
    found = list(zip(names, shapes.nodes.tolist(), shapes.devices.tolist(), strict=True))
    assert [row[1:] for row in found if row[0] == "slow"] == [
        (1, 1), (1, 2), (1, 3), (1, 4), (2, 8), (3, 12),
    ]  # fmt: skip
    assert [row[2] for row in found if row[0] == "fast"] == [1, 2, 3, 4, 8, 16]
    assert [row[2] for row in found if row[0] == "odd"] == [1, 2, 3, 4, 6]
    allowed = allow_shapes(
        [make_job("any"), make_job("three", min_devices=3, max_devices=3)], shapes
    )
    assert 3 not in shapes.devices[allowed[0] & (shapes.group == 2)]
    assert set(shapes.devices[allowed[1]]) == {3}


@pytest.mark.parametrize(("most", "longest"), [(16, 16), (200, 200)])
def test_large_pools_have_few_shapes(most: int, longest: int) -> None:
    shapes = lay_out_groups(group_nodes(make_nodes(slow=most, fast=0)))
    assert shapes.nodes.max() == longest
    assert len(shapes) < 50
