"""A pool's service on a cluster, tried as people and accidents would: queued runs train for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import LIMIT_S, wait_until
from yunlu.executors.executor import Executor
from yunlu.executors.lease_executor import read_record
from yunlu.executors.registry import remember_address
from yunlu.executors.worker_process import SUPERVISOR
from yunlu.jobs import lifecycle
from yunlu.runs.events import AttemptStarted, StateChanged, WorkerGroupFormed
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log, RunStore
from yunlu.scheduler import control
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.queue import SubmitOptions, enqueue, withdraw
from yunlu.spec.load import load_job
from yunlu.testing.executors import (
    JOB,
    events_of,
    kill_processes,
    processes_of,
    state,
    step,
)

PATIENCE_S = LIMIT_S


class Drill:
    """One pool, and what was queued in it; nothing of it outlives ``close``."""

    def __init__(self, home: Path, place: Path, settings: PoolSettings) -> None:
        self.home, self.place, self.settings = home, place, settings
        remember_address(settings.executor)
        self.runs: list[RunStore] = []
        self._doubles: dict[str, frozenset[int]] = {}
        words = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
        lines = [" ".join(words[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
        (place / "text.txt").write_text("\n".join(lines))

    def up(self) -> None:
        control.bring_up(self.home, self.settings)

    def kill(self) -> None:
        """As the system does when memory runs out."""
        found = control.find_service(self.home)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        self.wait(lambda: control.find_service(self.home) is None, "the service is gone")

    def submit(self, name: str, *, steps: int, exchange: str = "auto", **asked: Any) -> RunStore:
        source = self.place / f"{name}.yaml"
        job = JOB.replace("STEPS", str(steps)).replace("every: 1000", "every: 50")
        source.write_text(f"name: {name}\ncommunication: {exchange}\n{job}")
        self.runs.append(
            enqueue(load_job(source), SubmitOptions.model_validate(asked), source=source)
        )
        return self.runs[-1]

    def wait(self, until: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        wait_until(
            until,
            what,
            meanwhile=self.judge,
            explain=self.describe,
            limit_s=patience_s,
            pause_s=0.1,
        )

    def await_training(self, *runs: RunStore) -> None:
        """Until each of them has made steps that it had not made when this was asked."""
        then = {run.id: step(run) for run in runs}
        words = "all of them train: " + ", ".join(f"{run.id} from {then[run.id]}" for run in runs)
        self.wait(lambda: all(step(run) > then[run.id] + 2 for run in runs), words)

    def await_end(self, *runs: RunStore) -> None:
        self.wait(lambda: all(state(run) == "finished" for run in runs), "they are finished")

    def dismiss(self, *runs: RunStore) -> None:
        for run in runs:
            withdraw(run)
            lifecycle.stop(run)

    def judge(self) -> None:
        """Nobody supervises a run that another one supervises, but for a moment."""
        for run in self.runs:
            found = frozenset(each.pid for each in supervisors_of(run))
            twice = len(found) > 1 and self._doubles.get(run.id) == found
            assert not twice, f"{run.id} is run twice: {[*map(describe, found)]}"
            self._doubles[run.id] = found

    def view(self) -> dict[str, Any]:
        return PoolStore(self.home).read_view() or {}

    def phase(self, run: RunStore) -> str:
        """What the pool thinks of it."""
        found = [each["phase"] for each in self.view().get("runs", ()) if each["id"] == run.id]
        return found[0] if found else ""

    def is_measured(self, run: RunStore) -> bool:
        """Whether the pool shows what it takes, and how busy the machines are that it is on."""
        view, machines = self.view(), nodes_of(run)
        cores = [each["cores"] for each in view.get("runs", ()) if each["id"] == run.id]
        busy = [node["cpu"] for node in view.get("nodes", ()) if node["name"] in machines]
        return None not in [*cores, *busy] and len(busy) == len(machines) > 0

    def describe(self) -> str:
        pool_store = PoolStore(self.home)
        texts = [str(self.view()), *(str(line)[:400] for line in pool_store.read_decisions())]
        texts.append(pool_store.log.read_text()[-3000:] if pool_store.log.exists() else "")
        for run in self.runs:
            files = [
                run.path / Document.ALLOCATION,
                run.path / Document.LEASES,
                run.path / Log.LEASE_EVENTS,
                run.path / WORKER_LOG,
            ]
            files += sorted((run.path / Area.LOGS).glob("*.log"))
            texts += [f"=== {run.id} {state(run)}", *map(str, events_of(run, StateChanged))]
            texts += [f"--- {f.name}\n{f.read_text()[-1500:]}" for f in files if f.exists()]
        return "\n".join(texts)

    def close(self, executor: Executor) -> None:
        control.bring_down(self.home)
        for run in self.runs:
            if (run.path / Document.LEASES).exists():
                with suppress(Exception):
                    executor.stop(run, now=True)
            kill_processes(run)


def describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return f"{pid}: {error}"


def supervisors_of(run: RunStore) -> list[psutil.Process]:
    """Who was started to lead it; who is to take over from one that is gone waits for the run's lock."""
    found: list[psutil.Process] = []
    for process in processes_of(run):
        with suppress(psutil.Error):
            words, is_dead = process.cmdline(), process.status() == psutil.STATUS_ZOMBIE
            if not is_dead and words[1:3] == [*SUPERVISOR[1:]] and "--adopt" not in words:
                found.append(process)
    return found


def attempts_of(run: RunStore) -> int:
    return len(events_of(run, AttemptStarted))


def sizes_of(run: RunStore) -> list[int]:
    """Workers of each generation."""
    return [len(group.ranks) for group in events_of(run, WorkerGroupFormed)]


def nodes_of(run: RunStore) -> list[str]:
    """Where its executor has leases for it, the lead's first."""
    record = read_record(run)
    return [] if record is None else [name for name, _ in record.placement.shares]


def held_by(run: RunStore) -> dict[str, int]:
    """What the pool has noted that it holds."""
    return dict(read_allocation(run).shares)
