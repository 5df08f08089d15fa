"""When runs will start and end."""

import math

from tests.unit.scheduler.world import Even
from yunlu.hardware.fleet import Node, Placement
from yunlu.scheduler.forecast import QueueForecast, forecast, with_start
from yunlu.scheduler.policy.values import Decision, Demand, PoolState
from yunlu.scheduler.scaling import PendingNode

NODES = (Node(name="here", devices=4),)


def job(name, remaining, *, held=0, **more):
    placement = Placement((("here", held),)) if held else Placement()
    return Demand(
        id=name, submitted_at=0.0, speed=Even(), remaining=remaining, held=placement, **more
    )


def forecast_of(jobs, **placements):
    given = {name: Placement((("here", count),)) for name, count in placements.items()}
    state = PoolState(now=100.0, nodes=NODES, jobs=tuple(jobs))
    return forecast(state, Decision(placements=given))


def test_who_waits_starts_when_enough_have_ended():
    found = forecast_of(
        [job("a", 40, held=2), job("b", 20, held=2), job("c", 40, min_devices=4, asked_devices=4)],
        a=2, b=2,
    )  # fmt: skip
    assert found["a"].start_at is None
    assert (found["a"].end_at, found["b"].end_at) == (120.0, 110.0)
    assert (found["c"].start_at, found["c"].end_at) == (120.0, 130.0)


def test_who_is_given_devices_starts_now():
    assert forecast_of([job("a", 40)], a=4)["a"].start_at == 100.0


def test_unknown_length_has_no_end_and_too_large_a_job_no_start():
    found = forecast_of([job("a", None, held=4), job("b", 1, min_devices=9)], a=4)
    assert math.isinf(found["a"].end_at)
    assert math.isinf(found["b"].start_at)


def test_priority_goes_first():
    found = forecast_of(
        [job("a", 40, held=4), job("b", 8), job("c", 8, priority=1, min_devices=4)], a=4
    )
    assert found["c"].start_at <= found["b"].start_at


def test_run_that_nobody_knows_is_taken_to_last_as_long_as_others():
    state = PoolState(
        now=100.0, nodes=NODES, jobs=(job("a", 40, held=4), job("b", 1e9, min_devices=4))
    )
    given = Decision(placements={"a": Placement((("here", 4),))})
    assert forecast(state, given, {"b"})["b"].end_at == 120.0


def machine(at, *, devices=4, node=""):
    return PendingNode(kind="cloud", type="cloud", devices=devices, at=at, node=node)


def test_who_waits_starts_when_a_machine_that_is_on_its_way_is_there():
    state = PoolState(now=100.0, nodes=NODES, jobs=(job("a", 4000, held=4), job("b", 8)))
    given = Decision(placements={"a": Placement((("here", 4),))})
    without = forecast(state, given)["b"]
    assert (without.start_at, without.end_at) == (1100.0, 1108.0)
    found = forecast(state, given, pending_nodes=[machine(160.0), machine(130.0)])["b"]
    assert (found.start_at, found.end_at) == (130.0, 138.0)


def test_where_all_machines_are_still_to_come_the_first_starts_with_them():
    state = PoolState(now=100.0, nodes=(), jobs=(job("a", 8), job("b", 8, min_devices=4)))
    nothing = Decision(placements={})
    assert math.isinf(forecast(state, nothing)["a"].start_at)
    found = forecast(state, nothing, pending_nodes=[machine(150.0, devices=2), machine(170.0)])
    assert (found["a"].start_at, found["b"].start_at) == (150.0, 170.0)


def test_what_is_placed_on_a_machine_that_is_not_there_yet_waits_for_it():
    nodes = (*NODES, Node(name="late", devices=4))
    jobs = (job("a", 40, held=4), job("b", 40), job("c", 8, min_devices=2))
    given = {"a": Placement((("here", 4),)), "b": Placement((("late", 2),))}
    state = PoolState(now=100.0, nodes=nodes, jobs=jobs)
    late = [machine(104.0, node="late")]
    found = forecast(state, Decision(placements=given), pending_nodes=late)
    assert (found["b"].start_at, found["b"].end_at) == (104.0, 124.0)
    assert found["c"].start_at == 104.0  # on the two devices of it that are left
    assert found["a"].start_at is None
    there = forecast(state, Decision(placements=given))
    assert (there["b"].start_at, there["b"].end_at, there["c"].start_at) == (100.0, 120.0, 100.0)


def test_nobody_waits_behind_a_run_that_fits_nowhere():
    found = forecast_of([job("a", 40, held=4), job("b", 8, min_devices=9), job("c", 8)], a=4)
    assert math.isinf(found["b"].start_at)
    assert found["c"].start_at == 110.0


def test_figures_of_a_policy_are_told_with_the_start_that_counts_machines_to_come():
    waits = QueueForecast(start_at=130.0, end_at=140.0, samples_per_s=1.0)
    assert with_start({"needs": 1, "starts_at": 900.0}, waits) == {"needs": 1, "starts_at": 130.0}
    never = QueueForecast(start_at=math.inf, end_at=math.inf, samples_per_s=0.0)
    assert with_start({"needs": 9, "starts_at": 900.0}, never) == {"needs": 9}
    assert with_start({"devices": 2}, None) == {"devices": 2}
