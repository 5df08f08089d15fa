"""Real worker groups, really disturbed: no sample is lost or repeated, and the curve is the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.sample_events import EventT
from tests.waiting import wait_until
from yunlu.core.errors import StoreError
from yunlu.jobs.lifecycle import resize
from yunlu.runs.events import DataOpened, ErrorRaised, StateChanged, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Log, RunStore
from yunlu.runs.worker_group import WorkerGroup, read_worker_group
from yunlu.training.data.sample_order import StepOrder, digest_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, FEWER, BATCH = 300, 110, 24
# The rate is small: at three times as much, rounding alone grows to 4e-4 of the loss by the last step.
JOB = f"""
task: braked:Braked
model: {{name: transformer, args: {{width: 32, layers: 4, heads: 4}}}}
data: {{train: text.txt, max_length: 24}}
train:
  steps: {STEPS}
  batch: {BATCH}
  micro_batch: 4
  optimizer: {{name: adamw, lr: 0.0001, kernel: fused}}
  clip: 1.0
  schedule: {{name: constant, warmup: 0}}
  precision: fp32
  padding: pad
  compile: false
  threads: 1
  workers: 0
  evaluate: never
  checkpoint: {{every: 60, keep_best: 0}}
"""

# A machine that is busy delays the test, not only the run: without a brake the run may be over before it
# was disturbed.
BRAKED = """
import time
from pathlib import Path
from yunlu.training.tasks.language_modeling import LanguageModeling

class Braked(LanguageModeling):
    def loss(self, model, batch):
        if Path(__file__).with_name("brake").exists():
            time.sleep(0.05)
        return super().loss(model, batch)
"""


class Runs:
    """Runs of the job above, none of whose processes outlives the test."""

    def __init__(self, directory: Path, home: Path) -> None:
        self.directory, self._home = directory, home
        self._environment = os.environ | {"YUNLU_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.started: list[RunStore] = []

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "yunlu.cli.main", *words]
        return subprocess.run(
            command,
            env=self._environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, *words: str, detach: bool = True, brake: bool = True) -> RunStore:
        """Begin to train; braked until ``wait_for_end``, unless the command waits for the end itself."""
        if detach and brake:
            (self.directory / "brake").touch()
        before = set(self._home.glob("*-*"))
        done = self.call("train", "job.yaml", *words, *(["--detach"] if detach else []), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = set(self._home.glob("*-*")) - before
        self.started.append(open_run(path))
        return self.started[-1]

    def end(self) -> None:
        for run in self.started:
            group = read_worker_group(run)
            pids = [] if group is None else [group.pid, *(member.pid for member in group.workers)]
            for process in _family(run, pids):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _family(run: RunStore, pids: list[int]) -> list[psutil.Process]:
    """Everyone who works for the run: known by the run's directory in their command lines."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and str(run.path) in words:
            found.append(process)
    return found


def write_job(directory: Path) -> None:
    (directory / "job.yaml").write_text(JOB)
    (directory / "braked.py").write_text(BRAKED)
    words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
    lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
    (directory / "text.txt").write_text("\n".join(lines))


@pytest.fixture
def runs(tmp_path: Path, own_home: Path) -> Iterator[Runs]:
    write_job(tmp_path)
    made = Runs(tmp_path, own_home)
    try:
        yield made
    finally:
        made.end()


