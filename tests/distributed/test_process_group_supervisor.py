"""Processes that are forked again when they die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from yunlu.core.errors import DataError, YunluError
from yunlu.runs.events import WorkerLost
from yunlu.runs.home import open_run
from yunlu.training.asynchronous.process_group_supervisor import (
    ManagedProcess,
    ProcessGroupSupervisor,
)

pytestmark = pytest.mark.distributed


def _live(_rank: int, directory: Path, what: str) -> Any:
    """In a process of its own: who forks must not have threads."""
    processes = ProcessGroupSupervisor(open_run(directory), is_ending=lambda: what == "sent away")
    tries = directory / "tries"
    tries.touch()

    def body() -> None:
        tries.write_bytes(tries.read_bytes() + b".")
        count = tries.stat().st_size
        if what == "killed once" and count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sent away" and count == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "bad data":
            raise DataError("There is no such column.", hint="Name another.")
        if what == "broken":
            raise RuntimeError(f"try {count}")

    place, idle = ManagedProcess("worker-0", body, number=0), ManagedProcess("idle", _wait_for_ever)
    try:
        while not place.is_done:
            processes.keep_alive(place, idle)
            time.sleep(0.01)
            processes.reap()
    except YunluError as error:
        return error.code, error.message, error.hint, tries.stat().st_size
    finally:
        processes.end()
    return idle.pid, tries.stat().st_size


def _wait_for_ever() -> None:
    signal.pause()


def test_a_killed_process_is_replaced_and_none_is_left(tmp_path: Path):
    (answer,) = run_ranks(_live, 1, tmp_path, "killed once")
    idle, tries = answer
    assert tries == 2
    with pytest.raises(ProcessLookupError):
        os.kill(idle, 0)
    (fault,) = [event for event, _ in open_run(tmp_path).read_events()]
    assert (fault.cause, fault.worker) == ("killed", "0")
    assert fault.detail == "ended by SIGKILL"


def test_who_is_sent_away_with_everyone_is_no_fault(tmp_path: Path):
    ((_, tries),) = run_ranks(_live, 1, tmp_path, "sent away")
    assert tries == 2  # what it had in hand is done
    assert list(open_run(tmp_path).read_events()) == []


def test_what_the_user_must_mend_is_not_tried_again(tmp_path: Path):
    (answer,) = run_ranks(_live, 1, tmp_path, "bad data")
    assert answer == ("data", "There is no such column.", "Name another.", 1)


def test_after_several_quick_deaths_the_first_failure_is_told(tmp_path: Path):
    (answer,) = run_ranks(_live, 1, tmp_path, "broken")
    code, message, _, tries = answer
    assert (code, message, tries) == ("internal", "RuntimeError: try 1", 5)
    faults = [
        event for event, _ in open_run(tmp_path).read_events() if isinstance(event, WorkerLost)
    ]
    assert [fault.cause for fault in faults] == ["failed"] * 5
