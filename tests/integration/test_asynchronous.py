"""Asynchronous workers as a user starts them: killed, stopped, resumed; every sample counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import waiting
from tests.integration.conftest import Yunlu
from tests.sample_events import EventT
from yunlu.core.files import read_lines
from yunlu.jobs import lifecycle
from yunlu.jobs.lifecycle import resize
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    DataOpened,
    ErrorRaised,
    Evaluated,
    StateChanged,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log, RunStore, last_record
from yunlu.runs.worker_group import read_worker_group
from yunlu.training.data.sample_order import StepOrder, digest_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, BATCH = 180, 24
MARGIN = 0.35
"""Of the final loss, in nats, over that of synchronous training, which begins at 5.6."""
JOB = f"""
task: language-modeling
model: {{name: transformer, args: {{width: 32, layers: 2, heads: 4}}}}
data: {{train: text.txt, max_length: 24, split: {{validation: 0.1, test: 0}}}}
communication: {{method: asynchronous, servers: 2, staleness: 2}}
train:
  steps: {STEPS}
  batch: {BATCH}
  micro_batch: 8
  optimizer: {{name: adamw, lr: 0.003, kernel: fused}}
  clip: 1.0
  schedule: {{name: constant, warmup: 0}}
  precision: fp32
  padding: pad
  compile: false
  threads: 1
  workers: 0
  evaluate: 90
  checkpoint: {{every: 30, keep_best: 0}}
