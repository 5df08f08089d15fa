"""Baselines one decision at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.values import Demand, PoolState

BASELINES = ("fifo", "backfill", "shortest", "fair", "tiresias", "optimus", "fixed")


class Linear:
    """One useful sample a second of every device."""

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return np.asarray(devices, dtype=np.float64)


class Concave:
    """The root of the devices."""

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return np.sqrt(np.asarray(devices, dtype=np.float64))


def node(name: str, devices: int = 4, **more: object) -> Node:
    return Node(name=name, devices=devices, **more)  # pyright: ignore[reportArgumentType]


def job(name: str, devices: int = 1, **more: object) -> Demand:
    fields: dict[str, object] = {
        "id": name,
        "submitted_at": 0.0,
        "speed": Linear(),
        "asked_devices": devices,
        "max_devices": 8,
        "remaining": 1000.0,
    }
    return Demand(**(fields | more))  # pyright: ignore[reportArgumentType]


def held(*shares: tuple[str, int]) -> Placement:
    return Placement(shares)


def state(*jobs: Demand, nodes: tuple[Node, ...] = (node("a"), node("b"))) -> PoolState:
    return PoolState(now=600.0, nodes=nodes, jobs=jobs)


def sizes(policy: str, given: PoolState) -> dict[str, int]:
    decision = open_policy(policy).decide(given)
    assert set(decision.reasons) == {each.id for each in given.jobs}
    return {name: placement.devices for name, placement in decision.placements.items()}


@pytest.mark.parametrize("policy", BASELINES)
def test_nothing_asked_nothing_given(policy: str) -> None:
    assert sizes(policy, state()) == {}
    assert sizes(policy, PoolState(now=0.0, nodes=(), jobs=(job("x"),))) == {}


def test_fifo_lets_nobody_overtake() -> None:
    given = state(job("x", 6), job("y", 4), job("z", 1))
    assert sizes("fifo", given) == {"x": 6}
    decision = open_policy("fifo").decide(given)
    assert decision.reasons["x"].code == "started"
    assert decision.reasons["z"].code == "waits_for_devices"


def test_fixed_lets_small_jobs_slip_past() -> None:
    assert sizes("fixed", state(job("x", 6), job("y", 4), job("z", 1))) == {"x": 6, "z": 1}


@pytest.mark.parametrize("policy", ["fifo", "backfill", "fixed", "shortest", "tiresias"])
def test_a_job_larger_than_the_pool_does_not_stop_the_others(policy: str) -> None:
    given = state(job("huge", 9), job("x", 2))
    assert sizes(policy, given) == {"x": 2}
    assert open_policy(policy).decide(given).reasons["huge"].code == "too_large"


def test_backfill_starts_only_what_does_not_delay_the_head() -> None:
    runs = job("runs", 6, held=held(("a", 4), ("b", 2)), remaining=6000.0)
    head = job("head", 7)
    short = job("short", 2, remaining=1000.0)
    long = job("long", 2, remaining=9000.0)
    # In 1000 s six devices come free; the head then leaves one.
    assert sizes("backfill", state(runs, head, long, short)) == {"runs": 6, "short": 2}
    slim = job("slim", 1, remaining=9000.0)
    assert sizes("backfill", state(runs, head, slim)) == {"runs": 6, "slim": 1}
    unknown = job("unknown", 2, remaining=None)
    assert sizes("backfill", state(runs, head, unknown)) == {"runs": 6}


def test_shortest_interrupts_for_a_shorter_job() -> None:
    runs = job("runs", 8, held=held(("a", 4), ("b", 4)), remaining=80000.0)
    given = state(runs, job("short", 2, remaining=10.0))
    decision = open_policy("shortest").decide(given)
    assert set(decision.placements) == {"short"}
    assert decision.reasons["runs"].code == "preempted"
    stays = job("runs", 8, held=runs.held, remaining=80000.0, is_preemptible=False)
    assert sizes("shortest", state(stays, given.jobs[1])) == {"runs": 8}


def test_tiresias_serves_who_had_little_first_and_keeps_the_order_of_demotion() -> None:
    policy = open_policy("tiresias")
    much = 16 * 3600.0
    policy.decide(state(job("x", 8), job("y", 8, served_device_s=much), job("z", 8)))
    decision = policy.decide(
        state(*(job(name, 8, served_device_s=much) for name in ("x", "y", "z")))
    )
    assert list(decision.placements) == ["y"]
    fresh = open_policy("tiresias").decide(
        state(*(job(name, 8, served_device_s=much) for name in ("x", "y", "z")))
    )
    assert list(fresh.placements) == ["x"]


def test_fair_gives_equal_shares_within_limits() -> None:
    assert sizes("fair", state(job("x"), job("y"))) == {"x": 4, "y": 4}
    assert sizes("fair", state(job("x", max_devices=1), job("y"))) == {"x": 1, "y": 7}
    assert sizes("fair", state(*(job(str(n)) for n in range(3)))) == {"0": 3, "1": 3, "2": 2}
    assert sizes("fair", state(job("x", min_devices=4, multiple=4), job("y"))) == {"x": 4, "y": 4}
    many = sizes("fair", state(*(job(str(n)) for n in range(20))))
    assert sum(many.values()) == 8


def test_optimus_gives_more_to_the_longer_job() -> None:
    given = state(
        job("long", speed=Concave(), remaining=9000.0),
        job("short", speed=Concave(), remaining=500.0),
    )
    found = sizes("optimus", given)
    assert found["long"] > found["short"] >= 1
    assert sum(found.values()) == 8


@pytest.mark.parametrize("policy", BASELINES)
def test_who_is_served_stays_where_it_is(policy: str) -> None:
    runs = job("runs", 4, held=held(("b", 4)), max_devices=4)
    decision = open_policy(policy).decide(state(runs, job("next", 4, max_devices=4)))
    assert decision.placements["runs"] == runs.held
    assert decision.placements["next"] == held(("a", 4))
    assert decision.reasons["runs"].code == "kept"


@pytest.mark.parametrize("policy", BASELINES)
def test_a_leaving_node_gets_nothing_new(policy: str) -> None:
    nodes = (node("a", is_leaving=True), node("b"))
    runs = job("runs", 2, held=held(("a", 2)), max_devices=2)
    decision = open_policy(policy).decide(state(runs, job("next", 1, max_devices=1), nodes=nodes))
    for placement in decision.placements.values():
        assert {name for name, _ in placement.shares} == {"b"}


@pytest.mark.parametrize("policy", BASELINES)
def test_a_job_stays_with_types_it_can_use(policy: str) -> None:
    nodes = (node("a", type="old"), node("b", type="new"))
    given = state(
        job("x", 4, types=frozenset({"new"}), max_devices=4),
        job("y", 2, max_devices=4),
        nodes=nodes,
    )
    decision = open_policy(policy).decide(given)
    assert [name for name, _ in decision.placements["x"].shares] == ["b"]
    assert [name for name, _ in decision.placements["y"].shares] == ["a"]


SHARES = st.sampled_from([NOTHING, held(("a", 2)), held(("a", 1), ("b", 1)), held(("b", 4))])


@given(
    policy=st.sampled_from(BASELINES),
    asks=st.lists(
        st.tuples(st.integers(1, 10), SHARES, st.booleans(), st.booleans(), st.floats(0, 1e6)),
        max_size=8,
    ),
)
def test_no_policy_gives_a_device_twice_and_pinned_jobs_keep_theirs(
    policy: str, asks: list[tuple[int, Placement, bool, bool, float]]
) -> None:
    left = {"a": 4, "b": 4}
    jobs: list[Demand] = []
    for place, (devices, holds, is_pinned, knows, served) in enumerate(asks):
        fits = all(left[name] >= count for name, count in holds.shares)
        for name, count in holds.shares if fits else ():
            left[name] -= count
        jobs.append(
            job(
                f"j{place}",
                devices,
                held=holds if fits else NOTHING,
                is_pinned=is_pinned and fits and bool(holds),
                remaining=served + 1 if knows else None,
                served_device_s=served,
            )
        )
    decision = open_policy(policy).decide(state(*jobs))
    used = {"a": 0, "b": 0}
    for placement in decision.placements.values():
        for name, count in placement.shares:
            used[name] += count
    assert all(count <= 4 for count in used.values())
    for each in jobs:
        if each.is_pinned:
            assert decision.placements[each.id] == each.held
