"""Spot beside on-demand for runs with a deadline."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.scheduler.world import Even
from yunlu.executors.executor import Reserve
from yunlu.hardware.fleet import Node, Placement
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.goodput import BatchLimits, Observations, StepTiming
from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter
from yunlu.scheduler.policy.values import Decision, Demand, PoolState
from yunlu.scheduler.queue import change_entry
from yunlu.scheduler.run_progress import SpeedEstimates
from yunlu.scheduler.spot import Mode
from yunlu.scheduler.spot_policy import LiveSpotPolicy, explain, steer

SPOT = Node(name="s", devices=2, type="gpu", is_spot=True, dollars_per_hour=0.6)
OWN = Node(name="o", devices=2, type="gpu", dollars_per_hour=2.0)
ASLEEP = Reserve(type="gpu", devices=2, awake=0, most=1, sleeping=("o",))
STEP_S = 30.0


def job(remaining, deadline_at, **more):
    usual = {"submitted_at": 0.0, "speed": Even(), "max_devices": 2, "restart_s": 5.0}
    return Demand(
        id="a", remaining=remaining, deadline_at=deadline_at, **{"min_devices": 2} | usual | more
    )


def pool(now, demand, *nodes):
    return PoolState(now=now, nodes=nodes, jobs=(demand,))


def live(spot_policy, *, work, deadline_at, is_up):
    """A run of so much work on two devices, asked every ten seconds; when it ended, and on what it was."""
    demand, now, modes = job(work, deadline_at), 0.0, []
    spot_policy.choose(pool(now, demand, SPOT), (), spent_dollars={})  # there is such a thing
    while demand.remaining > 0 and now < 2 * deadline_at:
        nodes = (SPOT, OWN) if is_up(now) else (OWN,)
        held = {name for name, _ in demand.held.shares} & {node.name for node in nodes}
        demand = demand if held else replace(demand, held=Placement(), held_since=None)
        mode = spot_policy.choose(pool(now, demand, *nodes), (), spent_dollars={})["a"]
        place = {Mode.SPOT: SPOT.name, Mode.ON_DEMAND: OWN.name}.get(mode)
        if place not in dict(demand.held.shares):
            held = Placement(((place, 2),)) if place else Placement()
            demand = replace(demand, held=held, held_since=now if place else None)
        elif now - demand.held_since >= 70.0:  # started
            demand = replace(demand, remaining=demand.remaining - 20.0)
        modes.append(mode)
        now += 10.0
    return now, modes


def test_where_spot_is_never_there_on_demand_makes_the_deadline_at_the_last_moment():
    end, modes = live(
        LiveSpotPolicy(step_s=STEP_S), work=2000.0, deadline_at=3000.0, is_up=lambda now: False
    )
    assert modes[0] is Mode.IDLE
    assert modes[-1] is Mode.ON_DEMAND
    assert end <= 3000.0


@pytest.mark.parametrize("gone_at", [100.0, 700.0, 1000.0])
def test_spot_that_is_taken_away_costs_no_deadline(gone_at):
    end, modes = live(
        LiveSpotPolicy(step_s=STEP_S),
        work=2000.0,
        deadline_at=2000.0,
        is_up=lambda now: now < gone_at,
    )
    assert modes[0] is Mode.SPOT
    assert end <= 2000.0


def test_spot_that_stays_is_all_that_is_used():
    _, modes = live(
        LiveSpotPolicy(step_s=STEP_S), work=1000.0, deadline_at=3000.0, is_up=lambda now: True
    )
    assert {*modes} == {Mode.SPOT}


def test_nothing_is_chosen_without_both_markets_a_deadline_a_length_or_a_speed():
    spot_policy, demand = LiveSpotPolicy(step_s=STEP_S), job(100.0, 10_000.0)
    assert spot_policy.choose(pool(0.0, demand, OWN), (), spent_dollars={}) == {}
    assert spot_policy.choose(pool(0.0, demand, SPOT), (), spent_dollars={}) == {}
    both = pool(0.0, demand, SPOT, OWN)
    assert spot_policy.choose(both, (), spent_dollars={}, unknown={"a"}) == {}
    for lacking in ({"deadline_at": None}, {"remaining": None}, {"min_devices": 8}):
        state = pool(0.0, replace(demand, **lacking), SPOT, OWN)
        assert spot_policy.choose(state, (), spent_dollars={}) == {}
    assert spot_policy.choose(both, (), spent_dollars={}) == {"a": Mode.SPOT}


@pytest.mark.parametrize("now", [0.0, 550.0, 590.0])
def test_deadline_that_cannot_be_made_is_tried_on_on_demand(now):
    for restart_s in (0.001, 5.0, 600.0):
        hopeless = job(1e6, 600.0, restart_s=restart_s)
        for nodes in ((SPOT, OWN), (OWN,)):
            spot_policy = LiveSpotPolicy(step_s=STEP_S)
            spot_policy.choose(pool(now, hopeless, SPOT), (), spent_dollars={})
            chosen = spot_policy.choose(pool(now, hopeless, *nodes), (), spent_dollars={})
            assert chosen == {"a": Mode.ON_DEMAND}


def test_run_whose_deadline_has_passed_may_be_anywhere():
    spot_policy = LiveSpotPolicy(step_s=STEP_S)
    assert spot_policy.choose(pool(0.0, job(100.0, 600.0), SPOT, OWN), (), spent_dollars={})
    for now in (600.0, 90_000.0):
        assert (
            spot_policy.choose(pool(now, job(100.0, 600.0), SPOT, OWN), (), spent_dollars={}) == {}
        )


def test_machines_that_sleep_are_on_offer_too():
    spot_policy = LiveSpotPolicy(step_s=STEP_S, prices={"gpu": 2.0, "gpu-spot": 0.6})
    hurried = job(1000.0, 600.0)
    assert spot_policy.choose(pool(0.0, hurried, SPOT), (ASLEEP,), spent_dollars={}) == {
        "a": Mode.ON_DEMAND
    }
    spot = replace(ASLEEP, is_spot=True)
    assert spot.kind == "gpu-spot"
    calm = job(100.0, 100_000.0)
    assert spot_policy.choose(pool(0.0, calm, OWN), (spot,), spent_dollars={}) == {"a": Mode.SPOT}


def test_nobody_changes_his_mind_while_a_machine_is_on_its_way():
    spot_policy, demand = LiveSpotPolicy(step_s=STEP_S), job(1000.0, 1100.0)
    first = spot_policy.choose(pool(0.0, demand, SPOT), (ASLEEP,), spent_dollars={})["a"]
    chosen = [
        spot_policy.choose(pool(now, demand), (ASLEEP,), spent_dollars={})["a"]
        for now in np.arange(1.0, 600.0).tolist()
    ]
    assert first is Mode.SPOT
    last = chosen.index(Mode.ON_DEMAND)
    assert {*chosen[:last]} == {Mode.IDLE}
    assert {*chosen[last:]} == {Mode.ON_DEMAND}


def test_spot_that_is_on_its_way_is_waited_for():
    spot_policy, demand = LiveSpotPolicy(step_s=STEP_S), job(100.0, 100_000.0)
    spot = Reserve(type="gpu", devices=2, awake=0, most=1, is_spot=True)
    chosen = []
    for now in (0.0, 10.0, 20.0, 30.0, 40.0):
        modes = spot_policy.choose(pool(now, demand, OWN), (spot,), spent_dollars={})
        chosen.append(modes["a"])
        spot = replace(spot, awake=1)  # asked for, and not there yet
    assert chosen == [Mode.SPOT] * 5


def test_another_deadline_is_heeded_at_once():
    spot_policy = LiveSpotPolicy(step_s=STEP_S)
    calm, hurried = job(1000.0, 100_000.0), job(1000.0, 600.0)
    assert spot_policy.choose(pool(0.0, calm, SPOT, OWN), (), spent_dollars={})["a"] is Mode.SPOT
    assert spot_policy.choose(pool(0.0, hurried, SPOT, OWN), (), spent_dollars={})["a"] is (
        Mode.ON_DEMAND
    )


def seen(device_type="gpu"):
    limits = BatchLimits(base=32, most=32, local_most=32, fixed=32)
    timings = tuple(StepTiming(device_type, 1, n, 32 // n, 0.1 / n, 0.1 / n + 0.01) for n in (1, 2))
    return Observations(signature="x", limits=limits, timings=timings)


@pytest.mark.parametrize(
    "speed",
    [
        Even(),
        Fitter()(seen(), None),
        CrossTypeFitter(types=("gpu", "other"))(seen(), None),
    ],
    ids=["foreign", "one type", "several types"],
)
@pytest.mark.parametrize(
    ("mode", "expected"), [(Mode.SPOT, "s"), (Mode.ON_DEMAND, "o"), (Mode.IDLE, None)]
)
def test_the_allocator_puts_a_run_where_it_may_be(speed, mode, expected):
    for held in (Placement(), Placement((("s", 2),)), Placement((("o", 2),))):
        demand = job(1e6, 1e9, speed=speed, held=held, held_since=0.0 if held else None)
        state = steer(pool(1.0, demand, SPOT, OWN), {"a": mode})
        placed = open_policy("yunlu").decide(state).placements.get("a", Placement())
        assert [name for name, _ in placed.shares] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("there", "mode"), [(OWN, Mode.SPOT), (SPOT, Mode.ON_DEMAND)], ids=["no spot", "no on-demand"]
)
def test_run_goes_on_until_a_machine_of_the_right_kind_has_come(there, mode):
    held = job(1e6, 1e9, held=Placement(((there.name, 2),)), held_since=0.0)
    for demand, expected in ((held, [there.name]), (job(1e6, 1e9), [])):
        state = steer(pool(1.0, demand, there), {"a": mode})
        placed = open_policy("yunlu").decide(state).placements.get("a", Placement())
        assert [name for name, _ in placed.shares] == expected


def test_run_in_the_middle_of_a_change_is_left_alone_and_others_may_be_anywhere():
    pinned = job(1e6, 1e9, held=Placement((("s", 2),)), is_pinned=True)
    other = replace(pinned, id="b", is_pinned=False, held=Placement())
    state = PoolState(now=1.0, nodes=(SPOT, OWN), jobs=(pinned, other))
    placements = open_policy("yunlu").decide(steer(state, {"a": Mode.ON_DEMAND})).placements
    assert placements["a"].shares == (("s", 2),)
    assert placements["b"].shares == (("o", 2),)
    assert steer(state, {}) is state


def test_what_a_deadline_means_is_told():
    told = explain({"a": Mode.IDLE}, Decision(placements={}))
    assert "waits for spot" in told.reasons["a"].text
    assert told.reasons["a"].figures == {"market": "idle"}


def test_pool_moves_a_run_from_spot_to_on_demand_in_time(make_world, make_scheduler, monkeypatch):
    monkeypatch.setattr(SpeedEstimates, "is_known", lambda self, scheduled: True)
    world = make_world({"spot": 2, "own": 2}, steps=200, spot={"spot"})
    run = world.submit("a", least=2, most=2)
    # By its model it takes 3,200 s; the world is faster.
    deadline_at = world.wall + 3600
    change_entry(run, deadline_at=deadline_at)
    scheduler = make_scheduler(world, policy=open_policy("yunlu"), round_s=1.0)

    def turn(count):
        for _ in range(count):
            scheduler.step()
            world.tick()
            world.check()
        return [*world.process_of(run).shares] if world.process_of(run) else []

    assert turn(10) == ["spot"]
    world.break_machine("spot")
    assert turn(10) == []
    assert "waits for spot" in [*scheduler.pool_store.read_decisions("a")][-1]["text"]
    waited = 0
    while not (shares := turn(1)):
        waited += 1
        assert waited < 400
    assert shares == ["own"]
    assert world.wall + 3200 < deadline_at
    assert "to make its deadline" in [*scheduler.pool_store.read_decisions("a")][-1]["text"]
    assert not world.violations
