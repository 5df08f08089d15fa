"""Real workers, really killed: nothing is lost but the steps since the last checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import Yunlu
from tests.waiting import wait_until
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, RunStore

JOB = """
task: braked:Braked
model: cnn
data: sklearn:digits
train:
  epochs: 3
  checkpoint: 5
"""

# Without a brake the run may be over before a busy machine lets the test end it.
BRAKED = """
import time
from pathlib import Path
from yunlu.training.tasks.image_classification import ImageClassification

class Braked(ImageClassification):
    def loss(self, model, batch):
        if Path(__file__).with_name("brake").exists():
            time.sleep(0.05)
        return super().loss(model, batch)
"""


@pytest.fixture
def brake(tmp_path: Path) -> Path:
    """While this file is there, steps take their time."""
    (tmp_path / "braked.py").write_text(BRAKED)
    return tmp_path / "brake"


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def wait_for_step(run: RunStore, step: int, process: psutil.Process) -> None:
    """Until the run has logged a step, or its worker is gone."""
    while max(losses(run), default=0) < step:
        try:
            process.wait(timeout=0.05)
        except psutil.TimeoutExpired:
            continue
        return


def start(job: Path, environment: dict[str, str], home: Path) -> tuple[RunStore, psutil.Process]:
    command = [sys.executable, "-m", "yunlu.cli.main", "train", str(job), "--detach", "--json"]
    subprocess.run(command, env=environment, cwd=job.parent, check=True, capture_output=True)
    run = open_run(max(home.glob("killed-*"), key=lambda path: path.stat().st_mtime))
    return run, worker_of(run, attempt=1)


def worker_of(run: RunStore, *, attempt: int) -> psutil.Process:
    """The worker of an attempt; waits until its event is there."""

    def attempts() -> list[AttemptStarted]:
        return [event for event, _ in run.read_events() if isinstance(event, AttemptStarted)]

    wait_until(lambda: len(attempts()) >= attempt, f"attempt {attempt}")
    return psutil.Process(attempts()[attempt - 1].pid)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_the_undisturbed_one(
    yunlu: Yunlu, environment: dict[str, str], own_home: Path, tmp_path: Path, brake: Path
) -> None:
    job = tmp_path / "killed.yaml"
    job.write_text(JOB)
    assert yunlu("train", job, "--name", "whole", "--json").code == 0
    whole = open_run(next(own_home.glob("whole-*")))

    brake.touch()
    run, process = start(job, environment, own_home)
    draw = random.Random(4)
    for attempt in (2, 3):
        wait_for_step(run, max(losses(run), default=0) + draw.randint(8, 25), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "lost" in yunlu("ps", "--all").out
        resumed = yunlu("resume", run.id, "--detach", "--json")
        assert resumed.code == 0, resumed.err
        process = worker_of(run, attempt=attempt)
    brake.unlink()
    process.wait()
    assert losses(run) == losses(whole)
    exported = [r.path / Area.MODEL / "model.safetensors" for r in (run, whole)]
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_goes_on(
    environment: dict[str, str], own_home: Path, tmp_path: Path, yunlu: Yunlu, brake: Path
) -> None:
    brake.touch()
    job = tmp_path / "stopped.yaml"
    job.write_text(JOB)
    command = [sys.executable, "-m", "yunlu.cli.main", "train", str(job), "--json"]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shown:
        assert shown.stdout is not None
        for line in shown.stdout:
            if '"metrics"' in line or '"step": 10' in line:
                os.kill(shown.pid, signal.SIGINT)
                break
        shown.stdout.read()
        assert shown.wait() == 130
    run = open_run(next(own_home.glob("stopped-*")))
    states = [e.state for e, _ in run.read_events() if isinstance(e, StateChanged)]
    assert states[-2:] == ["stopping", "stopped"]
    brake.unlink()
    assert yunlu("resume", run.id, "--json").code == 0
    assert max(losses(run)) == 3 * -(-1437 // 32)
