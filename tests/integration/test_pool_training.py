"""Two real trainings in a pool of two shares: the first makes room for the second, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import wait_until
from yunlu.core.files import read_lines
from yunlu.jobs import lifecycle
from yunlu.jobs.run import log_tail
from yunlu.runs.events import DataOpened, WorkerGroupFormed
from yunlu.runs.run_store import Log, RunStore
from yunlu.runs.states import RunState
from yunlu.scheduler import control
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.pool_view import explain
from yunlu.scheduler.queue import SubmitOptions, enqueue, withdraw
from yunlu.spec.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

BATCH = 32


def submit(name: str, steps: int) -> RunStore:
    job = Job.model_validate(
        {
            "name": name,
            "task": "tabular-classification",
            "model": {"name": "mlp", "args": {"hidden": [64]}},
            "data": "sklearn:digits",
            "train": {"steps": steps, "batch": BATCH, "evaluate": "never", "precision": "fp32"},
            "spares": 0,
        }
    )
    return enqueue(job, SubmitOptions(max_devices=2))


def sizes_of(run: RunStore) -> list[int]:
    groups = [event for event, _ in run.read_events() if isinstance(event, WorkerGroupFormed)]
    return [len(event.ranks) for event in groups]


def wait(condition: Callable[[], bool], *runs: RunStore) -> None:
    def check() -> None:
        for run in runs:
            record = lifecycle.read_record(run)
            assert record.state is not RunState.FAILED, "\n".join(log_tail(run))

    wait_until(
        condition,
        "what the test waits for",
        meanwhile=check,
        explain=lambda: [sizes_of(run) for run in runs],
        pause_s=0.1,
    )


def check_samples(run: RunStore, steps: int | None = None) -> None:
    """Every step was made once, with all of its samples: the last one of an epoch has the rest."""
    taken = [(line["step"], line["samples"]) for line, _ in read_lines(run.path / Log.LEDGER)]
    count = next(e.train for e, _ in run.read_events() if isinstance(e, DataOpened))
    full, rest = divmod(count, BATCH)
    epoch = [BATCH] * full + [rest] * (rest > 0)
    steps = len(taken) if steps is None else steps
    assert taken == [(step, epoch[(step - 1) % len(epoch)]) for step in range(1, steps + 1)]


def test_runs_make_room_for_each_other_and_lose_nothing(own_home: Path) -> None:
    settings = PoolSettings(executor="local://?devices=2", policy="fair", round_s=2.0, look_s=0.2)
    control.bring_up(own_home, settings)
    runs: list[RunStore] = []
    try:
        runs.append(submit("first", 1_000_000))
        wait(lambda: 2 in sizes_of(runs[0]), *runs)  # alone, it grows
        runs.append(submit("second", 200))
        wait(lambda: lifecycle.read_record(runs[1]).state is RunState.FINISHED, *runs)
        wait(lambda: sizes_of(runs[0])[-1] == 2, *runs)  # and again
        assert explain(own_home, runs[0]).history
        withdraw(runs[0])
        record = lifecycle.stop(runs[0])
        assert record.state is RunState.STOPPED
    finally:
        control.bring_down(own_home, stop_jobs=True)
        for run in runs:
            lifecycle.stop(run, now=True)
    assert 1 in sizes_of(runs[0])
    check_samples(runs[1], 200)
    check_samples(runs[0])
    assert "Traceback" not in PoolStore(own_home).log.read_text()
