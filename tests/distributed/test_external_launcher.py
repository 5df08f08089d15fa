"""Processes that torchrun, srun or mpirun started: one run for all of them, as if one had trained it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sample_events import EventT
from tests.waiting import LIMIT_S, wait_until
from yunlu.runs.events import (
    AttemptStarted,
    CommunicationChosen,
    DataOpened,
    ErrorRaised,
    StateChanged,
    WorkerGroupFormed,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Log, RunStore
from yunlu.training.data.sample_order import StepOrder, digest_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, BATCH = 24, 12
JOB = f"""
task: {{task}}
model: {{{{name: transformer, args: {{{{width: 32, layers: 2, heads: 2}}}}}}}}
data: {{{{train: text.txt, max_length: 24}}}}
train:
  steps: {STEPS}
  batch: {BATCH}
  micro_batch: 4
  optimizer: {{{{name: adamw, lr: 0.002, kernel: fused}}}}
  clip: 1.0
  precision: fp32
  padding: pad
  compile: false
  threads: 1
  workers: 0
  evaluate: never
  checkpoint: {{{{every: 10, keep_best: 0}}}}
"""
TASKS = """
import json, os, resource, threading, time
from pathlib import Path
import psutil
import torch
import torch.distributed as dist
from yunlu.training.tasks.language_modeling import LanguageModeling

class FailsOnce(LanguageModeling):
    calls = 0
    def loss(self, model, batch):
        self.calls += dist.is_initialized()
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if self.calls > 30:  # in step 16
                raise ArithmeticError("rank 1 cannot count")
        return super().loss(model, batch)

class FailsWhileTheOtherHangs(LanguageModeling):
    def loss(self, model, batch):
        if dist.is_initialized():
            if os.environ["SLURM_PROCID"] == "0":
                Path("hangs").touch()
                threading.Event().wait()
            while not Path("hangs").exists():
                time.sleep(0.01)
            raise ArithmeticError("rank 1 cannot count")
        return super().loss(model, batch)

class Slow(LanguageModeling):
    def loss(self, model, batch):
        if dist.is_initialized():
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            Path(f"limit-{os.environ['SLURM_PROCID']}").write_text(str(limit))
            Path("trains").touch()
            time.sleep(0.1)
        return super().loss(model, batch)

class OneIsSlow(LanguageModeling):
    def build(self, job):
        from yunlu.planning.communication import step_forecast
        step_forecast.ASYNCHRONOUS_S = 0.01
        if os.environ["SLURM_PROCID"] == "1":
            product = torch.mm
            torch.mm = lambda *given, **more: (time.sleep(0.02), product(*given, **more))[1]
        return super().build(job)

class LateAtTheEnd(LanguageModeling):
    # Rank 1 comes to the last meeting when whoever shows the run has ended rank 0.
    def build(self, job):
        if os.environ["SLURM_PROCID"] == "1":
            barrier, (run,) = dist.barrier, Path("home").glob("*-*")
            def late():
                events = [json.loads(line) for line in (run / "events.jsonl").open()]
                if events[-1].get("state") == "finished":
                    (leader,) = [e["pid"] for e in events if e["kind"] == "attempt"]
                    while psutil.pid_exists(leader):
                        time.sleep(0.01)
                barrier()
            dist.barrier = late
        return super().build(job)
