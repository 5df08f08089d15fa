"""The program of a lease where there is nothing for it to do: it must not hold on to its devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from yunlu.executors.lease_executor import LeaseRecord, read_lease_events, write_record
from yunlu.executors.lease_runner import LeaseRunner, lead_program
from yunlu.runs.events import StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    made = open_run(tmp_path)
    (made.path / Document.JOB).write_text('{"spares": 2}')
    record, _ = LeaseRecord(address="slurm").grant("a", 1, is_lead=True)
    record, _ = record.grant("b", 2)
    write_record(made, record)
    made.emit(StateChanged(state="pending"))
    return made


def hold(run: RunStore, lease: str) -> int:
    words = [sys.executable, "-m", "yunlu.executors.lease_runner", str(run.path), lease]
    return subprocess.run(words, check=False, timeout=LIMIT_S, capture_output=True).returncode


@pytest.mark.parametrize("change", [{"is_ending": True}, {"leases": ()}])
def test_a_lease_that_is_not_wanted_any_more_is_given_back_at_once(
    run: RunStore, change: dict[str, object]
) -> None:
    record, _ = LeaseRecord(address="slurm").grant("a", 1, is_lead=True)
    write_record(run, record.model_copy(update=change))
    assert hold(run, "a.0") == 0
    assert not list(read_lease_events(run))


@pytest.mark.parametrize("lease", ["a.0", "b.1"])
@pytest.mark.parametrize("state", ["finished", "failed"])
def test_nobody_wakes_or_waits_for_a_run_that_is_over(
    run: RunStore, lease: str, state: str
) -> None:
    for each in ("planning", "running", state):
        run.emit(StateChanged(state=each))
    assert hold(run, lease) == 0
    assert [event.state for event, _ in run.read_events()][-1] == state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["planning", "running"], ["lost", "pending"]),
        (["planning", "running", "stopping", "stopped"], ["pending"]),
        ([], []),
    ],
)
def test_a_lead_that_comes_back_gives_the_run_another_life(
    run: RunStore, before: list[str], after: list[str]
) -> None:
    for state in before:
        run.emit(StateChanged(state=state))
    record, lease = LeaseRecord(address="slurm").grant("a", 1, is_lead=True)
    write_record(run, record)
    words, environment = LeaseRunner(run, "a.0").find_part(lease)
    assert "yunlu.training.elastic.supervisor" in words
    assert "YUNLU_BIND" in environment
    assert [event.state for event, _ in run.read_events()] == ["pending", *before, *after]


def test_even_a_run_on_one_device_has_a_supervisor(run: RunStore) -> None:
    words = lead_program(run, 1)
    assert words[-4:] == ("--devices", "1", "--spares", "2")
    (run.path / Document.JOB).write_text('{"communication": {"method": "asynchronous"}}')
    assert "yunlu.training.asynchronous.supervisor" in lead_program(run, 1)


def test_asynchronous_workers_share_a_step_with_those_on_other_nodes(run: RunStore) -> None:
    record, _ = LeaseRecord(address="slurm").grant("a", 1, is_lead=True)
    record, _ = record.grant("b", 3)
    write_record(run, record)
    assert "asynchronous" not in " ".join(lead_program(run, 1))
    (run.path / Area.SERVERS).mkdir()  # its worker group has chosen so
    words = lead_program(run, 1)
    assert words[-4:] == ("--devices", "1", "--shares", "4")
    assert "yunlu.training.asynchronous.supervisor" in words
