"""Devices are given only when they are free."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.runs.states import RunState
from yunlu.scheduler.actions import free_devices, plan_moves
from yunlu.scheduler.allocation_record import AllocationRecord, PendingAction
from yunlu.scheduler.queue import QueueEntry
from yunlu.scheduler.run_status import (
    Phase,
    ResourceRequest,
    RunObservation,
    ScheduledRun,
    find_held,
)

NODES = (Node(name="a", devices=4), Node(name="b", devices=2))


def scheduled(name, shares=(), *, phase=None, pending=None):
    allocation = AllocationRecord(shares=shares, pending=pending)
    phase = phase or (Phase.RUNNING if shares else Phase.WAITING)
    return ScheduledRun(
        run=SimpleNamespace(id=name),
        entry=QueueEntry(submitted_at=0.0, request=ResourceRequest(least=1, most=4, requested=1)),
        allocation=allocation,
        observation=RunObservation(
            state=RunState.RUNNING if shares else RunState.PENDING, is_alive=bool(shares)
        ),
        progress=None,
        phase=phase,
    )


def on(**shares):
    return Placement(tuple(shares.items()))


def gist(moves):
    return [(move.run_id, move.kind, dict(move.placement.shares)) for move in moves]


def test_what_frees_devices_comes_first_and_what_needs_them_waits():
    scheduled_runs = [scheduled("new"), scheduled("old", (("a", 4),))]
    wanted = {"new": on(a=2), "old": on(a=2)}
    assert gist(plan_moves(scheduled_runs, wanted, NODES)) == [("old", "resize", {"a": 2})]
    scheduled_runs[1] = scheduled("old", (("a", 2),))
    assert gist(plan_moves(scheduled_runs, wanted, NODES)) == [("new", "start", {"a": 2})]


def test_nobody_makes_room_for_who_cannot_come_yet():
    there = {"a", "b"}
    stays = scheduled("stays", (("a", 1), ("gone", 1)))
    assert find_held(stays, there) == on(a=1, gone=1)  # it can be moved, and will be
    leaves = scheduled("leaves", (("a", 1), ("gone", 1)), phase=Phase.LEAVING)
    assert find_held(leaves, there) == on(a=1)
    assert not find_held(scheduled("lost", (("gone", 2),), phase=Phase.LEAVING), there)


def test_who_is_not_named_is_stopped_and_who_changes_is_left_alone():
    scheduled_runs = [
        scheduled("out", (("a", 1),)),
        scheduled("busy", (("a", 1),), phase=Phase.CHANGING, pending=PendingAction(kind="resize")),
    ]
    assert gist(plan_moves(scheduled_runs, {}, NODES)) == [("out", "stop", {})]


def test_starts_go_before_growth():
    scheduled_runs = [scheduled("grows", (("a", 2),)), scheduled("starts")]
    moves = plan_moves(scheduled_runs, {"grows": on(a=4), "starts": on(a=1)}, NODES)
    assert gist(moves) == [("starts", "start", {"a": 1})]


def test_gang_is_started_whole_or_not_at_all():
    scheduled_runs = [scheduled("big"), scheduled("there", (("b", 1),))]
    assert not plan_moves(scheduled_runs, {"big": on(a=4, b=2), "there": on(b=1)}, NODES)


counts = st.tuples(st.integers(0, 4), st.integers(0, 2))


def shares_of(pair):
    return tuple((name, count) for name, count in zip("ab", pair, strict=True) if count)


@settings(max_examples=60)
@given(
    held=st.lists(counts, max_size=5),
    wanted=st.lists(counts, max_size=5),
    growing=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_no_device_is_ever_promised_twice(held, wanted, growing):
    free = {"a": 4, "b": 2}
    scheduled_runs = []
    for number, pair in enumerate(held):
        shares = shares_of(pair)
        if all(free[name] >= count for name, count in shares):
            for name, count in shares:
                free[name] -= count
            scheduled_runs.append(scheduled(f"{number}", shares))
    placements = {f"{number}": Placement(shares_of(pair)) for number, pair in enumerate(wanted)}
    for move in plan_moves(scheduled_runs, placements, NODES):
        found = next(each for each in scheduled_runs if each.id == move.run_id)
        pending = PendingAction(kind=move.kind, shares=move.placement.shares)
        shares = found.allocation.shares or pending.shares
        found.allocation = found.allocation.model_copy(
            update={"pending": pending, "shares": shares}
        )
    assert all(count >= 0 for count in free_devices(scheduled_runs, NODES).values())
    assert NOTHING.devices == 0
