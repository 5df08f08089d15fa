"""W&B without a network or an account, in a process of its own as a worker would use it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.waiting import LIMIT_S
from yunlu.core.settings import worker_environment

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPT = """
import sys
from pathlib import Path
from yunlu.runs.home import open_run
from yunlu.spec.job import Job
from yunlu.training.trackers.tracker import TrackerThread, open_trackers

run, resumed, first, last = open_run(Path(sys.argv[1])), sys.argv[2] == "yes", *map(int, sys.argv[3:])
job = Job.model_validate({"task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"})
thread = TrackerThread(open_trackers(["wandb"]), lambda text: print("WARNING", text))
thread.start(run, job, resumed=resumed)
for step in range(first, last + 1):
    thread.log({"train/loss": 1.0 / step}, step=step)
thread.finish(state="finished", summary={"test/accuracy": 0.9})
"""


def test_two_attempts_become_one_wandb_run_with_every_step(tmp_path: Path) -> None:
    run = tmp_path / "digits-1"
    run.mkdir()
    for arguments in (["no", "1", "40"], ["yes", "31", "60"]):
        done = _live(run, arguments, WANDB_MODE="offline")
        assert done.stdout == ""
    logs = sorted(run.glob("trackers/wandb/offline-run-*/*.wandb"))
    identity = json.loads((run / "wandb.json").read_text())["id"]
    assert [log.name for log in logs] == [f"run-{identity}.wandb"] * 2
    assert identity.startswith("digits-1-")
    # Each step stands in the history as its own JSON number.
    contents = [log.read_bytes() for log in logs]
    for step in (1, 39, 40):
        assert json.dumps(1.0 / step).encode() in contents[0]
    for step in (31, 59, 60):
        assert json.dumps(1.0 / step).encode() in contents[1]
    assert b"tabular-classification" in contents[0]
    assert b"test/accuracy" in contents[1]


def test_without_a_key_the_run_goes_on_with_a_warning_and_no_question_at_the_terminal(
    tmp_path: Path,
) -> None:
    run = tmp_path / "digits-2"
    run.mkdir()
    # A terminal on both ends: where W&B by itself would stop and ask for a key.
    screen, terminal = pty.openpty()
    try:
        done = _live(run, ["no", "1", "3"], terminal=terminal, WANDB_MODE="online")
    finally:
        os.close(terminal)
        os.close(screen)
    assert "WandbTracker failed and is disabled for this run" in done.stdout
    assert "wandb login" in done.stdout
    assert list((run / "tensorboard").iterdir())


def _live(
    run: Path, arguments: list[str], *, terminal: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    # Nothing of the developer's own account, nor any settings of theirs.
    environment = {k: v for k, v in worker_environment().items() if not k.startswith("WANDB_")}
    environment |= {"HOME": str(run.parent), "WANDB_ERROR_REPORTING": "false", **variables}
    return subprocess.run(
        [sys.executable, "-c", ATTEMPT, str(run), *arguments],
        env=environment,
        cwd=run.parent,
        stdin=terminal if terminal is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal if terminal is not None else None,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