"""
SCRIPT = """
import sys, yunlu
run = yunlu.train("job.yaml", seed=0)
print(run.id, run.state, file=sys.stderr)
"""


class Bench:
    """A directory with a job, and processes in it, none of which outlives the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []
        words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
        lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(200)]
        (directory / "text.txt").write_text("\n".join(lines))
        (directory / "tasks_of_test.py").write_text(TASKS)
        (directory / "script.py").write_text(SCRIPT)
        self.write_job()

    def write_job(self, task: str = "language-modeling") -> None:
        (self.directory / "job.yaml").write_text(JOB.format(task=task))

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        launchers = ("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        home = {"YUNLU_HOME": str(self.directory / "home"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *words],
            env=kept | home | variables,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def srun(self, *words: str) -> list[subprocess.Popen[str]]:
        """Two tasks, as srun would start them."""
        job = {
            "SLURM_JOB_ID": str(random.SystemRandom().randrange(10_000)),  # decides on the port
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "localhost",
        }
        return [
            self.start(*words, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in range(2)
        ]

    def run(self) -> RunStore:
        """The one run there is."""
        (path,) = (self.directory / "home").glob("job-*")
        return open_run(path)

    def left(self) -> list[psutil.Process]:
        """Processes that still work here."""
        return [
            process
            for process in psutil.process_iter(["cwd"])
            if process.info["cwd"] == str(self.directory) and process.pid != os.getpid()
        ]

    def end(self) -> None:
        for process in self.left():
            process.kill()
        for started in self._started:
            started.communicate()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """What one process makes of the job."""
    bench = Bench(tmp_path_factory.mktemp("alone"))
    try:
        finish(bench.start("-m", "yunlu.cli.main", "train", "job.yaml"))
        return losses(bench.run())
    finally:
        bench.end()


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, out[-2000:] + err[-4000:]
    return out, err


def losses(run: RunStore) -> dict[int, float]:
    """Of each step; of one that was done again, the later."""
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def events(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def states(run: RunStore) -> list[str]:
    return [event.state for event in events(run, StateChanged)]


def check_ledger(run: RunStore) -> None:
    """Each step took exactly its samples."""
    order = StepOrder(samples=events(run, DataOpened)[0].train, batch=BATCH, seed=0)
    steps = order.steps_from(0)
    records = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    assert {record["step"]: int(record["digest"], 16) for record in records} == {
        step: digest_of(next(steps)) for step in range(1, STEPS + 1)
    }


@pytest.mark.long
def test_torchrun_starts_a_failed_run_again_from_its_checkpoint(
    bench: Bench, alone: dict[int, float]
) -> None:
    bench.write_job("tasks_of_test:FailsOnce")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "yunlu.cli.main", "train", "job.yaml"]
    port = ["--master-port", str(random.SystemRandom().randrange(30_000, 32_000))]
    finish(bench.start(*torchrun, *port, "--no-python", *command))

    run = bench.run()
    (error,) = events(run, ErrorRaised)
    assert (error.rank, error.host) == (1, os.uname().nodename)
    assert "rank 1 cannot count" in error.message
    assert "ArithmeticError" in error.traceback
    assert states(run) == [
        *("pending", "planning", "running", "failed"),
        *("pending", "planning", "running", "finished"),
    ]
    assert events(run, StateChanged)[6].resumed_from_step == 10
    assert losses(run) == pytest.approx(alone, abs=1e-5)
    check_ledger(run)
    assert (run.path / Area.MODEL / "model.safetensors").exists()
    wait_until(lambda: not bench.left(), "everyone gone")


@pytest.mark.long
def test_a_script_under_srun_gets_the_same_run_in_each_task(
    bench: Bench, alone: dict[int, float]
) -> None:
    told = [finish(process) for process in bench.srun("script.py")]
    run = bench.run()
    assert [err.splitlines()[-1] for _, err in told] == [f"{run.id} finished"] * 2
    assert losses(run) == pytest.approx(alone, abs=1e-5)
    check_ledger(run)
    (group,) = events(run, WorkerGroupFormed)
    assert [each.rank for each in group.ranks] == [0, 1]
    assert not bench.left()


@pytest.mark.long
def test_asynchronous_workers_can_be_launched_and_come_to_their_end(bench: Bench) -> None:
    job = bench.directory / "job.yaml"
    job.write_text(job.read_text() + "communication: {method: asynchronous, staleness: 2}\n")
    for process in bench.srun("-m", "yunlu.cli.main", "train", "job.yaml"):
        finish(process)
    run = bench.run()
    assert states(run) == ["pending", "planning", "running", "finished"]
    ranks = events(run, WorkerGroupFormed)[-1].ranks
    assert [each.worker for each in ranks] == ["0", "rank-1.0"]
    assert sorted(losses(run)) == [*range(1, STEPS + 1)]
    check_ledger(run)
    assert not bench.left()


@pytest.mark.long
def test_those_who_were_launched_give_way_to_asynchronous_workers(bench: Bench) -> None:
    bench.write_job("tasks_of_test:OneIsSlow")
    job = bench.directory / "job.yaml"
    job.write_text(job.read_text() + "communication: relaxed\n")
    for process in bench.srun("-m", "yunlu.cli.main", "train", "job.yaml"):
        finish(process)
    run = bench.run()
    assert states(run) == ["pending", "planning", "running", "finished"]
    assert len(events(run, AttemptStarted)) == 1
    assert events(run, CommunicationChosen)[-1].setting.method == "asynchronous"
    check_ledger(run)


@pytest.mark.long
def test_who_comes_last_to_the_end_has_not_failed(bench: Bench) -> None:
    bench.write_job("tasks_of_test:LateAtTheEnd")
    for process in bench.srun("-m", "yunlu.cli.main", "train", "job.yaml"):
        finish(process)
    assert states(bench.run())[-1] == "finished"


def test_a_failure_ends_all_even_one_that_hangs_and_is_told_once(bench: Bench) -> None:
    bench.write_job("tasks_of_test:FailsWhileTheOtherHangs")
    first, second = bench.srun("-m", "yunlu.cli.main", "train", "job.yaml")
    _, shown = finish(first, code=1)
    out, err = finish(second, code=1)
    run = bench.run()
    (error,) = events(run, ErrorRaised)
    assert error.rank == 1
    assert "ArithmeticError" in error.traceback
    assert states(run)[-1] == "failed"
    assert "rank 1 cannot count" in shown
    assert (out, err) == ("", "")  # one of them speaks
    assert "ArithmeticError" in (run.path / Area.LOGS / "worker-1.log").read_text()
    wait_until(lambda: not bench.left(), "everyone gone")


@pytest.mark.long
def test_a_signal_to_one_stops_all_and_a_killed_one_is_named(bench: Bench) -> None:
    bench.write_job("tasks_of_test:Slow")
    marker = bench.directory / "trains"
    tasks = bench.srun("-m", "yunlu.cli.main", "train", "job.yaml")
    wait_until(marker.exists, "the first step")
    tasks[1].send_signal(signal.SIGTERM)
    for task in tasks:
        finish(task)
    run = bench.run()
    done = max(losses(run))
    assert states(run)[-1] == "stopped"
    assert done < STEPS
    limits = [int((bench.directory / f"limit-{rank}").read_text()) for rank in range(2)]
    assert resource.RLIM_INFINITY not in limits, "more memory than there is would end them"

    marker.unlink()
    first, second = bench.srun("-m", "yunlu.cli.main", "resume", run.id)
    wait_until(marker.exists, "the next step")
    second.kill()  # its worker goes with it
    finish(first, code=1)
    assert events(run, StateChanged)[-2].resumed_from_step == done
    assert states(run)[-1] == "failed"
    (error,) = events(run, ErrorRaised)
    assert (error.rank, error.host) == (1, os.uname().nodename)
    assert "without an error message" in error.message
    wait_until(lambda: not bench.left(), "everyone gone")
