"""When runs will start and end."""

import math

from tests.unit.steward.world import Even
from yunlu.pool.allocation.values import Decision, Demand, Node, Placement, PoolState
from yunlu.steward.forecast import forecast

NODES = (Node(name="here", devices=4),)


def job(name, remaining, *, held=0, **more):
    placement = Placement((("here", held),)) if held else Placement()
    return Demand(
        id=name, submitted_at=0.0, speed=Even(), remaining=remaining, held=placement, **more
    )


def tell(jobs, **placements):
    given = {name: Placement((("here", count),)) for name, count in placements.items()}
    state = PoolState(now=100.0, nodes=NODES, jobs=tuple(jobs))
    return forecast(state, Decision(placements=given))


def test_who_waits_starts_when_enough_have_ended():
    found = tell(
        [job("a", 40, held=2), job("b", 20, held=2), job("c", 40, min_devices=4, asked_devices=4)],
        a=2, b=2,
    )  # fmt: skip
    assert found["a"].start_at is None
    assert (found["a"].end_at, found["b"].end_at) == (120.0, 110.0)
    assert (found["c"].start_at, found["c"].end_at) == (120.0, 130.0)


def test_who_is_given_devices_starts_now():
    assert tell([job("a", 40)], a=4)["a"].start_at == 100.0


def test_unknown_length_has_no_end_and_too_large_a_job_no_start():
    found = tell([job("a", None, held=4), job("b", 1, min_devices=9)], a=4)
    assert math.isinf(found["a"].end_at)
    assert math.isinf(found["b"].start_at)


def test_priority_goes_first():
    found = tell([job("a", 40, held=4), job("b", 8), job("c", 8, priority=1, min_devices=4)], a=4)
    assert found["c"].start_at <= found["b"].start_at


def test_run_that_nobody_knows_is_taken_to_last_as_long_as_others():
    state = PoolState(
        now=100.0, nodes=NODES, jobs=(job("a", 40, held=4), job("b", 1e9, min_devices=4))
    )
    given = Decision(placements={"a": Placement((("here", 4),))})
    assert forecast(state, given, {"b"})["b"].end_at == 120.0
