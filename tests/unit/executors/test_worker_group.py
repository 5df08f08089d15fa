"""A worker group seen from outside: its supervisor may be gone while its workers train on."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from yunlu.core.errors import StoreError
from yunlu.core.processes import start_time
from yunlu.executors.worker_process import (
    WorkerProcess,
    kill_workers,
    record_worker,
    running_workers,
)
from yunlu.jobs.lifecycle import resize
from yunlu.jobs.run import detect_lost, new_record, worker_of
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, RunStore
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import GroupWorker, WorkerGroup, read_worker_group, write_worker_group


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


def write_journal(run: RunStore, process: psutil.Process, *, port: int = 1) -> None:
    member = GroupWorker(
        number=0,
        node="local",
        host=socket.gethostname(),
        pid=process.pid,
        process_started_at=start_time(process.pid),
        rank=0,
    )
    group = WorkerGroup(
        host="127.0.0.1",
        port=port,
        token="t",
        pid=1,
        process_started_at=0,
        node_module="x",
        target=2,
        wanted={"local": 1, "far": 1},
        workers=(member,),
    )
    write_worker_group(run, group)


@pytest.fixture
def running(make_run: Any) -> RunStore:
    """A run whose supervisor, process 2**22 + 1, is long gone."""
    run: RunStore = make_run()
    for state in (RunState.PENDING, RunState.PLANNING, RunState.RUNNING):
        run.emit(StateChanged(state=state))
    run.emit(AttemptStarted(number=1, pid=2**22 + 1, process_started_at=1.0, began_at=1.0))
    return run


def test_the_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    assert read_worker_group(run) is None
    write_journal(run, psutil.Process())
    assert (run.path / Document.WORKER_GROUP).stat().st_mode & 0o777 == 0o600
    found = read_worker_group(run)
    assert found is not None
    assert found.workers[0].pid == psutil.Process().pid
    assert found.wanted == {"local": 1, "far": 1}


def test_a_run_whose_workers_live_is_not_lost(running: RunStore, sleeper: psutil.Process) -> None:
    record = new_record(running)
    assert record is not None
    write_journal(running, sleeper)
    assert detect_lost(running, record).state is RunState.RUNNING
    kill_workers(running)
    sleeper.wait()
    assert not list(running_workers(running))
    assert detect_lost(running, record).state is RunState.LOST


def test_a_supervisor_that_took_over_answers_for_the_run(
    running: RunStore, sleeper: psutil.Process
) -> None:
    record = new_record(running)
    assert record is not None
    worker = WorkerProcess(
        pid=sleeper.pid,
        process_started_at=start_time(sleeper.pid),
        host=socket.gethostname(),
        detached=True,
    )
    record_worker(running, worker)
    assert worker_of(running, detect_lost(running, record)) == worker


def test_only_a_worker_group_that_trains_can_be_resized(
    running: RunStore, sleeper: psutil.Process
) -> None:
    with pytest.raises(StoreError, match="at least one worker"):
        resize(running, devices=0)
    record_worker(
        running,
        WorkerProcess(
            pid=sleeper.pid,
            process_started_at=start_time(sleeper.pid),
            host=socket.gethostname(),
            detached=True,
        ),
    )
    with pytest.raises(StoreError, match="one plain worker"):
        resize(running, devices=2)
    with socket.create_server(("127.0.0.1", 0)) as door:
        free = door.getsockname()[1]
    write_journal(running, sleeper, port=free)
    with pytest.raises(StoreError, match="does not answer"):
        resize(running, devices=2)
    running.emit(StateChanged(state=RunState.FINISHED))
    with pytest.raises(StoreError, match="is finished"):
        resize(running, devices=2)
