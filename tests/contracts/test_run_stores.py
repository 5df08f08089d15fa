"""Every run store keeps the contract; readers of a run need no path."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.contracts.memory_store import MemoryRunStore
from tests.waiting import LIMIT_S
from yunlu.core.errors import StoreError
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.run import log_tail, move, new_record, recent_metrics, replay
from yunlu.jobs.run_log import follow
from yunlu.runs.events import AttemptStarted, ErrorRaised, StateChanged
from yunlu.runs.fold import read_view
from yunlu.runs.home import DirectoryRunStore, find_runs, new_run, open_run
from yunlu.runs.run_store import (
    WORKER_LOG,
    Area,
    Claim,
    Document,
    Log,
    read_job,
    require_local,
    text_logs,
    write_job,
)
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.testing.run_stores import RunStoreContract

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

JOB = Job.model_validate(
    {"name": "here", "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
)


class TestDirectoryRunStore(RunStoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "run-1"
        self.path.mkdir()

    def make_store(self) -> RunStore:
        return DirectoryRunStore(self.path)

    def reopen(self, run: RunStore) -> RunStore:
        return open_run(run.address)


class TestMemoryRunStore(RunStoreContract):
    def make_store(self) -> RunStore:
        return MemoryRunStore()

    def reopen(self, run: RunStore) -> RunStore:
        assert isinstance(run, MemoryRunStore)
        return MemoryRunStore(run.id, run.items)


def test_everything_in_a_run_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    before = os.umask(0)
    try:
        run.write(Document.WORKER_GROUP, "{}", durable=False)
        run.write(Document.JOB, "{}")
        run.write("usage/node.json", "{}")
        run.append(Log.METRICS, [{"step": 1}])
        require_local(run).open_text_log(WORKER_LOG).close()
        require_local(run).open_text_log(f"{Area.LOGS}/worker-1.log").close()
        with run.claim(Claim.WORKER, wait=False):
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert len(modes) == 9
    assert modes == {name: 0o700 if name in {"usage", "logs"} else 0o600 for name in modes}


def test_events_are_masked_as_they_are_written(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.warn("cannot open https://me:hunter2@host/x")
    assert b"hunter2" not in (run.read(Log.EVENTS) or b"")
    assert [event.message for event, _ in run.read_events()] == ["cannot open https://***@host/x"]


def test_torn_records_are_skipped(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    (tmp_path / Log.METRICS).write_text('{"step": 1}\n{"st')
    assert [record for record, _ in run.read_log(Log.METRICS)] == [{"step": 1}]
    run.append(Log.METRICS, [{"step": 2}])
    assert [record for record, _ in run.read_log(Log.METRICS)] == [{"step": 1}, {"step": 2}]


def test_a_claim_is_passed_on_to_the_program_that_replaces_a_process(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from yunlu.runs.home import open_run\n"
        "from yunlu.runs.run_store import Claim\n"
        "run = open_run(sys.argv[1])\n"
        "if len(sys.argv) == 2:\n"
        "    with run.claim(Claim.WORKER, wait=False) as claim:\n"
        "        own = claim.pass_on()\n"
        "        os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], own])\n"
        "with run.claim(Claim.WORKER, wait=False, passed_on=sys.argv[2]):\n"
        "    assert open_run(sys.argv[1]).is_claimed(Claim.WORKER)\n"
        "assert not run.is_claimed(Claim.WORKER)\n"
    )
    (tmp_path / "program.py").write_text(script)
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    subprocess.run(words, check=True, timeout=LIMIT_S)


def test_a_forked_child_does_not_keep_a_claim(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    is_up, said_up = os.pipe()
    to_end, end = os.pipe()
    with run.claim(Claim.WORKER, wait=False):
        child = os.fork()
        if child == 0:  # outlives the claim of its parent
            os.write(said_up, b"1")
            os.close(end)
            os.read(to_end, 1)
            os._exit(0)
        assert os.read(is_up, 1) == b"1"
        assert run.is_claimed(Claim.WORKER)
    assert not run.is_claimed(Claim.WORKER)
    os.close(end)
    os.waitpid(child, 0)
    for descriptor in (is_up, said_up, to_end):
        os.close(descriptor)


def test_a_new_run_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail() -> None:
        with new_run(tmp_path, "run-2") as run:
            run.write(Document.JOB, "{}")
            raise RuntimeError

    with new_run(tmp_path, "run-1") as run:
        run.write(Document.JOB, "{}")
        assert list(find_runs(tmp_path)) == []
    with pytest.raises(RuntimeError):
        fail()
    assert [run.id for run in find_runs(tmp_path, having=Document.JOB)] == ["run-1"]
    assert list(find_runs(tmp_path, having=Document.PLAN)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run-1"]


@pytest.fixture
def remote() -> MemoryRunStore:
    """A failed run that no file system holds."""
    run = MemoryRunStore()
    write_job(run, JOB)
    run.emit(StateChanged(state=RunState.PENDING, reason="submitted"))
    run.emit(AttemptStarted(number=1, pid=1, process_started_at=1.0, began_at=1.0))
    run.emit(StateChanged(state=RunState.PLANNING))
    run.emit(StateChanged(state=RunState.RUNNING))
    run.append(Log.METRICS, [{"step": n, "loss": 1.0 / n, "at": 1.0 + n} for n in range(1, 4)])
    run.write(WORKER_LOG, "out of luck\n")
    run.emit(ErrorRaised(code="training", message="diverged"))
    run.emit(StateChanged(state=RunState.FAILED))
    return run


def test_the_fold_needs_no_path(remote: MemoryRunStore) -> None:
    record = new_record(remote)
    assert record is not None
    record = replay(remote, record)
    assert (record.state, record.error) == (RunState.FAILED, "diverged")
    assert read_view(remote).state is RunState.FAILED
    assert [metrics["step"] for metrics in recent_metrics(remote)] == [1, 2, 3]
    assert log_tail(remote) == ["out of luck"]
    assert read_job(remote) == JOB
    again = move(remote, record, RunState.PENDING, reason="resumed")
    assert again.state is RunState.PENDING


def test_following_needs_no_path(remote: MemoryRunStore) -> None:
    items = [item for update in follow(remote, poll_s=0.0) for item in update.items]
    kinds = [getattr(item, "kind", "metrics") for item in items]
    assert kinds.count("metrics") == 3
    assert kinds.count("error") == 1


def test_the_report_needs_no_path(remote: MemoryRunStore) -> None:
    report = build_report(remote)
    assert (report.run_id, report.path) == (remote.id, "memory://memory-run")
    assert report.state is RunState.FAILED
    assert report.step == 3


def test_local_files_are_refused_where_there_are_none(remote: MemoryRunStore) -> None:
    assert text_logs(remote) == (WORKER_LOG,)
    with pytest.raises(StoreError, match="no directory of this machine"):
        require_local(remote).directory(Area.MODEL)
