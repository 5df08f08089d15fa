import os
import signal
import sys
import time

import psutil
import pytest

from tests.waiting import LIMIT_S
from yunlu.core.errors import StoreError
from yunlu.core.processes import start_time
from yunlu.executors.worker_process import (
    ASYNCHRONOUS,
    SUPERVISOR,
    WORKER,
    WorkerProcess,
    is_asynchronous,
    launch_lock,
    program_for,
    recorded_worker,
    start_worker,
    this_process,
    worker_lock_is_free,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area

SLEEPER = "import sys, time; print('awake', flush=True); time.sleep(600)"


@pytest.fixture
def run(tmp_path):
    return open_run(tmp_path)


@pytest.fixture
def sleeper(run):
    worker = start_worker(run, [sys.executable, "-c", SLEEPER])
    yield worker
    worker.kill()
    reap(worker)


def reap(worker):
    while worker.exit_code() is None:
        time.sleep(0.01)


def test_worker_runs_in_its_own_session_with_output_in_its_log(run):
    script = "import os, sys; print(os.getsid(0) == os.getpid(), sys.argv[1]); sys.exit(5)"
    (run.path / WORKER_LOG).write_text("an earlier attempt\n")
    worker = start_worker(run, [sys.executable, "-c", script])
    reap(worker)
    assert worker.exit_code() == 5
    assert (run.path / WORKER_LOG).read_text() == f"an earlier attempt\nTrue {run.path}\n"
    assert not worker.is_alive()


def test_started_worker_is_written_down(run, sleeper):
    assert recorded_worker(run) == sleeper
    assert sleeper.is_alive()
    assert sleeper.process_started_at == start_time(sleeper.pid)


def test_stop_sends_sigterm(sleeper):
    sleeper.stop()
    reap(sleeper)
    assert sleeper.exit_code() == -signal.SIGTERM


def test_kill_ends_the_workers_own_children_too(run):
    script = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    worker = start_worker(run, [sys.executable, "-c", script])
    while not (run.path / WORKER_LOG).read_text().endswith("\n"):
        assert worker.is_alive()
        time.sleep(0.01)
    child = psutil.Process(int((run.path / WORKER_LOG).read_text()))
    worker.kill()
    reap(worker)
    psutil.wait_procs([child], timeout=LIMIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_reused_pid_is_neither_alive_nor_signalled(sleeper):
    stranger = WorkerProcess(
        pid=sleeper.pid,
        process_started_at=sleeper.process_started_at - 100,
        host=sleeper.host,
        detached=True,
    )
    assert not stranger.is_alive()
    stranger.kill()
    stranger.stop()
    assert sleeper.is_alive()


def test_process_that_is_not_ours_is_never_signalled():
    this = this_process()
    assert this.is_alive()
    this.stop()
    this.kill()
    assert this.pid == os.getpid()


def test_directory_that_is_gone_is_said(run):
    with pytest.raises(StoreError, match="no longer there"):
        start_worker(run, [sys.executable, "-c", ""], directory=run.path / "gone")


def test_launch_lock_keeps_others_out(run):
    first, second = launch_lock(run, wait=False), launch_lock(run, wait=False)
    with first, pytest.raises(BlockingIOError), second:
        pass
    with launch_lock(run, wait=False):
        pass


def test_unreadable_record_of_a_worker_counts_as_none(run):
    (run.path / "worker.json").write_text("{")
    assert recorded_worker(run) is None
    assert worker_lock_is_free(run)


def test_one_worker_is_plain_unless_others_may_join_it():
    assert program_for(1, spares=1) == WORKER
    assert program_for(1, spares=1, is_elastic=True)[:3] == SUPERVISOR
    assert program_for(2, spares=1)[:3] == SUPERVISOR
    one = program_for(1, spares=1, is_asynchronous=True)
    assert one == (*ASYNCHRONOUS, "--devices", "1")


def test_a_run_is_asynchronous_by_name_or_by_choice_of_its_workers(run):
    assert is_asynchronous(run, "asynchronous")
    assert not is_asynchronous(run, "auto")
    (run.path / Area.SERVERS).mkdir()
    assert is_asynchronous(run, "auto")
