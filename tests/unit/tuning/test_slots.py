"""Trials in the queue of a pool, and on shares of this machine; nothing trains here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.toy_study import toy_job
from tests.sample_events import sample
from yunlu.executors.lease_executor import LeaseRecord, write_record
from yunlu.executors.worker_process import recorded_worker
from yunlu.jobs import lifecycle
from yunlu.runs.events import AttemptStarted, PlanMade, WorkerGroupFormed
from yunlu.runs.run_store import Log, RunStore
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import AllocationRecord, write_allocation
from yunlu.scheduler.pool_store import PoolStore
from yunlu.scheduler.queue import QueueEntry, read_entry, scan
from yunlu.spec.job import Job
from yunlu.tuning.setup import create_study, make_method_of
from yunlu.tuning.study_runner.slots import (
    LocalSlots,
    PoolSlots,
    SlotAllocation,
    Slots,
    TrialSpeeds,
    find_slots,
)
from yunlu.tuning.values import Point, Trial, TrialState


def make_job(**parts: Any) -> Job:
    told = {"name": "t", "task": "tabular-classification", "data": "synthetic:x", "model": "mlp"}
    return Job.model_validate(told | parts)


def entry_of(run: RunStore) -> QueueEntry:
    entry = read_entry(run)
    assert entry is not None
    return entry


def test_a_submitted_trial_waits_for_its_start(own_home: Path) -> None:
    run = PoolSlots().submit(make_job())
    assert lifecycle.read_record(run).state is RunState.PENDING
    assert list(scan(own_home)) == []  # trial.json can be written in peace


def test_a_started_trial_stands_in_the_pools_queue(own_home: Path) -> None:
    slots: Slots = PoolSlots()
    run = slots.submit(make_job())
    slots.start(run, 2, promise=0.9)
    entry = entry_of(run)
    assert (entry.request.least, entry.request.most, entry.wish) == (1, 2, "run")
    assert (entry.priority, entry.team) == (0, "")
    assert [each.id for each in scan(own_home)] == [run.id]
    worker = recorded_worker(run)
    assert worker is not None
    assert worker.host == "(queue)"  # our death is not the trial's
    assert slots.held(run) == 0


def test_who_promises_less_goes_later_but_never_before_others() -> None:
    slots = PoolSlots()
    run = slots.submit(make_job())
    slots.start(run, 1, promise=0.1)
    assert entry_of(run).priority == -1
    assert slots.resize(run, 4, promise=1.0)
    assert (entry_of(run).priority, entry_of(run).request.most) == (0, 4)


def test_a_held_trial_leaves_the_queue_and_comes_back() -> None:
    slots = PoolSlots()
    run = slots.submit(make_job())
    slots.start(run, 1)
    slots.release(run, for_good=False)
    assert entry_of(run).wish == "pause"
    assert not slots.resize(run, 2)
    before = entry_of(run).ticket
    slots.start(run, 3)
    entry = entry_of(run)
    assert (entry.wish, entry.request.most, entry.ticket) == ("run", 3, before + 1)
    slots.release(run, for_good=True)
    assert entry_of(run).wish == "stop"


def test_letting_go_of_what_was_never_queued_is_no_error() -> None:
    slots = PoolSlots()
    slots.release(slots.submit(make_job()), for_good=True)


def test_the_pool_says_what_a_trial_holds() -> None:
    slots = PoolSlots()
    run = slots.submit(make_job())
    write_allocation(run, AllocationRecord(shares=(("a", 2), ("b", 1))))
    assert slots.held(run) == 3


def test_the_pool_has_as_many_devices_as_it_shows(own_home: Path) -> None:
    assert PoolSlots().devices == 0
    journal = PoolStore(own_home)
    journal.path.mkdir(parents=True)
    journal.view.write_text(json.dumps({"devices": 6}))
    assert PoolSlots().devices == 6
    assert PoolSlots(devices=4).devices == 4


def test_a_layout_that_is_cut_gets_whole_replicas() -> None:
    slots = PoolSlots()
    run = slots.submit(make_job(layout={"tp": 2}))
    slots.start(run, 4)
    assert entry_of(run).request.multiple == 2
    assert slots.resize(run, 3)
    assert entry_of(run).request.most == 2


def test_without_a_pool_it_is_this_machine() -> None:
    slots = find_slots(devices=3)
    assert isinstance(slots, LocalSlots)
    assert slots.devices == 3


def test_a_trial_that_does_not_run_holds_nothing_and_cannot_be_resized() -> None:
    slots = LocalSlots(2)
    run = slots.submit(make_job())
    assert slots.held(run) == 0
    assert not slots.resize(run, 2)


def test_the_pace_of_trials_is_read_from_their_runs(own_home: Path) -> None:
    run = LocalSlots(2).submit(make_job())
    run.emit(sample(AttemptStarted, number=1))
    run.emit(sample(PlanMade, batch=8, micro_batch=8, steps=90))
    groups = [(0, 1, range(1, 11), 1.0), (1, 2, range(11, 21), 0.6)]
    with (run.path / Log.METRICS).open("w") as metrics:
        for generation, workers, steps, step_s in groups:
            ranks = [{"host": "here"}] * workers
            lost_s = 3.0 if generation else None
            run.emit(sample(WorkerGroupFormed, generation=generation, ranks=ranks, lost_s=lost_s))
            for step in steps:
                line = {
                    "step": step,
                    "generation": generation,
                    "at": 1.0,
                    "attempt": 1,
                    "compute_s": step_s,
                }
                metrics.write(json.dumps(line) + "\n")
    speeds = TrialSpeeds(rungs=9)
    new = Trial(number=1, params={}, state=TrialState.WAITING, until=1)
    before_s = speeds.claim(new, held=0).work_s
    speeds.observe([(0, run)])
    points = tuple(Point(rung, (1.0,), 10.0) for rung in (1, 2))
    seen = Trial(number=0, params={}, state=TrialState.RUNNING, points=points, until=3)
    claim = speeds.claim(seen, held=2, promise=0.8)
    assert claim.work_s == pytest.approx(10.0, rel=0.15)  # one rung of ten steps of about a second
    assert claim.beyond_s == pytest.approx(0.8 * 60.0, rel=0.15)
    assert claim.resize_s > speeds.start_s  # with no executor: it would be started again
    record, _ = LeaseRecord(address="local").grant("here", 2, is_lead=True)
    write_record(run, record)
    assert speeds.claim(seen, held=2).resize_s == 3.0
    assert 0.7 < claim.power < 0.95  # 1.67 times as fast on two
    assert speeds.claim(new, held=0).work_s != before_s  # as long as the others


class Shares:
    """Two devices; notes who was started on how many."""

    devices = 2

    def __init__(self) -> None:
        self.started: list[int] = []

    def held(self, run: RunStore) -> int:
        del run
        return 0

    def start(self, run: RunStore, devices: int, **more: Any) -> None:
        del run, more
        self.started.append(devices)


@pytest.mark.parametrize(("start_s", "elastic", "devices"), [
    (5.0, "auto", 2), (1000.0, "auto", 1), (1000.0, True, 2),
])  # fmt: skip
def test_a_short_way_is_not_worth_the_start_of_several_workers(
    start_s: float, elastic: Any, devices: int
) -> None:
    job = toy_job(trials=4)
    records = create_study(job, name="short")
    told, fresh = (records.begin({"train.optimizer.lr": rate}, until=1) for rate in (0.1, 0.2))
    records.add_point(told, Point(1, (0.5,), 1.0), at=0.0)
    records.end(told, TrialState.DONE)
    slots: Any = Shares()
    allocation = SlotAllocation(records, make_method_of(records.request), slots, elastic=elastic)
    allocation._speeds.start_s = start_s  # pyright: ignore[reportPrivateUsage] (measured otherwise)
    run = lifecycle.submit(job)
    allocation.enqueue(fresh, run)
    allocation.rebalance([])
    assert [number for number, _ in allocation.start_queued([])] == [fresh]
    assert slots.started == [devices]
