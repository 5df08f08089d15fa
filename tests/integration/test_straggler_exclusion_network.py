"""One of three hosts has a link far worse than the others': they go on without it, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.netrig import Rig, why_no_rig

from tests.distributed.test_worker_groups import (
    FEWER,
    Runs,
    check_run,
    events,
    losses,
    wait,
    wait_for_end,
    wait_for_step,
    worker_group_of,
    write_job,
)
from tests.waiting import LIMIT_S
from yunlu.runs.events import CommunicationChosen, RefusedSetting, WorkerGroupFormed, WorkerLost
from yunlu.runs.home import open_run
from yunlu.runs.run_store import RunStore

pytestmark = [pytest.mark.network_rig, pytest.mark.slow]

SLOW = "2mbit"


@pytest.fixture
def rig() -> Iterator[Rig]:
    reason = why_no_rig()
    if reason is not None:
        pytest.skip(reason)
    with Rig(3, rate="100mbit", prefix=f"yl{os.getpid() % 10_000}") as made:
        made.rate(2, SLOW)
        yield made


@pytest.fixture
def runs(tmp_path: Path, own_home: Path) -> Iterator[Runs]:
    write_job(tmp_path)
    made = Runs(tmp_path, own_home)
    try:
        yield made
    finally:
        made.end()


def call(rig: Rig, host: int, runs: Runs, *words: str, **more: str) -> subprocess.Popen[bytes]:
    home = os.environ["YUNLU_HOME"]
    environment = {"YUNLU_HOME": home, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "yunlu.cli.main", *words]
    return rig.run(host, command, environment=environment, cwd=runs.directory)


def sizes_of(run: RunStore) -> list[int]:
    return [len(event.ranks) for event in events(run, WorkerGroupFormed)]


def test_launched_workers_go_on_without_the_slow_one_and_end_together(
    rig: Rig, runs: Runs, own_home: Path
) -> None:
    steps = f"train.steps={FEWER}"
    alone = losses(runs.start("--set", steps, detach=False))
    before = set(own_home.glob("*-*"))
    started = [
        call(
            rig, host, runs, "train", "job.yaml", "--set", steps, RANK=str(host), WORLD_SIZE="3",
            LOCAL_RANK="0", MASTER_ADDR=rig.address(0), MASTER_PORT="29400",
        )
        for host in rig.hosts
    ]  # fmt: skip
    assert [each.wait(LIMIT_S) for each in started] == [0, 0, 0]
    (path,) = set(own_home.glob("*-*")) - before
    run = open_run(path)
    check_run(run, alone, steps=FEWER)
    # Of the other two, the first alone may be faster: the model is small.
    first, *later = events(run, WorkerGroupFormed)
    assert [each.worker for each in first.ranks] == ["0", "1", "2"]
    assert later
    assert all({each.worker for each in event.ranks} <= {"0", "1"} for event in later)
    assert "excluded" in later[0].reason
    chosen, *anew = events(run, CommunicationChosen)
    refused = RefusedSetting(name="asynchronous", reason="a worker is excluded")
    assert all(refused in each.refused for each in anew)
    alone_from = [event.from_step for event in later if len(event.ranks) == 1]
    assert not [event for event in anew if event.step > min(alone_from, default=FEWER)]
    assert 2 in chosen.excluded
    assert rig.address(2) in chosen.reason.rpartition("; ")[2]


@pytest.mark.long
def test_machine_that_joined_steps_aside_and_stays_at_hand(
    rig: Rig, runs: Runs, own_home: Path, tmp_path: Path
) -> None:
    steps = 600
    # At this rate rounding does not grow in as many steps.
    words = ("--set", f"train.steps={steps}", "--set", "train.optimizer.lr=0.00003")
    alone = losses(runs.start(*words, detach=False))
    before = set(own_home.glob("*-*"))
    words = ("train", "job.yaml", *words, "--devices", "2", "--detach", "--json")
    assert call(rig, 0, runs, *words, YUNLU_BIND=rig.address(0)).wait(LIMIT_S) == 0
    (path,) = set(own_home.glob("*-*")) - before
    run = open_run(path)
    runs.started.append(run)
    wait_for_step(run, 2)
    group = worker_group_of(run)
    (tmp_path / "token").write_text(group.token)
    words = ("join", f"{group.host}:{group.port}", "--devices", "1", "--name", "slow")
    call(rig, 2, runs, *words, "--token-file", "token", YUNLU_BIND=rig.address(2))

    def has_left() -> bool:
        reasons = [event.reason for event in events(run, WorkerGroupFormed)]
        return any("excluded as a straggler" in reason for reason in reasons)

    wait(run, has_left, "the slow one to step aside")
    assert sizes_of(run)[-1] == 2
    assert worker_group_of(run).target == 3  # its device is still the run's
    assert not events(run, WorkerLost)
    for step in range(150, steps, 150):
        wait_for_step(run, step)
    wait_for_end(run)
    check_run(run, alone, steps=steps)
