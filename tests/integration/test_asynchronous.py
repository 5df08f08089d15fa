"""Asynchronous workers as a user starts them: killed, stopped, resumed; every sample counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Yunlu
from yunlu.core.files import read_last
from yunlu.core.rundir import EventKind, RunDir
from yunlu.jobs import service
from yunlu.jobs.resize import resize
from yunlu.training.data.order import StepOrder, digest_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, BATCH, PATIENCE_S = 180, 24, 120
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


@pytest.fixture
def run(yunlu: Yunlu, own_home: Path, tmp_path: Path) -> Iterator[RunDir]:
    """A run of three workers, under way; none of its processes outlives the test."""
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
    lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    started = yunlu("train", "job.yaml", "--devices", "3", "--detach", "--json")
    assert started.code == 0, started.err
    (path,) = own_home.glob("*-*")
    made = RunDir(path)
    try:
        yield made
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if str(path) in (process.info["cmdline"] or []):
                process.kill()


@pytest.mark.long
def test_a_disturbed_run_learns_and_takes_every_sample_once(run: RunDir, yunlu: Yunlu):
    _wait_for_step(run, 10)
    parent = psutil.Process(_told(run, EventKind.LIFE)[-1]["pid"])
    _kill(_told(run, EventKind.CREW)[-1]["ranks"][1]["pid"])
    _wait_for_step(run, 20)
    _kill(_server(run, parent, index=1))
    _wait_for_step(run, 30)
    _kill(_server(run, parent, index=0))
    _wait_for_step(run, 40)
    servers = {_server(run, parent, index=index) for index in range(2)}
    workers = {each["pid"] for each in _told(run, EventKind.CREW)[-1]["ranks"]}
    (chief,) = {child.pid for child in parent.children()} - servers - workers
    _kill(chief)
    _wait_for_step(run, 50)
    losses = {1, "server-0", "server-1", "chief"}
    _wait(run, lambda: {each["member"] for each in _told(run, EventKind.FAULT)} == losses, "faults")

    assert service.stop(run).state == "stopped"  # here: a command might start too late
    kept = max(_losses(run))
    assert kept < STEPS
    assert _told(run, EventKind.CHECKPOINT)[-1]["step"] == kept
    _wait(run, lambda: not _lives(parent), "the program to end")

    resumed = yunlu("resume", run.id, "--detach")
    assert resumed.code == 0, resumed.err
    _wait_for_step(run, kept + 10)
    running = [event for event in _told(run, EventKind.STATE) if event["state"] == "running"]
    assert [event["resumed_from_step"] for event in running] == [None, kept]
    parent = psutil.Process(_told(run, EventKind.LIFE)[-1]["pid"])
    assert len(parent.children()) == 6  # two servers, three workers, the chief
    resize(run, devices=2)
    _wait(run, lambda: len(parent.children()) == 5, "one worker to leave")
    resize(run, devices=4)
    _wait(run, lambda: len(_told(run, EventKind.CREW)[-1]["ranks"]) == 4, "two workers to come")
    family = parent.children()
    assert len(family) == 7
    _kill(parent.pid)
    _wait(run, lambda: not any(_lives(each) for each in family), "its children to go with it")

    assert yunlu("resume", run.id, "--detach").code == 0
    _wait(run, lambda: _state(run) == "finished", "the end")
    alone = _train_alone(run)
    assert sorted(_losses(run)) == [*range(1, STEPS + 1)]
    assert len(list(run.read_metrics())) == STEPS
    _check_ledger(run)
    loss = _told(run, EventKind.EVALUATION)[-1]
    assert loss["step"] == STEPS
    assert loss["loss"] < alone + MARGIN
    assert not (run.path / "servers").exists()
    assert (run.model / "model.safetensors").exists()
    assert service.read_record(run).state == "finished"


def _train_alone(run: RunDir) -> float:
    """The same job on one worker, as synchronous training would do it."""
    job = json.loads(run.job.read_text())
    job["communication"], job["devices"] = {}, 1
    job["data"]["train"] = str(Path(_told(run, EventKind.STATE)[0]["directory"]) / "text.txt")
    alone = RunDir(run.path.parent.parent / "alone")
    alone.path.mkdir()
    alone.job.write_text(json.dumps(job))
    command = [sys.executable, "-m", "yunlu.training.worker", str(alone.path)]
    subprocess.run(command, check=True, capture_output=True)
    return _told(alone, EventKind.EVALUATION)[-1]["loss"]


def _check_ledger(run: RunDir) -> None:
    lines = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    samples = _told(run, EventKind.DATA)[-1]["train"]
    order = StepOrder(
        samples=samples, batch=BATCH, seed=json.loads(run.job.read_text())["train"]["seed"]
    )
    for line, rows in zip(lines, order.steps_from(0), strict=False):
        assert (line["samples"], line["digest"]) == (len(rows), f"{digest_of(rows):016x}")


def _told(run: RunDir, kind: EventKind) -> list[dict[str, Any]]:
    return [event.data for event, _ in run.read_events() if event.kind is kind]


def _state(run: RunDir) -> str:
    return _told(run, EventKind.STATE)[-1]["state"]


def _losses(run: RunDir) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _server(run: RunDir, parent: psutil.Process, *, index: int) -> int:
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


def _wait_for_step(run: RunDir, step: int) -> None:
    _wait(run, lambda: (read_last(run.metrics) or {"step": 0})["step"] >= step, f"step {step}")


def _wait(run: RunDir, until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        told = _told(run, EventKind.ERROR)
        assert not told, told
        assert time.monotonic() < deadline, (what, run.log.read_text()[-3000:])
        time.sleep(0.05)
