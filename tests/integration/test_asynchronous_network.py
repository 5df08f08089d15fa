"""Asynchronous workers on two hosts with a cable between them, which is pulled and put back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.netrig import Rig, why_no_rig

from tests.integration import test_asynchronous as near
from tests.waiting import LIMIT_S
from yunlu.jobs import lifecycle
from yunlu.runs.events import WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import RunStore
from yunlu.runs.worker_group import read_worker_group

pytestmark = [pytest.mark.network_rig, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(autouse=True)
def permitted() -> None:
    reason = why_no_rig()
    if reason is not None:
        pytest.skip(reason)


def test_a_host_that_is_cut_off_holds_nobody_up_and_works_again_when_it_is_back(
    own_home: Path, tmp_path: Path
) -> None:
    near.write_job(tmp_path, steps=200_000)
    environment = {"YUNLU_HOME": str(own_home), "OMP_NUM_THREADS": "1"}
    prefix = f"ya{os.getpid() % 10_000}"
    with Rig(2, rate="100mbit", prefix=prefix) as rig:

        def call(host: int, *words: str) -> subprocess.Popen[bytes]:
            bound = {**environment, "YUNLU_BIND": rig.address(host)}
            command = [sys.executable, "-m", "yunlu.cli.main", *words]
            return rig.run(host, command, environment=bound, cwd=tmp_path)

        assert (
            call(0, "train", "job.yaml", "--devices", "3", "--detach", "--json").wait(LIMIT_S) == 0
        )
        (path,) = own_home.glob("*-*")
        run = open_run(path)
        near.wait_for_step(run, 5)
        group = read_worker_group(run)
        assert group is not None
        assert group.host == rig.address(0)
        (tmp_path / "token").write_text(group.token)
        words = ("--devices", "2", "--name", "far", "--token-file", "token")
        call(1, "join", f"{group.host}:{group.port}", *words)
        near.wait_until(run, lambda: near.count_done(run, "far.") > 5, "work from the other host")

        rig.cut(1)
        near.wait_until(run, lambda: "far" in near.members_lost(run), "its loss to be told")
        near.wait_until(run, lambda: _no_more(run), "what it had in hand to be done by others")
        before = near.count_done(run, "far.")
        near.wait_for_step(run, max(near.losses(run)) + 30)
        assert near.count_done(run, "far.") == before

        rig.mend(1)
        near.wait_until(run, lambda: near.count_done(run, "far.") > before + 5, "it to come back")
        assert lifecycle.stop(run).state == "stopped"
        kept = max(near.losses(run))
        near.check_ledger(run, kept)
        near.check_staleness(run, most=2)


def _no_more(run: RunStore) -> bool:
    """Whether the worker group is told to be those of the first host."""
    ranks = near.events_of(run, WorkerGroupFormed)[-1].ranks
    return [each.worker for each in ranks] == ["0", "1", "2"]
