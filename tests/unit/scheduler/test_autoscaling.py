from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from yunlu.hardware.fleet import Placement
from yunlu.scheduler.autoscaling import (
    DeadlineWatch,
    Limits,
    NodeLease,
    NodeOffer,
    Scaling,
    ScalingMemory,
    ScalingRules,
    TeamLimit,
    decide_nodes,
)
from yunlu.scheduler.policy.values import Demand, PoolState
from yunlu.scheduler.spot import Mode

AT_ONCE = ScalingRules(grow_after_s=0.0)
SPOT = NodeOffer(key="spot", devices=1, dollars_per_hour=0.3, is_spot=True)
DEMAND = NodeOffer(key="on-demand", devices=1, dollars_per_hour=1.0)


@dataclass(frozen=True)
class Amdahl:
    """Scales until its serial share stops it."""

    serial: float = 0.05
    one: float = 100.0

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return self.one / (self.serial + (1 - self.serial) / devices)


def job(name: str, **words: object) -> Demand:
    asked: dict[str, object] = {
        "id": name, "submitted_at": 0.0, "speed": Amdahl(), "remaining": 1e6, **words,
    }  # fmt: skip
    return Demand(**asked)  # pyright: ignore[reportArgumentType]


def decide(
    *jobs: Demand, now: float = 0.0, rules: ScalingRules = AT_ONCE, **words: object
) -> Scaling:
    state = PoolState(now=now, nodes=(), jobs=jobs)
    given_words: dict[str, object] = {"offers": (SPOT, DEMAND), **words}
    return decide_nodes(state, rules=rules, **given_words)  # pyright: ignore[reportArgumentType]


def test_an_empty_queue_wants_nothing() -> None:
    assert decide().wanted == {}


def test_it_grows_while_a_dollar_brings_enough_and_on_the_cheapest_offer() -> None:
    scaling = decide(job("a"))
    assert set(scaling.wanted) == {"spot"}
    size = scaling.sizes["a"]
    assert size == scaling.wanted["spot"]
    assert 2 <= size < 64
    eager = decide(job("a"), rules=replace(AT_ONCE, worth=0.1)).sizes["a"]
    thrifty = decide(job("a"), rules=replace(AT_ONCE, worth=0.9)).sizes["a"]
    assert thrifty <= size <= eager
    assert thrifty < eager


def test_a_job_that_does_not_scale_gets_one_device() -> None:
    assert decide(job("a", speed=Amdahl(serial=0.9))).sizes == {"a": 1}


def test_without_spot_a_job_waits_for_it_and_then_takes_on_demand() -> None:
    gone = replace(SPOT, most=0)
    patient = decide(job("a"), offers=(gone, DEMAND))
    assert patient.wanted == {}
    assert patient.reasons["a"].code == "not_worth"
    tired = decide(job("a"), offers=(gone, DEMAND), now=3600.0)
    assert tired.wanted == {"on-demand": 1}


def test_a_deadline_buys_what_it_takes_at_any_price() -> None:
    gone = replace(SPOT, most=0)
    asked = job("a", deadline_at=3600.0, restart_s=30.0)
    scaling = decide(asked, offers=(gone, DEMAND))
    rate = 100.0 / (0.05 + 0.95 / scaling.sizes["a"])
    assert 1e6 / rate <= 3600 - 30 - 60
    assert scaling.reasons["a"].code == "deadline"
    hopeless = decide(job("a", deadline_at=100.0), offers=(gone, DEMAND))
    assert hopeless.reasons["a"].code == "too_late"


def test_staying_needs_no_restart_but_another_offer_does() -> None:
    # 1e6 samples at 6 devices take 1,458 s: just in time for who stays, too late after a restart.
    speed = Amdahl()
    left_s = 1e6 / float(speed.goodput("", np.array([1]), np.array([6]))[0]) + 10.0
    lease = NodeLease(name="n1", offer="on-demand", since=0.0)
    asked = job("a", deadline_at=left_s, held=Placement((("n1", 6),)), restart_s=60.0)
    assert decide(asked, leases=(lease,), modes={"a": Mode.ON_DEMAND}).sizes["a"] == 6
    moved = decide(asked, leases=(replace(lease, offer="spot"),), modes={"a": Mode.ON_DEMAND})
    assert moved.sizes["a"] > 6


