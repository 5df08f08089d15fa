"""Launches: what does not go with one is refused, and a restart is told from a new beginning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from yunlu.core.errors import JobError
from yunlu.core.launch import LaunchInfo
from yunlu.jobs import launch, lifecycle
from yunlu.runs.run_store import RunStore
from yunlu.spec.job import Job

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
JOB: dict[str, Any] = {"task": "language-modeling", "model": "transformer", "data": "text.txt"}
PLACE = LaunchInfo(
    rank=0,
    size=2,
    local_rank=0,
    host="localhost",
    port=1,
    launcher="torchrun",
    id="none",
    restarts=1,
)


@pytest.fixture
def in_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_launch")
def test_what_does_not_go_with_a_launch_is_refused() -> None:
    assert launch.find_launch(Job.model_validate({**JOB, "devices": 2})) is not None
    with pytest.raises(JobError, match="devices: 3, and torchrun started 2"):
        launch.find_launch(Job.model_validate({**JOB, "devices": 3}))
    with pytest.raises(JobError, match="ends its workers"):
        launch.find_launch(Job.model_validate(JOB), waits=False)


def test_one_process_of_its_own_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch.find_launch(Job.model_validate({**JOB, "devices": 3}), waits=False) is None


def record(run: RunStore, place: LaunchInfo, **changes: str) -> None:
    data = launch.identify(place) | {"asker": "an earlier process"} | changes
    (run.path / "launch.json").write_text(json.dumps(data))


@pytest.mark.parametrize("name", [None, "named"])
def test_a_restart_finds_the_run_of_its_own_job(name: str | None) -> None:
    job = Job.model_validate({**JOB, "name": name})
    run = lifecycle.submit(job)
    record(run, PLACE)
    other = Job.model_validate({**JOB, "name": name, "data": "other.txt"})
    found = launch.find_previous_run(job, PLACE)
    assert found is not None
    assert found.path == run.path
    assert launch.find_previous_run(other, PLACE) is None


@pytest.mark.parametrize(
    ("place", "changes", "is_restart"),
    [
        (PLACE, {}, True),
        (replace(PLACE, restarts=0), {}, True),  # workers came or went: torchrun counts no restart
        (PLACE, {"agent": "another"}, False),  # all launches without a name are called none
        (replace(PLACE, id="night"), {"agent": "another"}, True),  # rank 0 moved
        (replace(PLACE, id="night", restarts=0), {"agent": "another"}, False),  # the next night
        (replace(PLACE, launcher="srun", id="7.0"), {"agent": "another"}, True),  # requeued
        (replace(PLACE, launcher="srun", id="7.0", restarts=0), {}, False),
        (replace(PLACE, launcher="mpirun", id="", restarts=0), {}, False),
    ],
)
def test_a_restart_is_told_from_a_new_launch(
    place: LaunchInfo, changes: dict[str, str], is_restart: bool
) -> None:
    job = Job.model_validate(JOB)
    record(lifecycle.submit(job), place, **changes)
    assert (launch.find_previous_run(job, place) is not None) is is_restart


def test_a_program_may_train_the_same_job_twice() -> None:
    job = Job.model_validate(JOB)
    run = lifecycle.submit(job)
    (run.path / "launch.json").write_text(json.dumps(launch.identify(PLACE)))
    assert launch.find_previous_run(job, PLACE) is None
