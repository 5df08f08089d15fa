"""A worker group with a slow worker, which chooses to go on asynchronously."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import test_asynchronous as near
from tests.integration.conftest import Yunlu
from tests.waiting import LIMIT_S
from yunlu.jobs import lifecycle
from yunlu.jobs.report_builder import build_report
from yunlu.runs.events import AttemptStarted, CommunicationChosen, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area
from yunlu.runs.worker_group import read_worker_group

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TASK = """
import os
import time

import torch

from yunlu.planning.communication import step_forecast
from yunlu.training.communication import engine_communication
from yunlu.training.tasks.language_modeling import LanguageModeling

step_forecast.ASYNCHRONOUS_S = 0.1  # the run is short, and is to find it worth its while
_forks = 0
_slow_s = 0.0


def _count():
    global _forks
    _forks += 1


def _begin():
    # Of a worker group, after the process that plans and two workers, the third; of the asynchronous, after
    # the chief, the server and a worker, the second. It is slow in whatever it computes.
    global _slow_s
    if _forks == 4:
        _slow_s, product = 0.03, torch.mm
        torch.mm = lambda *given, **more: (time.sleep(_slow_s), product(*given, **more))[1]


# What other programs leave of the machine would decide otherwise.
engine_communication.measure_turns = lambda *_: 10.0 if _slow_s else 100.0
os.register_at_fork(before=_count, after_in_child=_begin)


class Uneven(LanguageModeling):
    def loss(self, *given, **more):
        time.sleep(_slow_s)
        return super().loss(*given, **more)
"""


def write_job(place: Path, *, steps: int) -> None:
    near.write_job(place, steps=steps)
    (place / "uneven.py").write_text(TASK)
    job = (place / "job.yaml").read_text()
    named = "communication: {method: asynchronous, servers: 2, staleness: 2}"
    assert named in job
    job = job.replace(named, "communication: relaxed\nspares: 0")
    (place / "job.yaml").write_text(job.replace("language-modeling", "uneven:Uneven"))


def test_a_slow_worker_is_found_before_the_first_step_and_nobody_waits_for_it(
    yunlu: Yunlu, own_home: Path, tmp_path: Path
) -> None:
    write_job(tmp_path, steps=90)
    done = yunlu("train", "job.yaml", "--devices", "3")
    assert done.code == 0, done.err
    (path,) = own_home.glob("*-*")
    run = open_run(path)
    assert lifecycle.read_record(run).state == "finished"
    assert len(near.events_of(run, AttemptStarted)) == 1
    (choice,) = near.events_of(run, CommunicationChosen)
    assert choice.setting.method == "asynchronous"
    fast, also_fast, slow = choice.links.compute_s
    assert slow > 3 * max(fast, also_fast)
    others = {each.name: each.cost_s for each in choice.candidates}
    assert others["all-reduce"] > others[choice.chosen]
    assert sorted(near.losses(run)) == [*range(1, 91)]
    near.check_ledger(run, 90)
    first, *_, last = near.losses(run).values()
    assert last < first - 1
    told = build_report(run).communication
    assert told is not None
    step = told.newest.expectation("step_s")
    assert step is not None
    assert step.predicted is not None
    assert step.measured is not None
    assert (run.path / Area.MODEL / "model.safetensors").exists()


@pytest.mark.long
def test_a_machine_that_has_joined_goes_over_with_the_others(
    yunlu: Yunlu, own_home: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Two workers start evenly; with the slow third all go over, and what was learnt stays."""
    write_job(tmp_path, steps=200_000)
    text = (tmp_path / "uneven.py").read_text()
    # The first worker group has no third worker; whoever joins begins with its first.
    (tmp_path / "uneven.py").write_text(
        text.replace("_forks == 4", "_forks == 1 and _is_far()") + FAR
    )
    started = yunlu("train", "job.yaml", "--devices", "2", "--detach", "--json")
    assert started.code == 0, started.err
    (path,) = own_home.glob("*-*")
    run = open_run(path)
    try:
        near.wait_for_step(run, 10)
        assert near.events_of(run, CommunicationChosen)[-1].setting.method != "asynchronous"
        group = read_worker_group(run)
        assert group is not None
        (tmp_path / "token").write_text(group.token)
        words = ["join", f"{group.host}:{group.port}", "--name", "far", "--token-file", "token"]
        command = [sys.executable, "-m", "yunlu.cli.main", *words]
        far = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
        near.wait_until(run, lambda: near.count_done(run, "far.") > 3, "work of the joined machine")
        chosen = near.events_of(run, CommunicationChosen)[-1]
        assert chosen.setting.method == "asynchronous"
        assert chosen.step >= 10
        groups = near.events_of(run, WorkerGroupFormed)
        assert [each.generation for each in groups] == [*range(1, len(groups) + 1)]
        members = [each.worker for each in groups[-1].ranks]
        assert members == [0, 1, "far.0"]
        assert lifecycle.stop(run).state == "stopped"
        assert far.wait(LIMIT_S) == 0
        kept = max(near.losses(run))
        near.check_ledger(run, kept)
        assert yunlu("resume", run.id, "--detach").code == 0
        near.wait_for_step(run, kept + 5)
        assert near.events_of(run, CommunicationChosen)[-1].reason.startswith("as before")
        assert lifecycle.stop(run).state == "stopped"
        near.check_ledger(run, max(near.losses(run)))
    finally:
        lifecycle.stop(run, now=True)


FAR = """

def _is_far():
    import sys

    return "far" in sys.orig_argv
"""
