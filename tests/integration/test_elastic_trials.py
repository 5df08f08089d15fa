"""Trials that get other devices while they train: on shares of this machine, and in a pool. Nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from yunlu.core.files import read_lines, write_atomically
from yunlu.jobs import lifecycle
from yunlu.jobs.run import log_tail
from yunlu.runs.events import AttemptStarted, DataOpened, WorkerGroupFormed
from yunlu.runs.run_store import Document, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.scheduler import control
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.spec.job import Job
from yunlu.tuning.study_runner.slots import LocalSlots, PoolSlots, Slots

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

BATCH = 32


def make_trial(slots: Slots) -> RunStore:
    job = Job.model_validate(
        {
            "name": "trial",
            "task": "tabular-classification",
            "model": {"name": "mlp", "args": {"hidden": [64]}},
            "data": "sklearn:digits",
            "train": {"steps": 1_000_000, "batch": BATCH, "evaluate": 5_000, "precision": "fp32"},
            "spares": 0,
        }
    )
    run = slots.submit(job)
    write_atomically(
        run.path / Document.TRIAL, json.dumps({"study": "test", "number": 0, "params": {}})
    )
    return run


@contextmanager
def ended(run: RunStore) -> Generator[None]:
    """Nobody trains on when the test is over."""
    try:
        yield
    finally:
        lifecycle.stop(run, now=True)


def wait(condition: Callable[[], bool], run: RunStore) -> None:
    def check() -> None:
        state = lifecycle.read_record(run).state
        assert state not in {RunState.FAILED, RunState.LOST}, "\n".join(log_tail(run))

    wait_until(
        condition,
        "what the test waits for",
        meanwhile=check,
        explain=lambda: (lifecycle.read_record(run).state, sizes_of(run)),
        pause_s=0.1,
    )


def sizes_of(run: RunStore) -> list[int]:
    groups = [event for event, _ in run.read_events() if isinstance(event, WorkerGroupFormed)]
    return [len(event.ranks) for event in groups]


def steps_of(run: RunStore) -> list[int]:
    return [int(record["step"]) for record, _ in run.read_metrics()]


def has_trained(run: RunStore, more: int = 20) -> Callable[[], bool]:
    before = len(steps_of(run))
    return lambda: len(steps_of(run)) >= before + more


def check_samples(run: RunStore) -> None:
    """Every step was made once; where a worker group made it, with all of its samples."""
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    count = next(e.train for e, _ in run.read_events() if isinstance(e, DataOpened))
    full, rest = divmod(count, BATCH)
    epoch = [BATCH] * full + [rest] * (rest > 0)
    taken = [(line["step"], line["samples"]) for line, _ in read_lines(run.path / Log.LEDGER)]
    assert taken
    assert taken == [(step, epoch[(step - 1) % len(epoch)]) for step, _ in taken]
    first = taken[0][0]
    assert [step for step, _ in taken] == list(range(first, first + len(taken)))


@pytest.mark.long
def test_a_single_worker_continues_as_a_group_that_shrinks_and_grows() -> None:
    slots = LocalSlots(2)
    run = make_trial(slots)
    with ended(run):
        slots.start(run, 1, most=1)
        wait(has_trained(run), run)
        assert (slots.held(run), slots.usable(run)) == (1, 2)
        wait(lambda: slots.resize(run, 2), run)  # stopped, to be started again
        wait(lambda: lifecycle.read_record(run).state is RunState.STOPPED, run)
        wait(lambda: slots.held(run) == 0, run)
        assert sizes_of(run) == []
        slots.start(run, 2)
        wait(has_trained(run), run)
        assert (slots.held(run), sizes_of(run)) == (2, [2])
        wait(lambda: slots.resize(run, 1), run)
        wait(lambda: sizes_of(run)[-1] == 1, run)
        wait(lambda: slots.held(run) == 1, run)
        wait(has_trained(run), run)
        wait(lambda: slots.resize(run, 2), run)
        wait(lambda: sizes_of(run)[-1] == 2, run)
        wait(has_trained(run), run)
        write_atomically(run.path / Document.TRIAL_CONTROL, json.dumps({"prune": "test"}))
        wait(lambda: lifecycle.read_record(run).state is RunState.STOPPED, run)
        wait(lambda: slots.held(run) == 0, run)
    assert sizes_of(run) == [2, 1, 2]
    check_samples(run)


@pytest.mark.long
def test_a_trial_of_the_pool_grows_and_is_held_and_goes_on(own_home: Path) -> None:
    settings = PoolSettings(executor="local://?devices=2", policy="fair", round_s=1.0, look_s=0.2)
    control.bring_up(own_home, settings)
    slots = PoolSlots()
    run = make_trial(slots)
    try:
        with ended(run):
            assert slots.devices == 2
            slots.start(run, 1)
            wait(has_trained(run), run)
            assert (slots.held(run), sizes_of(run)) == (1, [1])
            assert slots.resize(run, 2, promise=1.0)
            wait(lambda: sizes_of(run)[-1] == 2, run)
            wait(has_trained(run), run)
            slots.release(run, for_good=False)
            write_atomically(run.path / Document.TRIAL_CONTROL, json.dumps({"hold": "test"}))
            wait(lambda: lifecycle.read_record(run).state is RunState.STOPPED, run)
            wait(lambda: slots.held(run) == 0, run)
            write_atomically(run.path / Document.TRIAL_CONTROL, "{}")
            slots.start(run, 2)
            wait(has_trained(run), run)
            assert sizes_of(run)[-1] == slots.held(run) == 2
            slots.release(run, for_good=True)
            write_atomically(run.path / Document.TRIAL_CONTROL, json.dumps({"prune": "test"}))
            wait(lambda: lifecycle.read_record(run).state is RunState.STOPPED, run)
            wait(lambda: slots.held(run) == 0, run)
    finally:
        control.bring_down(own_home, stop_jobs=True)
    watched_trials = sum(isinstance(event, AttemptStarted) for event, _ in run.read_events())
    assert watched_trials == 2  # nobody else started it while it was held
    check_samples(run)
    assert "Traceback" not in PoolStore(own_home).log.read_text()