def losses(run: RunStore) -> dict[int, float]:
    """Of each step; of one that was done again, the later."""
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def events(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def worker_group_of(run: RunStore) -> WorkerGroup:
    group = read_worker_group(run)
    assert group is not None
    return group


def wait(run: RunStore, until: Callable[[], bool], what: str) -> None:
    def explain() -> str:
        log = (
            (run.path / WORKER_LOG).read_text()[-3000:] if (run.path / WORKER_LOG).exists() else ""
        )
        return f"at step {max(losses(run), default=0)}\n{log}"

    def check() -> None:
        errors = events(run, ErrorRaised)
        assert not errors, (errors, explain())

    wait_until(until, what, meanwhile=check, explain=explain)


def wait_for_step(run: RunStore, step: int) -> None:
    wait(run, lambda: max(losses(run), default=0) >= step, f"step {step}")


def resize_as_soon_as_may_be(run: RunStore, devices: int) -> None:
    """Steps go on without a supervisor: a new one may have yet to hear who takes part."""

    def ask() -> bool:
        try:
            resize(run, devices=devices)
        except StoreError as refused:
            if "just being started" not in str(refused):
                raise
            return False
        return True

    wait(run, ask, "a supervisor that is ready")


def wait_for_workers(run: RunStore, count: int) -> None:
    """Until steps are made by so many."""

    def is_there() -> bool:
        told = events(run, WorkerGroupFormed)
        return bool(told) and len(told[-1].ranks) == count

    wait(run, is_there, f"{count} workers")


def wait_for_end(run: RunStore) -> None:
    def is_over() -> bool:
        return events(run, StateChanged)[-1].state in {"finished", "stopped", "failed"}

    (run.path.parents[1] / "brake").unlink(missing_ok=True)
    wait(run, is_over, "the end")
    wait(run, lambda: not _family(run, []), "everyone gone")


def strike(run: RunStore, rank: int, number: int) -> None:
    """Send a signal to who works at a rank, and wait for the generation after."""
    before = worker_group_of(run)
    (victim,) = (member for member in before.workers if member.rank == rank)
    os.kill(victim.pid, number)

    def is_past() -> bool:
        told = events(run, WorkerGroupFormed)
        return bool(told) and told[-1].generation > before.generation

    wait(run, is_past, f"signal {number} to rank {rank}")


def check_run(run: RunStore, alone: dict[int, float], *, steps: int = STEPS) -> None:
    """The curve is the undisturbed one's; each step took exactly its samples, each of them once."""
    assert events(run, StateChanged)[-1].state == "finished"
    expected_losses = {step: loss for step, loss in alone.items() if step <= steps}
    assert losses(run) == pytest.approx(expected_losses, abs=1e-5)
    about = events(run, DataOpened)[0]
    order = StepOrder(samples=about.train, batch=BATCH, seed=0).steps_from(0)
    expected = {step: digest_of(next(order)) for step in range(1, steps + 1)}
    records = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    committed = {record["step"]: int(record["digest"], 16) for record in records}
    assert committed == expected
    assert {record["step"]: record["samples"] for record in records} == {
        step: (BATCH if step % -(-about.train // BATCH) else about.train % BATCH or BATCH)
        for step in range(1, steps + 1)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one plain worker."""
    directory = tmp_path_factory.mktemp("alone")
    write_job(directory)
    return losses(Runs(directory, directory / "home").start(detach=False))


def test_kills_hangs_notices_resizes_and_a_dead_supervisor_leave_no_trace_in_the_curve(
    runs: Runs, alone: dict[int, float]
) -> None:
    run = runs.start("--devices", "3")
    wait_for_step(run, 10)
    strike(run, 1, signal.SIGKILL)
    wait_for_step(run, max(losses(run)) + 5)
    strike(run, 0, signal.SIGKILL)  # the one who speaks for all
    wait_for_step(run, max(losses(run)) + 5)
    strike(run, 2, signal.SIGSTOP)
    wait_for_step(run, max(losses(run)) + 5)
    strike(run, 1, signal.SIGTERM)  # a notice: it leaves, and is not replaced
    wait_for_workers(run, 2)
    resize(run, devices=4)
    wait_for_workers(run, 4)
    supervisor = worker_group_of(run).pid
    os.kill(supervisor, signal.SIGKILL)
    wait(run, lambda: worker_group_of(run).pid != supervisor, "another supervisor")
    wait_for_step(run, max(losses(run)) + 5)
    resize_as_soon_as_may_be(run, 1)
    wait_for_workers(run, 1)
    resize(run, devices=2)
    wait_for_end(run)
    check_run(run, alone)
    assert (run.path / Area.MODEL / "model.safetensors").exists()


@pytest.mark.parametrize(
    "layout", ["dp2 x tp2", pytest.param("pp2 x fsdp2", marks=pytest.mark.long)]
)
def test_a_model_that_is_cut_up_survives_a_kill_and_a_resize(
    runs: Runs, alone: dict[int, float], layout: str
) -> None:
    run = runs.start("--set", f"layout={layout}", "--set", f"train.steps={FEWER}")
    wait_for_step(run, 10)
    strike(run, 1, signal.SIGKILL)
    wait_for_step(run, max(losses(run)) + 3)
    resized = runs.call("resize", run.id, "--devices", "3")
    assert resized.returncode == 0, resized.stderr
    wait_for_workers(run, 3)
    wait_for_end(run)
    check_run(run, alone, steps=FEWER)


@pytest.mark.long
def test_a_stopped_worker_group_resumes_from_its_checkpoint(
    runs: Runs, alone: dict[int, float]
) -> None:
    run = runs.start("--set", "layout=fsdp2", "--set", f"train.steps={FEWER}")
    wait_for_step(run, 20)
    assert runs.call("stop", run.id).returncode == 0
    done = max(losses(run))
    assert done < FEWER
    assert runs.call("resume", run.id, "--detach").returncode == 0
    wait_for_end(run)
    assert [event.resumed_from_step for event in events(run, StateChanged)
            if event.state == "running"] == [None, done]  # fmt: skip
    check_run(run, alone, steps=FEWER)
