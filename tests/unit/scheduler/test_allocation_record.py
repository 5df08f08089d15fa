"""What is concluded from an intention and how the run stands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import (
    MOST_FAILURES,
    STALLED,
    AllocationRecord,
    PendingAction,
    reconcile,
)
from yunlu.scheduler.queue import QueueEntry
from yunlu.scheduler.run_status import Phase, ResourceRequest, RunObservation, find_phase

ENTRY = QueueEntry(submitted_at=0.0, request=ResourceRequest(least=1, most=4, requested=1))
NODES = {"here"}


def reconcile_at(allocation, observation, *, now=100.0, nodes=NODES, entry=ENTRY, service="me"):
    return reconcile(entry, allocation, observation, now=now, nodes=nodes, service=service)


def held(count, **more):
    return AllocationRecord(ticket=1, shares=(("here", count),), held_since=50.0, **more)


def intent(kind, count=0, *, by="me", reason=""):
    shares = (("here", count),) if count else ()
    return PendingAction(kind=kind, shares=shares, by=by, reason=reason)


def test_start_comes_true_when_somebody_works():
    allocation = AllocationRecord(ticket=1, shares=(("here", 2),), pending=intent("start", 2))
    after = reconcile_at(
        allocation, RunObservation(state=RunState.PENDING, is_alive=True, has_begun=True)
    )
    assert (after.shares, after.pending, after.held_since) == ((("here", 2),), None, 100.0)
    assert after.restarts == 0


def test_start_that_another_service_had_no_time_for_is_undone_and_nobodys_fault():
    allocation = AllocationRecord(
        ticket=1, shares=(("here", 2),), pending=intent("start", 2, by="dead")
    )
    for state in (RunState.PENDING, RunState.LOST, RunState.STOPPED):
        after = reconcile_at(
            allocation, RunObservation(state=state, is_alive=False, has_begun=False)
        )
        assert (after.shares, after.pending, after.failures) == ((), None, 0)


def test_start_of_ours_that_left_no_trace_counts():
    allocation = AllocationRecord(ticket=1, shares=(("here", 2),), pending=intent("start", 2))
    after = reconcile_at(
        allocation, RunObservation(state=RunState.LOST, is_alive=False, has_begun=False)
    )
    assert after.failures == 1


def test_shrinking_keeps_the_devices_until_the_others_are_gone():
    allocation = held(4, pending=intent("resize", 2))
    before = reconcile_at(
        allocation, RunObservation(state=RunState.RUNNING, is_alive=True, devices=4)
    )
    assert before.claims == {"here": 4}
    after = reconcile_at(before, RunObservation(state=RunState.RUNNING, is_alive=True, devices=2))
    assert after.claims == {"here": 2}
    assert after.restarts == 1


def test_growing_claims_the_devices_at_once():
    assert held(2, pending=intent("resize", 4)).claims == {"here": 4}


def test_resize_that_another_service_had_no_time_for_is_undone():
    allocation = held(2, pending=intent("resize", 4, by="dead"))
    observation = RunObservation(state=RunState.RUNNING, is_alive=True, devices=2)
    after = reconcile_at(allocation, observation)
    assert (after.claims, after.pending, after.restarts) == ({"here": 2}, None, 0)
    assert reconcile_at(held(2, pending=intent("resize", 4)), observation).claims == {
        "here": 4
    }  # our own


def test_move_keeps_the_devices_of_each_machine_until_they_are_left():
    was, wanted = (("a", 1), ("b", 1)), (("a", 1), ("c", 1))
    allocation = AllocationRecord(ticket=1, shares=was, held_since=50.0,
                  pending=PendingAction(kind="resize", shares=wanted, by="me"))  # fmt: skip
    moving = RunObservation(
        state=RunState.RUNNING, is_alive=True, devices=3, shares=(*was, ("c", 1))
    )
    before = reconcile_at(allocation, moving, nodes={"a", "b", "c"})
    assert before.claims == {"a": 1, "b": 1, "c": 1}
    there = RunObservation(state=RunState.RUNNING, is_alive=True, devices=2, shares=wanted)
    assert reconcile_at(before, there, nodes={"a", "b", "c"}).claims == {"a": 1, "c": 1}


def test_what_came_out_otherwise_is_what_the_run_has():
    allocation = held(1, pending=intent("resize", 3))
    observation = RunObservation(state=RunState.RUNNING, is_alive=True, devices=2, shares=(("here", 2),),
                  is_settled=True)  # fmt: skip
    after = reconcile_at(allocation, observation)
    assert (after.claims, after.pending) == ({"here": 2}, None)


def test_stop_of_ours_puts_the_run_back_without_blame():
    allocation = held(4, pending=intent("stop", reason="preempted"))
    leaving = reconcile_at(
        allocation, RunObservation(state=RunState.STOPPED, is_alive=True, has_begun=True)
    )
    assert leaving.claims == {"here": 4}  # it has said its last word, but is still there
    after = reconcile_at(
        leaving, RunObservation(state=RunState.STOPPED, is_alive=False, has_begun=True)
    )
    assert (after.shares, after.failures, after.restarts) == ((), 0, 1)
    phase = find_phase(
        ENTRY, after, RunObservation(state=RunState.STOPPED, is_alive=False), now=100.0
    )
    assert phase is Phase.WAITING


def test_stalled_run_is_to_blame():
    allocation = held(4, pending=intent("stop", reason=STALLED))
    after = reconcile_at(
        allocation, RunObservation(state=RunState.STOPPED, is_alive=False, has_begun=True)
    )
    assert after.failures == 1


def test_faults_count_in_a_row_and_a_new_step_begins_anew():
    allocation = AllocationRecord(ticket=1)
    for attempt in range(1, MOST_FAILURES + 1):
        allocation = allocation.model_copy(update={"shares": (("here", 1),), "held_since": 1.0})
        allocation = reconcile_at(
            allocation, RunObservation(state=RunState.LOST, is_alive=False, has_begun=True, step=5)
        )
        assert allocation.failures == attempt
    assert allocation.given_up
    fresh = allocation.model_copy(update={"shares": (("here", 1),), "given_up": ""})
    fresh = reconcile_at(
        fresh, RunObservation(state=RunState.LOST, is_alive=False, has_begun=True, step=6)
    )
    assert (fresh.failures, fresh.given_up) == (1, "")


def test_lost_machine_is_nobodys_fault():
    after = reconcile_at(
        held(2), RunObservation(state=RunState.LOST, is_alive=False, has_begun=True), nodes=set()
    )
    assert (after.failures, after.restarts, after.shares) == (0, 1, ())
    told = RunObservation(state=RunState.LOST, is_alive=False, has_begun=True, lost_nodes=("here",))
    assert reconcile_at(held(2), told).failures == 0  # though its cluster still lists the machine


def test_wait_grows_and_a_clock_put_back_ends_it():
    allocation = AllocationRecord(failures=2, failed_at=1000.0)
    assert allocation.wait_s() > AllocationRecord(failures=1).wait_s()
    assert allocation.is_backing_off(1000.0 + allocation.wait_s() / 2)
    assert not allocation.is_backing_off(1000.0 + allocation.wait_s())
    assert not allocation.is_backing_off(900.0)


def test_new_ticket_forgives():
    allocation = AllocationRecord(ticket=1, failures=3, failed_at=5.0, given_up="often")
    entry = ENTRY.model_copy(update={"ticket": 2})
    after = reconcile_at(
        allocation, RunObservation(state=RunState.FAILED, is_alive=False), entry=entry
    )
    assert (after.failures, after.given_up, after.ticket) == (0, "", 2)


kinds = st.sampled_from(["start", "resize", "stop"])
intentions = st.none() | st.builds(
    intent, kinds, st.integers(1, 4), by=st.sampled_from(["me", "dead"])
)
notes_ = st.builds(
    AllocationRecord,
    ticket=st.just(1),
    shares=st.just(()) | st.integers(1, 4).map(lambda n: (("here", n),)),
    held_since=st.none() | st.just(50.0),
    pending=intentions,
    failures=st.integers(0, 2),
)
sights = st.builds(
    RunObservation,
    state=st.sampled_from(RunState),
    is_alive=st.booleans(),
    has_begun=st.booleans(),
    devices=st.integers(0, 4),
    node=st.just("here"),
    step=st.integers(0, 3),
)
wishes = st.sampled_from(["run", "pause", "stop"])


@settings(max_examples=60)
@given(allocation=notes_, observation=sights, wish=wishes)
def test_looking_twice_concludes_the_same(allocation, observation, wish):
    entry = ENTRY.model_copy(update={"wish": wish})
    once = reconcile_at(allocation, observation, entry=entry)
    assert reconcile_at(once, observation, entry=entry) == once


@settings(max_examples=60)
@given(allocation=notes_, observation=sights, wish=wishes)
def test_devices_in_use_are_never_free(allocation, observation, wish):
    after = reconcile_at(allocation, observation, entry=ENTRY.model_copy(update={"wish": wish}))
    if observation.is_alive and allocation.pending is None:
        assert sum(after.claims.values()) >= observation.devices
    if not observation.is_alive and not observation.state.is_active:
        assert after.claims == {}


@pytest.mark.parametrize("wish", ["pause", "stop"])
def test_run_that_is_not_wanted_is_not_blamed(wish):
    entry = ENTRY.model_copy(update={"wish": wish})
    after = reconcile_at(
        held(2), RunObservation(state=RunState.FAILED, is_alive=False), entry=entry
    )
    assert after.failures == 0


def test_run_that_was_paused_and_resumed_before_it_had_stopped_is_not_to_blame():
    after = reconcile_at(
        held(2), RunObservation(state=RunState.STOPPED, is_alive=False, has_begun=True, step=3)
    )
    assert (after.shares, after.failures, after.restarts) == ((), 0, 1)
    for state, step in ((RunState.LOST, 3), (RunState.STOPPED, 0)):  # the latter never got anywhere
        blamed = reconcile_at(
            held(2), RunObservation(state=state, is_alive=False, has_begun=True, step=step)
        )
        assert blamed.failures == 1
