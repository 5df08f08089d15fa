"""Processes: who they are, how they are stopped and reaped, and how they ended."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.waiting import LIMIT_S, wait_until
from yunlu.core import processes
from yunlu.core.cgroup import count_oom_kills
from yunlu.core.processes import (
    ExitDescriber,
    ProcessHandle,
    SignalPipe,
    describe_exit,
    forward_signals,
    piped_process,
    process_began_at,
    start_process,
    start_time,
    stop_process,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEP = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = start_process(program(SLEEP), is_piped=True)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    stop_process(child, number=signal.SIGKILL)


def test_a_process_is_known_by_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    handle = ProcessHandle(sleeper.pid, start_time(sleeper.pid))
    stranger = ProcessHandle(sleeper.pid, handle.started_at - 100)
    assert handle.is_alive()
    assert not stranger.is_alive()
    stranger.send_signal(signal.SIGKILL)
    assert handle.is_alive()
    handle.send_signal(signal.SIGTERM)
    assert sleeper.wait(LIMIT_S) == -signal.SIGTERM
    assert not handle.is_alive()
    handle.send_signal(signal.SIGKILL)


def test_a_process_is_the_same_after_the_clock_was_set(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = ProcessHandle(sleeper.pid, start_time(sleeper.pid))
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 60.0)
    assert handle.is_alive()


def test_the_beginning_of_a_process_is_given_by_the_system_clock_too() -> None:
    assert process_began_at() == pytest.approx(psutil.Process().create_time(), abs=2.0)


def test_a_name_with_brackets_and_spaces_does_not_move_the_start_time(tmp_path: Path) -> None:
    odd = tmp_path / "a) b (c"
    odd.symlink_to("/bin/sleep")
    child = start_process([str(odd), "600"])
    try:
        assert start_time(child.pid) == psutil.Process(child.pid)._proc.create_time(monotonic=True)
    finally:
        stop_process(child, number=signal.SIGKILL)


@pytest.mark.parametrize("pid", [0, -1, 1 << 40, "x"])
def test_what_is_no_pid_is_nobody(pid: int) -> None:
    ProcessHandle(pid, start_time()).send_signal(signal.SIGKILL)
    assert not ProcessHandle(pid, start_time()).is_alive()


def test_output_goes_to_the_log_and_input_is_closed(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.stdin.read() == '', os.getsid(0) == os.getpid(), os.getcwd())"
    with (tmp_path / "log").open("ab") as log:
        child = start_process(
            program(text),
            log=log,
            directory=tmp_path,
            own_session=True,
        )
    assert child.wait(LIMIT_S) == 0
    assert (tmp_path / "log").read_text() == f"True True {tmp_path}\n"


@pytest.mark.parametrize(
    ("text", "number"), [(SLEEP, signal.SIGTERM), (STUBBORN, signal.SIGKILL)], ids=["obeys", "not"]
)
def test_who_does_not_end_in_time_is_killed_and_reaped(text: str, number: int) -> None:
    child = start_process(program(text), is_piped=True)
    assert child.stdout is not None
    child.stdout.readline()
    stop_process(child, grace_s=LIMIT_S if number == signal.SIGTERM else 0.05)
    assert child.returncode == -number
    assert child.stdout.closed


def test_a_piped_process_ends_with_its_block() -> None:
    with piped_process(program(SLEEP)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
    assert child.returncode is not None
    assert not psutil.pid_exists(child.pid)


def test_stop_signals_are_forwarded_and_handlers_come_back() -> None:
    before, stopped = signal.getsignal(signal.SIGTERM), list[int]()
    with forward_signals(lambda: stopped.append(1)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stopped == [1, 1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_makes_a_pipe_readable() -> None:
    before, pipe = signal.getsignal(signal.SIGUSR1), SignalPipe()
    try:
        pipe.listen(signal.SIGUSR1)
        assert pipe.take() == set()
        signal.raise_signal(signal.SIGUSR1)
        assert select.select([pipe], [], [], LIMIT_S)[0] == [pipe]
        assert pipe.take() == {signal.SIGUSR1}
        pipe.wake()
        assert select.select([pipe], [], [], LIMIT_S)[0] == [pipe]
        assert not pipe.take() & {signal.SIGUSR1}
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        pipe.close()


def test_endings_are_described() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert describe_exit(-99) == "ended by signal 99"


def test_an_out_of_memory_kill_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([2, 3, 3])
    monkeypatch.setattr(processes, "_own_oom_kills", lambda: next(kills))
    exits = ExitDescriber()
    assert exits.describe(-9) == "ended by SIGKILL: killed by the system, out of memory"
    assert exits.describe(-9) == "ended by SIGKILL"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\noom 4\noom_kill 3\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_of_a_group_are_counted_in_both_versions(
    name: str, text: str, tmp_path: Path
) -> None:
    assert count_oom_kills(tmp_path) == 0
    (tmp_path / name).write_text(text)
    assert count_oom_kills(tmp_path) == 3


FORKS = """
import os, signal, sys, time
from yunlu.core.processes import ForkedProcesses
children = ForkedProcesses()
def say(text):
    os.write(1, text.encode() + b"\\n")
def fail():
    raise RuntimeError("this is printed")
def wait():
    say(f"{os.getsid(0) == os.getpid()} {signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}")
    signal.pause()
def ignore():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("ignores")
    while True:
        signal.pause()
signal.signal(signal.SIGTERM, lambda *_: None)
children.fork("seven", lambda: 7)
children.fork("fails", fail)
"""
ENDS = (
    FORKS
    + """
ended = dict(children.end(patience_s=600))
waiting = children.fork("waits", wait)
children.fork("ignores", ignore)
sys.stdin.readline()
for pid in children.running:
    os.kill(pid, signal.SIGTERM)
ended |= dict(children.end([waiting], patience_s=600))
say(str(list(children.running.values())))
ended |= dict(children.end(patience_s=0.05))
say(str(sorted(ended.items())))
"""
)
DIES = (
    FORKS
    + """
say(str(children.fork("waits", wait, dies_with_parent=True)))
sys.stdin.readline()
"""
)


def test_forked_children_are_reaped_ended_and_killed() -> None:
    with subprocess.Popen(program(ENDS), stdin=-1, stdout=-1, stderr=-1, text=True) as parent:
        assert parent.stdout is not None
        told = sorted(parent.stdout.readline() for _ in range(2))
        assert told == ["True True\n", "ignores\n"]
        out, errors = parent.communicate("go\n", timeout=LIMIT_S)
    codes = [("fails", 1), ("ignores", -9), ("seven", 7), ("waits", -15)]
    assert out == f"['ignores']\n{codes}\n"
    assert "RuntimeError: this is printed" in errors


def test_a_child_that_dies_with_its_parent_is_not_left() -> None:
    with subprocess.Popen(program(DIES), stdin=-1, stdout=-1, stderr=-1, text=True) as parent:
        assert parent.stdout is not None
        told = [parent.stdout.readline().strip() for _ in range(2)]
        (child,) = [int(text) for text in told if text.isdigit()]
        parent.kill()
        parent.wait(LIMIT_S)
    wait_until(lambda: not _runs(child), "its child to end")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
