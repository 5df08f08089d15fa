"""The loop, turn by turn, on real run directories."""

import errno
import json
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.unit.scheduler.world import Fair
from yunlu.runs.events import ErrorRaised, StateChanged
from yunlu.runs.run_store import Document
from yunlu.scheduler import run_registry as register_module
from yunlu.scheduler import usage_monitor as gauge_module
from yunlu.scheduler.allocation_record import MOST_FAILURES, STALLED, read_allocation
from yunlu.scheduler.pool_store import PoolSettings
from yunlu.scheduler.queue import change_entry, change_terms, read_entry, requeue
from yunlu.scheduler.run_status import Phase
from yunlu.scheduler.usage_monitor import Usage, find_overuse


def turn(world, scheduler, times=1, *, seconds=1.0):
    for _ in range(times):
        scheduler.step()
        world.tick(seconds)
        world.check()
    assert not world.violations


def states(run):
    return [e.state for e, _ in run.read_events() if isinstance(e, StateChanged)]


def decided(scheduler, run):
    return [line["code"] for line in scheduler.pool_store.read_decisions(run.id)]


def test_queued_run_is_started_grown_and_seen_to_its_end(make_world, make_scheduler):
    world = make_world()
    run = world.submit("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 20)
    assert states(run) == ["pending", "planning", "running", "finished"]
    assert not scheduler.registry.scheduled_runs
    assert not world.processes
    assert read_allocation(run).shares == ()


def test_run_that_its_cluster_does_not_start_is_called_off_without_blame(
    make_world, make_scheduler, monkeypatch
):
    world = make_world({"a": 2, "b": 2}, dawdles=1.0)
    run, observe = world.submit("x", least=2, most=2, requested=2), world.observe

    def observe_a_full_cluster(store):
        observation = observe(store)
        return (
            replace(observation, waits_for="other jobs come first")
            if world.dawdles
            else observation
        )

    monkeypatch.setattr(world, "observe", observe_a_full_cluster)
    scheduler = make_scheduler(world, queue_s=1e-9)
    turn(world, scheduler, 3)
    assert "requeued" in decided(scheduler, run)
    assert read_allocation(run).pending.kind == "stop"
    world.dawdles = 0.0
    turn(world, scheduler, 30)
    assert states(run)[-1] == "finished"
    assert read_allocation(run).failures == 0


def test_devices_are_given_only_when_those_who_had_them_are_gone(make_world, make_scheduler):
    world = make_world(steps=100)
    first = world.submit("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 4)
    assert read_allocation(first).placement.devices == 4
    second = world.submit("b")
    scheduler.step()
    allocation = read_allocation(first)
    assert allocation.pending.kind == "resize"
    assert world.process_of(second) is None  # the first has not yet made room
    turn(world, scheduler, 3)
    assert (
        read_allocation(first).placement.devices == read_allocation(second).placement.devices == 2
    )


def test_rigid_run_that_does_not_fit_waits_and_is_explained(make_world, make_scheduler):
    world = make_world()
    run = world.submit("big", least=8, most=8, requested=8)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    assert states(run) == ["pending"]
    assert decided(scheduler, run) == ["fair"]
    view = scheduler.pool_store.read_view()
    assert [(r["id"], r["phase"], r["start_at"]) for r in view["runs"]] == [
        ("big", "waiting", None)
    ]


def test_higher_priority_is_served_first(make_world, make_scheduler):
    world = make_world(steps=100)
    low = world.submit("low", least=4, most=4)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    high = world.submit("high", least=4, most=4)
    turn(world, scheduler, 3)
    assert world.process_of(high) is None or world.process_of(low) is None
    change_terms(high, priority=5)
    turn(world, scheduler, 6)
    assert world.process_of(high) is not None
    assert states(low)[-1] == "stopped"
    assert read_allocation(low).restarts == 1
    assert scheduler.registry.scheduled_runs["low"].phase is Phase.WAITING


def test_paused_run_gives_its_devices_back_and_goes_on_when_resumed(make_world, make_scheduler):
    world = make_world(steps=30)
    run = world.submit("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 5)
    change_entry(run, wish="pause")
    turn(world, scheduler, 4)
    assert states(run)[-1] == "stopped"
    assert not world.processes
    shown = scheduler.pool_store.read_view()
    assert [(each["id"], each["phase"]) for each in shown["runs"]] == [("a", "paused")]
    assert shown["held"] == 0
    requeue(run)
    turn(world, scheduler, 45)
    assert states(run)[-1] == "finished"


def test_wish_in_the_middle_of_a_turn_is_not_missed(make_world, make_scheduler):
    class Meddler(Fair):
        def decide(self, state):
            if states(run)[-1] == "stopped" and read_entry(run).wish == "pause":
                requeue(run)  # after the service has looked, before it turns away
            return super().decide(state)

    world = make_world(steps=30)
    run = world.submit("a")
    scheduler = make_scheduler(world, policy=Meddler())
    turn(world, scheduler, 5)
    change_entry(run, wish="pause")
    turn(world, scheduler, 60)
    assert states(run)[-1] == "finished"


def test_run_that_crashes_at_start_is_tried_again_later_and_later_then_fails(
    make_world, make_scheduler
):
    world = make_world()
    run = world.submit("bad")
    good = world.submit("good")
    world.cursed.add("bad")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 200, seconds=1.0)
    assert states(run).count("pending") >= MOST_FAILURES
    assert states(run)[-1] == "failed"
    allocation = read_allocation(run)
    assert allocation.failures == MOST_FAILURES
    assert "3 times in a row" in allocation.given_up
    assert states(good)[-1] == "finished"
    last = [e for e, _ in run.read_events() if isinstance(e, StateChanged)][-1]
    assert last.reason == allocation.given_up
    assert decided(scheduler, run)[-1] in {"given up", "fair"}
    told = [line["text"] for line in scheduler.pool_store.read_decisions(run.id)]
    assert any(text.endswith("It waits 5 s.") for text in told), told
    assert any(text.endswith("It waits 20 s.") for text in told), told


def test_run_given_up_is_tried_again_when_it_is_resumed(make_world, make_scheduler):
    world = make_world()
    run = world.submit("bad")
    world.cursed.add("bad")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 200)
    assert states(run)[-1] == "failed"
    world.cursed.clear()
    requeue(run)
    turn(world, scheduler, 20)
    assert states(run)[-1] == "finished"


def test_fault_that_would_come_again_is_not_tried_again(make_world, make_scheduler):
    world = make_world()
    run = world.submit("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 1)
    world.processes.clear()
    run.emit(ErrorRaised(code="data", message="no such file"))
    run.emit(StateChanged(state="failed"))
    observation = world.observe

    def observe(store):
        from dataclasses import replace

        return replace(observation(store), error_code="data")

    world.observe = observe
    turn(world, scheduler, 3)
    assert "would fail again: no such file" in read_allocation(run).given_up
    assert world.starts == 1


def test_next_service_adopts_what_runs_and_starts_nothing_twice(make_world, make_scheduler):
    world = make_world(steps=40)
    runs = [world.submit(name) for name in "abc"]
    turn(world, make_scheduler(world), 4)
    before = {p.run.id: p.number for p in world.processes}
    world.kill_service()
    turn(world, make_scheduler(world), 4)
    assert {p.run.id: p.number for p in world.processes} == before
    turn(world, make_scheduler(world), 80)
    assert [states(run)[-1] for run in runs] == ["finished"] * 3


def test_lost_notes_are_rebuilt_from_the_run(make_world, make_scheduler):
    world = make_world(steps=40)
    run = world.submit("a")
    turn(world, make_scheduler(world), 4)
    (run.path / Document.ALLOCATION).unlink()
    world.kill_service()
    turn(world, make_scheduler(world), 2)
    assert read_allocation(run).placement.devices == 4
    assert world.starts == 1


def test_machine_that_dies_is_nobodys_fault(make_world, make_scheduler):
    world = make_world({"one": 2, "two": 2}, steps=30)
    run = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 4)
    ((name, _),) = read_allocation(run).shares
    world.break_machine(name)
    turn(world, scheduler, 60)
    allocation = read_allocation(run)
    assert allocation.failures == 0
    assert allocation.restarts >= 1
    assert states(run)[-1] == "finished"


def test_clock_that_is_set_changes_nothing_but_is_told(make_world, make_scheduler):
    world = make_world(steps=30)
    run = world.submit("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    world.wall -= 7200
    turn(world, scheduler, 3)
    world.wall += 86_400
    turn(world, scheduler, 45)
    assert states(run)[-1] == "finished"
    assert world.starts == 1
    told = [line["code"] for line in scheduler.pool_store.read_decisions("")]
    assert told == ["clock", "clock"]


def test_clock_put_back_does_not_prolong_the_wait_after_a_fault(make_world, make_scheduler):
    world = make_world()
    run = world.submit("a")
    world.cursed.add("a")
    scheduler = make_scheduler(world)
    turn(world, scheduler, 2)
    assert scheduler.registry.scheduled_runs["a"].phase is Phase.BACKING_OFF
    world.wall -= 7200
    world.cursed.clear()
    world.kill_service()
    turn(world, make_scheduler(world), 20)
    assert states(run)[-1] == "finished"


def test_full_disk_starts_nothing_and_loses_nothing(make_world, make_scheduler, monkeypatch):
    world = make_world(steps=30)
    running = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    real = register_module.write_allocation

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(register_module, "write_allocation", refuse)
    waiting = world.submit("b")
    turn(world, scheduler, 5)
    assert world.process_of(waiting) is None
    assert world.process_of(running) is not None
    view = scheduler.pool_store.read_view()
    assert "postponed" in decided(scheduler, waiting) or "b" in view["troubles"]
    monkeypatch.setattr(register_module, "write_allocation", real)
    turn(world, scheduler, 80)
    assert states(running)[-1] == states(waiting)[-1] == "finished"


def test_entry_that_cannot_be_read_keeps_what_it_has(make_world, make_scheduler):
    world = make_world(steps=30)
    run = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    text = (run.path / Document.QUEUE_ENTRY).read_text()
    (run.path / Document.QUEUE_ENTRY).write_text(json.dumps({"from": "the future"}))
    other = world.submit("b", most=4)
    turn(world, scheduler, 4)
    assert read_allocation(other).placement.devices == 2
    assert world.process_of(run) is not None
    (run.path / Document.QUEUE_ENTRY).write_text(text)
    turn(world, scheduler, 60)
    assert states(run)[-1] == "finished"


def test_policy_that_fails_changes_nothing(make_world, make_scheduler):
    class Broken:
        name = "broken"

        def decide(self, state):
            raise ZeroDivisionError("in the policy")

    world = make_world(steps=30)
    run = world.submit("a")
    turn(world, make_scheduler(world), 4)
    scheduler = make_scheduler(world, policy=Broken())
    turn(world, scheduler, 3)
    assert world.process_of(run) is not None
    assert "in the policy" in scheduler.pool_store.read_view()["troubles"]["policy"]


def test_run_that_takes_its_time_to_shrink_is_not_grown_back(
    make_world, make_scheduler, monkeypatch
):
    class Least(Fair):
        def decide(self, state):
            jobs = tuple(replace(job, max_devices=job.min_devices) for job in state.jobs)
            return super().decide(replace(state, jobs=jobs))

    world = make_world(steps=1000)
    run = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 5)
    assert read_allocation(run).placement.devices == 2
    resize, asked = world.resize, []

    def note(store, placement):
        asked.append(placement.devices)
        return resize(store, placement)

    monkeypatch.setattr(world, "resize", note)
    scheduler.policy, world.dawdles = Least(), 1.0  # in the middle of a long step
    turn(world, scheduler, 1, seconds=31.0)
    turn(world, scheduler, 3, seconds=31.0)
    world.dawdles = 0.0
    turn(world, scheduler, 5)
    assert asked == [1]
    assert read_allocation(run).placement.devices == 1


def test_spent_budget_pauses_a_run(make_world, make_scheduler):
    world = make_world(steps=1000)
    run = world.submit("a")
    change_entry(run, budget_dollars=0.01)
    scheduler = make_scheduler(world, dollars_per_hour=3.6)
    turn(world, scheduler, 20)
    assert states(run)[-1] == "stopped"
    assert scheduler.registry.scheduled_runs["a"].phase is Phase.PAUSED
    assert "over budget" in decided(scheduler, run)
    assert read_allocation(run).spent_dollars == pytest.approx(0.01, rel=0.6)


def test_run_resized_by_hand_is_believed(make_world, make_scheduler):
    world = make_world({"here": 6}, steps=100)
    run = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 4)
    world.process_of(run).wanted = {"here": 5}
    turn(world, scheduler, 1)
    assert sum(read_allocation(run).claims.values()) == 5
    turn(world, scheduler, 4)
    assert read_allocation(run).placement.devices == 2