def test_modes_choose_between_spot_on_demand_and_waiting() -> None:
    asked = job("a", deadline_at=1e6)
    assert set(decide(asked, modes={"a": Mode.ON_DEMAND}).wanted) == {"on-demand"}
    assert set(decide(asked, modes={"a": Mode.SPOT}).wanted) == {"spot"}
    waiting = decide(asked, modes={"a": Mode.IDLE})
    assert waiting.wanted == {}
    assert waiting.reasons["a"].code == "waits_for_offer"


def test_teams_are_held_to_their_limits() -> None:
    limits = Limits(teams={"red": TeamLimit(devices=3), "blue": TeamLimit(dollars_per_hour=0.6)})
    scaling = decide(job("a", team="red"), job("b", team="blue"), job("c"), limits=limits)
    assert scaling.sizes["a"] <= 3
    assert scaling.sizes["b"] <= 2
    assert scaling.sizes["c"] > 3
    none = decide(job("a", team="red", min_devices=4), limits=limits)
    assert none.reasons["a"].code == "limit_team_devices"


def test_growing_waits_whether_the_wish_lasts() -> None:
    calm = ScalingRules(grow_after_s=60.0)
    first = decide(job("a"), rules=calm)
    assert first.wanted == {}
    assert first.reasons["spot"].code == "waits"
    early = decide(job("a"), rules=calm, now=30.0, notes=first.notes)
    assert early.wanted == {}
    later = decide(job("a"), rules=calm, now=60.0, notes=early.notes)
    assert later.reasons["spot"].code == "grown"
    assert later.wanted["spot"] == later.sizes["a"]
    assert decide(rules=calm, now=60.0, notes=early.notes).notes == ScalingMemory()


def test_idle_machines_go_after_a_while_and_busy_ones_never() -> None:
    leases = (
        NodeLease(name="n1", offer="spot", since=0.0, idle_since=100.0),
        NodeLease(name="n2", offer="spot", since=0.0),
        NodeLease(name="n3", offer="spot", since=900.0, idle_since=900.0),
    )
    soon = decide(leases=leases, now=200.0)
    assert soon.release == ()
    assert soon.wanted == {"spot": 3}
    assert soon.reasons["spot"].code == "lingers"
    later = decide(leases=leases, now=1000.0)
    assert later.release == ("n1",)
    assert later.wanted == {"spot": 2}
    kept = decide(leases=leases, now=5000.0, limits=Limits(least={"spot": 2}))
    assert kept.release == ("n1",)
    assert kept.wanted == {"spot": 2}


def test_machines_that_leave_are_replaced() -> None:
    held = Placement((("n1", 1),))
    leases = (NodeLease(name="n1", offer="spot", since=0.0, is_leaving=True),)
    scaling = decide(job("a", held=held, max_devices=1), leases=leases)
    assert scaling.wanted == {"spot": 1}
    assert scaling.reasons["spot"].code == "grown"


def test_big_machines_are_shared_before_more_are_bought() -> None:
    big = NodeOffer(key="big", devices=8, dollars_per_hour=8.0)
    scaling = decide(*(job(f"j{n}", max_devices=1) for n in range(8)), offers=(big,))
    assert scaling.wanted == {"big": 1}
    assert scaling.dollars_per_hour == pytest.approx(8.0)


