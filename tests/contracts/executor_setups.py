"""Where the contract of executors is tried: a small job, and what differs from place to place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.sample_events import EventT
from tests.waiting import wait_until
from yunlu.executors.executor import Executor
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.runs.events import DataOpened, ErrorRaised, StateChanged, WorkerGroupFormed
from yunlu.runs.run_store import WORKER_LOG, Area, Log, RunStore
from yunlu.runs.worker_group import read_worker_group
from yunlu.spec.load import load_job
from yunlu.training.data.sample_order import StepOrder, digest_of

BATCH = 24
JOB = f"""
task: language-modeling
model: {{name: transformer, args: {{width: 32, layers: 2, heads: 4}}}}
data: {{train: text.txt, max_length: 24}}
spares: 0
train:
  steps: STEPS
  batch: {BATCH}
  micro_batch: 4
  optimizer: {{name: adamw, lr: 0.0003, kernel: fused}}
  schedule: {{name: constant, warmup: 0}}
  precision: fp32
  padding: pad
  compile: false
  threads: 1
  workers: 0
  evaluate: never
  checkpoint: {{every: 1000, keep_best: 0}}
"""
FOR_EVER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ExecutorSetup:
    """One executor, and what a test has to know of it."""

    executor: Executor
    small: Placement
    """What runs are started with: two devices on one node, so that there is something to take."""
    large: Placement
    """More: on several nodes, where there are several."""
    starter: str
    """``module:name`` of the function that has really started something when it returns."""
    kill: Callable[[RunStore], None]
    """End a run's processes, all of them, without a word; the cluster is not asked."""


def submit(directory: Path, *, steps: int = FOR_EVER) -> RunStore:
    """A pending run, submitted from a directory with its data."""
    words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
    lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
    (directory / "text.txt").write_text("\n".join(lines))
    (directory / "job.yaml").write_text(JOB.replace("STEPS", str(steps)))
    return lifecycle.submit(load_job(directory / "job.yaml"), source=directory / "job.yaml")


def events_of(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def state(run: RunStore) -> str:
    return events_of(run, StateChanged)[-1].state


def step(run: RunStore) -> int:
    return max((record["step"] for record, _ in run.read_metrics()), default=0)


def await_(run: RunStore, until: Callable[[], bool], what: str) -> None:
    """Until something is so; with the run's own logs where it never is."""

    def explain() -> str:
        files = [
            run.path / WORKER_LOG,
            *sorted((run.path / Area.LOGS).glob("*.log")),
            run.path / Log.LEASE_EVENTS,
        ]
        logs = (f"--- {file.name}\n{file.read_text()[-2500:]}" for file in files if file.exists())
        return "\n".join([str(events_of(run, StateChanged)), *logs])

    wait_until(until, what, explain=explain)


def await_step(run: RunStore, wanted: int) -> None:
    def is_there() -> bool:
        assert not (errors := events_of(run, ErrorRaised)), errors
        return step(run) >= wanted

    await_(run, is_there, f"step {wanted}")


def await_workers(run: RunStore, count: int) -> None:
    """Until steps are made by so many."""

    def is_there() -> bool:
        groups = events_of(run, WorkerGroupFormed)
        return bool(groups) and len(groups[-1].ranks) == count

    await_(run, is_there, f"{count} workers")
    await_step(run, step(run) + 3)


def check_samples(run: RunStore) -> None:
    """Each step up to the last took exactly its samples, each of them once."""
    records = [json.loads(line) for line in (run.path / Log.LEDGER).read_text().splitlines()]
    committed = {record["step"]: record for record in records}
    assert sorted(committed) == [*range(1, max(committed) + 1)]
    samples = events_of(run, DataOpened)[0].train
    for number, rows in enumerate(StepOrder(samples=samples, batch=BATCH, seed=0).steps_from(0), 1):
        if number not in committed:
            break
        assert int(committed[number]["digest"], 16) == digest_of(rows), number
        assert committed[number]["samples"] == len(rows)


def processes_of(run: RunStore) -> list[psutil.Process]:
    """Everyone who works for the run on this machine."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and str(run.path) in process.cmdline():
                found.append(process)
    return found


def kill_processes(run: RunStore) -> None:
    """All at once: nobody is left to start a supervisor again."""

    def kill() -> None:
        processes = processes_of(run)
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        for process in processes:
            with suppress(psutil.Error):
                process.kill()

    wait_until(lambda: not processes_of(run), "all processes end", meanwhile=kill)


def workers_of(run: RunStore) -> int:
    group = read_worker_group(run)
    return sum(member.rank is not None for member in group.workers) if group else 0