def test_run_that_does_nothing_gives_its_devices_back_and_is_to_blame(
    make_world, make_scheduler, monkeypatch
):
    monkeypatch.setattr(gauge_module, "LOOK_S", 0.0)
    world = make_world(steps=100)
    run = world.submit("a")
    scheduler = make_scheduler(world, stall_s=1e-6)
    turn(world, scheduler, 2)
    world.dawdles = 1.0
    for _ in range(3):
        scheduler.step()
    assert read_allocation(run).pending.reason == STALLED
    assert "stalled" in decided(scheduler, run)
    world.dawdles = 0.0
    scheduler.settings = PoolSettings()
    turn(world, scheduler, 4)
    assert read_allocation(run).failures == 1
    turn(world, scheduler, 120)
    assert states(run)[-1] == "finished"


@pytest.mark.parametrize(
    ("cores", "gib", "expected"),
    [
        (5.0, 1, None),
        (6.5, 1, "6.5 cores busy, and its share is 4.0"),
        (1.0, 9, "9.0 GiB of memory"),
    ],
)
def test_run_that_takes_more_than_it_holds_is_found(
    make_world, make_scheduler, cores, gib, expected
):
    world = make_world(steps=100)
    world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 4)
    usage = Usage(cores=cores, memory_bytes=gib * 2.0**30)
    machine = {"cores": 8.0, "memory_bytes": 16 * 2.0**30}  # two cores for each of four devices
    words = find_overuse(scheduler.registry.scheduled_runs["a"], usage, machine, scheduler.nodes)
    assert (words is None) == (expected is None)
    assert expected is None or expected in words


def test_disk_that_is_really_full_does_not_end_the_service(small_disk, make_world, make_scheduler):
    world = make_world(steps=10)
    world.home = small_disk / "home"
    world.home.mkdir()
    run = world.submit("a", most=2)
    scheduler = make_scheduler(world)
    turn(world, scheduler, 3)
    world.submit("b")
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    for _ in range(3):
        scheduler.step()
    assert [p.run.id for p in world.processes] == ["a"]
    filler.unlink()
    turn(world, scheduler, 60)
    assert not world.processes
    assert states(run)[-1] == "finished"