offers_drawn = st.lists(
    st.builds(
        NodeOffer,
        key=st.sampled_from(["a", "b", "c", "d"]),
        devices=st.integers(1, 8),
        dollars_per_hour=st.floats(0.0, 10.0),
        is_spot=st.booleans(),
        most=st.integers(0, 6),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda offer: offer.key,
)
jobs_drawn = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),
        st.integers(1, 4),
        st.integers(4, 32),
        st.sampled_from(["red", "blue"]),
        st.integers(0, 2),
        st.one_of(st.none(), st.floats(10.0, 1e6)),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(
    offers=offers_drawn,
    asked=jobs_drawn,
    nodes=st.one_of(st.none(), st.integers(0, 10)),
    dollars=st.one_of(st.none(), st.floats(0.0, 40.0)),
    team_devices=st.integers(0, 12),
    now=st.floats(0.0, 10_000.0),
)
def test_no_limit_is_ever_exceeded(
    *,
    offers: list[NodeOffer],
    asked: list[tuple[float, int, int, str, int, float | None]],
    nodes: int | None,
    dollars: float | None,
    team_devices: int,
    now: float,
) -> None:
    jobs = [
        job(
            f"j{place}", speed=Amdahl(serial=serial), min_devices=least, max_devices=most,
            team=team, priority=priority, deadline_at=deadline,
        )
        for place, (serial, least, most, team, priority, deadline) in enumerate(asked)
    ]  # fmt: skip
    limits = Limits(
        nodes=nodes, dollars_per_hour=dollars, teams={"red": TeamLimit(devices=team_devices)}
    )
    scaling = decide(*jobs, offers=tuple(offers), limits=limits, now=now)
    again = decide(*jobs, offers=tuple(offers), limits=limits, now=now)
    assert scaling == again
    known = {offer.key: offer for offer in offers}
    assert nodes is None or sum(scaling.wanted.values()) <= nodes
    assert dollars is None or scaling.dollars_per_hour <= dollars + 1e-6
    for key, count in scaling.wanted.items():
        assert count <= known[key].most
    for place, (_, least, most, _, _, _) in enumerate(asked):
        size = scaling.sizes.get(f"j{place}", 0)
        assert size == 0 or least <= size <= most
    red = sum(scaling.sizes.get(f"j{p}", 0) for p, spec in enumerate(asked) if spec[3] == "red")
    assert red <= team_devices
    devices = sum(count * known[key].devices for key, count in scaling.wanted.items())
    assert sum(scaling.sizes.values()) <= devices
    assert set(scaling.reasons) >= {demand.id for demand in jobs}


@settings(max_examples=30)
@given(price=st.floats(0.1, 5.0), dearer=st.floats(1.0, 4.0), serial=st.floats(0.01, 0.9))
def test_a_dearer_offer_never_buys_more(price: float, dearer: float, serial: float) -> None:
    sizes: list[int] = []
    for factor in (1.0, dearer):
        other = NodeOffer(key="other", devices=1, dollars_per_hour=price)
        mine = NodeOffer(key="mine", devices=1, dollars_per_hour=price * factor)
        scaling = decide(job("a", speed=Amdahl(serial=serial)), offers=(other, mine))
        sizes.append(scaling.wanted.get("mine", 0))
    assert sizes[1] <= max(sizes[0], 0) or dearer == 1.0


def test_a_watch_falls_back_to_on_demand_in_time() -> None:
    asked = job("a", deadline_at=20_000.0, restart_s=120.0)
    watch = DeadlineWatch(asked, now=0.0, goodput=100.0, step_s=60.0)
    chosen = [
        watch.choose(
            asked, now=now, mode=Mode.IDLE, starting_s=0.0, is_spot_up=False,
            spot_dollars_per_hour=0.3, on_demand_dollars_per_hour=1.0, spent_dollars=0.0,
        )
        for now in np.arange(0.0, 10_000.0, 60.0).tolist()
    ]  # fmt: skip
    assert chosen[0] is Mode.IDLE
    first = chosen.index(Mode.ON_DEMAND)
    # Work of 10,000 s, one start, one step unnoticed: the last moment is 9,820 s.
    assert first * 60.0 + 120.0 + 10_000.0 <= 20_000.0 - 60.0
    with pytest.raises(ValueError, match="deadline"):
        DeadlineWatch(job("b"), now=0.0, goodput=1.0, step_s=60.0)