"""


def write_job(place: Path, *, steps: int) -> None:
    """Something to learn, and what to do with it."""
    (place / "job.yaml").write_text(JOB.replace(f"steps: {STEPS}", f"steps: {steps}"))
    words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
    lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
    (place / "text.txt").write_text("\n".join(lines))


@pytest.fixture
def steps() -> int:
    return STEPS


@pytest.fixture
def run(yunlu: Yunlu, own_home: Path, tmp_path: Path, steps: int) -> Iterator[RunStore]:
    """A run of three workers, under way; none of its processes outlives the test."""
    write_job(tmp_path, steps=steps)
    started = yunlu("train", "job.yaml", "--devices", "3", "--detach", "--json")
    assert started.code == 0, started.err
    (path,) = own_home.glob("*-*")
    made = open_run(path)
    try:
        yield made
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if str(path) in (process.info["cmdline"] or []):
                process.kill()


@pytest.mark.long
def test_a_disturbed_run_learns_and_takes_every_sample_once(run: RunStore, yunlu: Yunlu):
    wait_for_step(run, 10)
    parent = psutil.Process(events_of(run, AttemptStarted)[-1].pid)
    _kill(events_of(run, WorkerGroupFormed)[-1].ranks[1].pid)
    wait_for_step(run, 20)
    _kill(_server(run, parent, index=1))
    wait_for_step(run, 30)
    _kill(_server(run, parent, index=0))
    wait_for_step(run, 40)
    servers = {_server(run, parent, index=index) for index in range(2)}
    workers = {each.pid for each in events_of(run, WorkerGroupFormed)[-1].ranks}
    (chief,) = {child.pid for child in parent.children()} - servers - workers
    _kill(chief)
    wait_for_step(run, 50)
    lost = {"1", "server-0", "server-1", "coordinator"}
    wait_until(run, lambda: {each.worker for each in events_of(run, WorkerLost)} == lost, "faults")

    assert lifecycle.stop(run).state == "stopped"  # here: a command might start too late
    kept = max(losses(run))
    assert kept < STEPS
    assert events_of(run, CheckpointSaved)[-1].step == kept
    wait_until(run, lambda: not _lives(parent), "the program to end")

    resumed = yunlu("resume", run.id, "--detach")
    assert resumed.code == 0, resumed.err
    wait_for_step(run, kept + 10)
    running = [event for event in events_of(run, StateChanged) if event.state == "running"]
    assert [event.resumed_from_step for event in running] == [None, kept]
    parent = psutil.Process(events_of(run, AttemptStarted)[-1].pid)
    assert len(parent.children()) == 6  # two servers, three workers, the chief
    resize(run, devices=2)
    wait_until(run, lambda: len(parent.children()) == 5, "one worker to leave")
    resize(run, devices=4)
    wait_until(
        run, lambda: len(events_of(run, WorkerGroupFormed)[-1].ranks) == 4, "two workers to come"
    )
    family = parent.children()
    assert len(family) == 7
    _kill(parent.pid)
    wait_until(run, lambda: not any(_lives(each) for each in family), "its children to go with it")

    assert yunlu("resume", run.id, "--detach").code == 0
    wait_until(run, lambda: _state(run) == "finished", "the end")
    alone = _train_alone(run)
    assert sorted(losses(run)) == [*range(1, STEPS + 1)]
    assert len(list(run.read_metrics())) == STEPS
    check_ledger(run)
    loss = events_of(run, Evaluated)[-1]
    assert loss.step == STEPS
    assert loss.loss < alone + MARGIN
    assert not (run.path / "servers").exists()
    assert (run.path / Area.MODEL / "model.safetensors").exists()
    assert lifecycle.read_record(run).state == "finished"


@pytest.mark.parametrize("steps", [200_000])  # stopped long before
def test_a_machine_that_joins_and_is_lost_takes_nothing_with_it(
    run: RunStore, environment: dict[str, str], tmp_path: Path
):
    wait_for_step(run, 5)
    far = _join(run, environment, tmp_path)
    wait_until(run, lambda: count_done(run, "far.") > 5, "work of the machine that joined")
    group = events_of(run, WorkerGroupFormed)[-1].ranks
    assert [each.worker for each in group] == ["0", "1", "2", "far.0", "far.1"]
    assert [each.rank for each in group] == [*range(5)]

    workers = [psutil.Process(each.pid) for each in group[3:]]
    _kill(workers[0].pid)
    wait_until(run, lambda: members_lost(run) == ["far.0"], "the loss of one worker to be told")
    lost_at = max(losses(run))
    (node,) = _find_node(run)
    _kill(node.pid)  # with its workers, which hold tickets: no word is said
    wait_until(run, lambda: members_lost(run)[1:] == ["far"], "the loss of the machine to be told")
    wait_for_step(run, lost_at + 10)
    assert far.wait(waiting.LIMIT_S) != 0
    assert not any(_lives(worker) for worker in workers)
    assert [each.worker for each in events_of(run, WorkerGroupFormed)[-1].ranks] == ["0", "1", "2"]

    assert lifecycle.stop(run).state == "stopped"
    kept = max(losses(run))
    assert [record["step"] for record, _ in run.read_metrics()] == [*range(1, kept + 1)]
    assert events_of(run, CheckpointSaved)[-1].step == kept
    check_ledger(run, kept)
    check_staleness(run, most=2)


@pytest.mark.long
@pytest.mark.parametrize("steps", [200_000])
def test_a_machine_goes_on_when_the_one_that_leads_was_lost_and_came_back(
    run: RunStore, yunlu: Yunlu, environment: dict[str, str], tmp_path: Path
):
    wait_for_step(run, 5)
    far = _join(run, environment, tmp_path)
    wait_until(run, lambda: count_done(run, "far.") > 5, "work of the machine that joined")
    _kill(events_of(run, AttemptStarted)[-1].pid)
    before = count_done(run, "far.")
    assert yunlu("resume", run.id, "--detach").code == 0
    wait_until(run, lambda: count_done(run, "far.") > before + 5, "work after the resume")
    ranks = events_of(run, WorkerGroupFormed)[-1].ranks
    assert [each.worker for each in ranks] == ["0", "1", "2", "far.0", "far.1"]
    assert lifecycle.stop(run).state == "stopped"
    assert far.wait(waiting.LIMIT_S) == 0  # sent home with the others
    kept = max(losses(run))
    check_ledger(run, kept)
    check_staleness(run, most=2)


def _join(run: RunStore, environment: dict[str, str], place: Path) -> subprocess.Popen[bytes]:
    """Another machine, as far as the run can tell: a process of its own that comes over TCP."""
    group = read_worker_group(run)
    assert group is not None
    (place / "token").write_text(group.token)
    words = ["join", f"{group.host}:{group.port}", "--devices", "2", "--name", "far"]
    command = [sys.executable, "-m", "yunlu.cli.main", *words, "--token-file", "token"]
    return subprocess.Popen(command, env=environment, cwd=place, start_new_session=True)


def _find_node(run: RunStore) -> list[psutil.Process]:
    """Its first process: workers have the same words, and it for a parent."""
    named = [
        process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if "yunlu.training.asynchronous.node" in (process.info["cmdline"] or [])
        and str(run.path) in process.info["cmdline"]
    ]
    pids = {process.pid for process in named}
    return [process for process in named if process.info["ppid"] not in pids]


def _done(run: RunStore) -> list[dict[str, Any]]:
    return [line for line, _ in read_lines(run.path / Area.SERVERS / "shard-0" / "done.jsonl")]


def count_done(run: RunStore, worker: str) -> int:
    return sum(line["worker"].startswith(worker) for line in _done(run))


def members_lost(run: RunStore) -> list[str]:
    return [each.worker for each in events_of(run, WorkerLost)]


def check_staleness(run: RunStore, *, most: int) -> None:
    """No ticket was done of a step further than so many from the oldest that was not over."""
    seen: set[tuple[int, int]] = set()
    oldest = 0
    for line in _done(run):
        assert line["step"] - oldest <= most
        seen.add((line["step"], line["share"]))
        while all((oldest, share) in seen for share in range(3)):
            oldest += 1


def _train_alone(run: RunStore) -> float:
    """The same job on one worker, as synchronous training would do it."""
    job = json.loads((run.path / Document.JOB).read_text())
    job["communication"], job["devices"] = {}, 1
    job["data"]["train"] = str(Path(events_of(run, StateChanged)[0].directory) / "text.txt")
    alone = open_run(run.path.parent.parent / "alone")
    alone.path.mkdir()
    (alone.path / Document.JOB).write_text(json.dumps(job))
    command = [sys.executable, "-m", "yunlu.training.worker", str(alone.path)]
    subprocess.run(command, check=True, capture_output=True)
    return events_of(alone, Evaluated)[-1].loss


def check_ledger(run: RunStore, steps: int = STEPS) -> None:
    lines = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    samples = events_of(run, DataOpened)[-1].train
    order = StepOrder(
        samples=samples,
        batch=BATCH,
        seed=json.loads((run.path / Document.JOB).read_text())["train"]["seed"],
    )
    for line, rows in zip(lines, order.steps_from(0), strict=False):
        assert (line["samples"], line["digest"]) == (len(rows), f"{digest_of(rows):016x}")


def events_of(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def _state(run: RunStore) -> str:
    return events_of(run, StateChanged)[-1].state


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _server(run: RunStore, parent: psutil.Process, *, index: int) -> int:
    """The process that listens where a server says that it does."""
    where = json.loads((run.path / f"servers/shard-{index}/address.json").read_text())
    for child in parent.children():
        if any(
            each.laddr.port == where["port"]
            for each in child.net_connections("tcp4")
            if each.status == "LISTEN"
        ):
            return child.pid
    raise AssertionError(f"nobody serves {where}")


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_step(run: RunStore, step: int) -> None:
    wait_until(
        run,
        lambda: (last_record(run, Log.METRICS) or {"step": 0})["step"] >= step,
        f"step {step}",
    )


def wait_until(run: RunStore, until: Callable[[], bool], what: str) -> None:
    def check() -> None:
        errors = events_of(run, ErrorRaised)
        assert not errors, errors

    waiting.wait_until(
        until,
        what,
        meanwhile=check,
        explain=lambda: (run.path / WORKER_LOG).read_text()[-3000:],
        pause_s=0.05,
    )
