"""A run that takes more memory than it may ends alone, and it is told why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from yunlu.executors import local, memory_limits
from yunlu.executors.local import LocalExecutor
from yunlu.hardware.accelerators import VisibleDevices
from yunlu.hardware.fleet import Placement
from yunlu.jobs.run import MEMORY, detect_lost, error_of, new_record
from yunlu.runs.events import StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, RunStore
from yunlu.runs.states import RunState

needs_groups = pytest.mark.skipif(
    memory_limits.find_kind() is None, reason="control groups for memory cannot be made here"
)
GIB = 1 << 30
MOST = 200 << 20
_HOG = """
import sys
sys.stdin.readline()
hoard = []
while True:
    hoard.append(bytearray(8 << 20))
    print(len(hoard), flush=True)
"""
_SUPERVISOR = """
import subprocess, sys, time
while "yunlu-" not in open("/proc/self/cgroup").read():
    time.sleep(0.01)
child = subprocess.Popen([sys.executable, "-c", "hoard = [bytearray(8 << 20) for _ in range(400)]"])
child.wait()
time.sleep(600)  # goes on, as a supervisor does that has lost a worker
"""


@pytest.mark.parametrize(
    ("total", "devices", "of", "declared", "expected"),
    [
        (16 * GIB, 1, 4, None, 4 * GIB),  # its share
        (16 * GIB, 4, 4, None, 16 * GIB),
        (16 * GIB, 1, 64, None, 2 * GIB),  # enough to begin with
        (1 * GIB, 1, 4, None, 1 * GIB),  # all there is
        (16 * GIB, 1, 4, 1.0, 4 * GIB),  # who says less may still take a whole share
        (64 * GIB, 1, 16, 8.0, int(10e9) + GIB),  # who says more gets it, with head-room
        (64 * GIB, 2, 16, 8.0, int(20e9) + GIB),  # for each device
        (16 * GIB, 1, 4, 100.0, 16 * GIB),  # but not more than there is
    ],
)
def test_run_may_take_its_share_or_what_its_job_says(
    total: int, devices: int, of: int, declared: float | None, expected: int
) -> None:
    chosen = memory_limits.choose_bytes(total=total, devices=devices, of=of, declared_gb=declared)
    assert chosen == expected


def test_where_no_group_can_be_made_nothing_is_limited_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limits, "find_kind", lambda: None)
    memory_limits.limit("run", os.getpid(), most_bytes=1)
    memory_limits.change("run", most_bytes=1)
    memory_limits.forget("run")
    memory_limits.sweep()
    assert memory_limits.report_exceeded("run") is None
    assert "memory is not limited" in LocalExecutor("local").capabilities().limits


def test_groups_are_made_as_high_as_no_limit_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "container" / "session"
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory_limits, "_V1", tmp_path)
    monkeypatch.setattr(memory_limits.cpu_limits, "own_group", lambda _: "container/session")
    no_limit = str((1 << 63) - 4096)
    for folder, text in ((inner, no_limit), (tmp_path / "container", str(GIB))):
        (folder / "memory.limit_in_bytes").write_text(text)
    assert memory_limits._home_v1() == tmp_path / "container"
    (tmp_path / "container" / "memory.limit_in_bytes").write_text(no_limit)
    assert memory_limits._home_v1() == tmp_path


@pytest.fixture
def hog() -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", _HOG]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as child:
        yield child
        child.kill()


@needs_groups
def test_who_grows_beyond_its_limit_is_ended_and_nobody_else(
    hog: subprocess.Popen[str],
) -> None:
    run_id = f"test-{os.getpid()}"
    memory_limits.limit(run_id, hog.pid, most_bytes=MOST // 2)
    memory_limits.change(run_id, most_bytes=MOST)
    assert memory_limits.report_exceeded(run_id) is None
    out, _ = hog.communicate("\n")
    assert hog.returncode == -signal.SIGKILL
    assert 8 * len(out.split()) <= MOST >> 20
    told = memory_limits.report_exceeded(run_id)
    assert told is not None
    assert "more memory than its limit of 200.0 MiB" in told
    memory_limits.sweep()
    assert memory_limits.report_exceeded(run_id)  # nobody has been told yet
    memory_limits.forget(run_id)
    assert memory_limits.report_exceeded(run_id) is None


@needs_groups
def test_end_that_was_read_is_not_told_again_though_something_of_it_is_still_ending(
    hog: subprocess.Popen[str],
) -> None:
    run_id = f"test-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as lingering:
        memory_limits.limit(run_id, lingering.pid, most_bytes=MOST)
        (memory_limits._group_of(run_id) / "cgroup.procs").write_text(str(hog.pid))  # type: ignore[operator]
        hog.communicate("\n")
        assert memory_limits.report_exceeded(run_id)
        memory_limits.forget(run_id)
        assert memory_limits.report_exceeded(run_id) is None
        lingering.kill()
    memory_limits.sweep()
    assert not memory_limits._group_of(run_id).exists()  # type: ignore[union-attr]


@needs_groups
def test_limit_is_never_set_below_what_is_taken(hog: subprocess.Popen[str]) -> None:
    run_id = f"test-{os.getpid()}"
    memory_limits.limit(run_id, hog.pid, most_bytes=GIB)
    assert hog.stdin is not None
    assert hog.stdout is not None
    hog.stdin.write("\n")
    hog.stdin.flush()
    for _ in range(10):
        hog.stdout.readline()
    os.kill(hog.pid, signal.SIGSTOP)
    memory_limits.change(run_id, most_bytes=1 << 20)
    assert memory_limits.report_exceeded(run_id) is None
    assert hog.poll() is None
    hog.kill()
    hog.wait()
    memory_limits.forget(run_id)


@needs_groups
def test_run_one_of_whose_workers_outgrew_it_ends_whole_as_failed_beside_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"greedy": _SUPERVISOR, "modest": "import time; time.sleep(600)"}

    def program(store: RunStore, devices: int) -> tuple[str, ...]:
        return (sys.executable, "-c", programs[store.id])

    monkeypatch.setattr(local, "lead_program", program)
    monkeypatch.setattr(local, "visible_devices", VisibleDevices)
    monkeypatch.setattr(memory_limits, "choose_bytes", lambda **_: MOST)
    executor = LocalExecutor("local://?node=here&devices=2")
    runs = {name: open_run(tmp_path / name) for name in programs}
    try:
        for run in runs.values():
            run.path.mkdir()
            (run.path / Document.JOB).write_text(
                json.dumps({"task": "x", "model": {"name": "mlp"}})
            )
            run.emit(StateChanged(state="pending"))
            executor.start(run, Placement((("here", 1),)))
            run.emit(StateChanged(state="planning"))
        greedy, modest = runs["greedy"], runs["modest"]

        def has_failed() -> bool:
            record = new_record(greedy)
            assert record is not None
            state = detect_lost(greedy, record).state
            executor.status(greedy)
            return state is RunState.FAILED

        wait_until(has_failed, "the failure of the one that outgrew its limit")
        error = error_of(event for event, _ in greedy.read_events())
        assert error is not None
        assert error.code == MEMORY
        assert "more memory than its limit" in error.message
        assert "train.memory_gb" in str(error.hint)
        assert executor.status(modest).is_alive
        assert not executor.status(greedy).is_alive
        assert memory_limits.report_exceeded(greedy.id) is None  # the next attempt begins afresh
    finally:
        for run in runs.values():
            executor.stop(run, now=True)
            wait_until(lambda run=run: not executor.status(run).is_alive, f"the end of {run.id}")
