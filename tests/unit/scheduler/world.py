"""A world for the scheduler: real run directories, machines that die, processes that only exist here.

It does what an executor does, says what a worker says, and notes what must never happen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.sample_events import sample
from yunlu.core.errors import StoreError
from yunlu.executors.worker_process import (
    WorkerProcess,
    record_worker,
    recorded_worker,
    this_process,
)
from yunlu.hardware.fleet import Node, Placement
from yunlu.jobs.run import move, new_record, replay
from yunlu.runs.events import AttemptStarted, CheckpointSaved, ErrorRaised, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, RunStore
from yunlu.runs.states import RunState
from yunlu.scheduler.executor_adapter import NotNowError
from yunlu.scheduler.policy.values import Decision, PoolState, Reason
from yunlu.scheduler.queue import QueueEntry
from yunlu.scheduler.run_status import ResourceRequest, RunObservation

NOBODY = WorkerProcess(pid=0, process_started_at=0.0, host="(queue)", detached=False)


class Killed(BaseException):
    """The service is gone in the middle of what it did."""


@dataclass(eq=False)
class Process:
    """Whoever works on a run."""

    run: RunStore
    number: int
    shares: dict[str, int]
    wanted: dict[str, int]
    is_known: bool = False
    """Whether its starter wrote it down."""
    is_stopping: bool = False
    has_begun: bool = False
    is_over: bool = False
    """Has said its last word, and has yet to leave."""
    step: int = 0


@dataclass
class World:
    """Machines, processes and time."""

    home: Path
    machines: dict[str, int]
    chance: random.Random = field(default_factory=random.Random)
    steps: int = 8
    """Of every run."""
    crashes: float = 0.0
    """Of a process, at each tick."""
    kills: float = 0.0
    """Of the service, at each point where it could be killed."""
    dawdles: float = 0.0
    """Of a process: how often nothing happens for a second."""
    wall: float = 1e9
    steady: float = 0.0
    dead: set[str] = field(default_factory=set)
    processes: list[Process] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    starts: int = 0
    meddle: Callable[[], None] | None = None
    """What somebody else does in the middle of the service's turn."""
    spot: set[str] = field(default_factory=set)
    """Machines that may be taken away."""
    cursed: set[str] = field(default_factory=set)
    """Runs that crash before their first step."""

    # What the scheduler may do (``RunControl``).

    def nodes(self) -> tuple[Node, ...]:
        alive = {name: count for name, count in self.machines.items() if name not in self.dead}
        return tuple(
            Node(name=name, devices=count, type="cpu", is_spot=name in self.spot)
            for name, count in alive.items()
        )

    def observe(self, run: RunStore) -> RunObservation:
        record = new_record(run)
        assert record is not None
        record = replay(run, record)
        worker, process = recorded_worker(run), self.process_of(run)
        taken = tuple(_most(process.shares, process.wanted).items()) if process else ()
        is_known = process is not None and process.is_known
        has_begun = worker is not None and worker.detached
        is_kept = worker is not None and (worker.pid == 0 or worker == this_process())
        if process is None and record.state.is_active and not is_kept:
            verdict = RunState.STOPPED if record.state is RunState.STOPPING else RunState.LOST
            record = move(run, record, verdict, reason="vanished")
        return RunObservation(
            state=record.state,
            is_alive=process is not None and (is_known or process.has_begun),
            has_begun=has_begun,
            devices=sum(count for _, count in taken),
            shares=taken if len(self.machines) > 1 else (),
            is_resizable=process is not None and process.has_begun and not process.is_stopping,
            node=next(iter(process.shares)) if process else "",
            step=record.step or 0,
            steps=self.steps,
            error=record.error,
        )

    def start(self, run: RunStore, placement: Placement) -> None:
        self.point()
        record = new_record(run)
        assert record is not None
        record = replay(run, record)
        worker = recorded_worker(run)
        if record.state is RunState.PENDING:
            if worker is not None and worker.detached:
                raise StoreError("started before")
        elif record.state.is_active or self.process_of(run) is not None:
            raise StoreError("it has a worker")
        else:
            record_worker(run, this_process())
            self.point()
            move(run, record, RunState.PENDING, reason="resumed")
            self.point()
        if any(name in self.dead for name, _ in placement.shares):
            raise StoreError("no such machine")
        if self.process_of(run) is not None:
            return  # the run's own lock turns the second one away
        self.starts += 1
        shares = dict(placement.shares)
        process = Process(run, self.starts, shares, dict(shares))
        self.processes.append(process)
        self.check()
        self.point()
        self._write_down(process)

    def resize(self, run: RunStore, placement: Placement) -> bool:
        self.point()
        process = self.process_of(run)
        if process is None or process.is_stopping or not process.has_begun:
            raise NotNowError("just starting or stopping")
        if self.chance.random() < 0.1:
            raise NotNowError("busy")
        if next(iter(process.shares)) not in dict(placement.shares):
            return False  # whoever leads cannot be moved
        process.wanted = dict(placement.shares)
        self.check()
        self.point()
        return True

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        self.point()
        process = self.process_of(run)
        if process is not None:
            process.is_stopping = True
        self.point()

    def find_strays(self, run_dirs: Sequence[RunStore]) -> None:
        for run in run_dirs:
            process = self.process_of(run)
            if process is not None and not process.is_known:
                self._write_down(process)

    # What happens.

    def submit(self, name: str, *, steps: int | None = None, **request: int) -> RunStore:
        run = open_run(self.home / name)
        run.path.mkdir(parents=True)
        model = {"name": "mlp"}
        (run.path / Document.JOB).write_text(
            json.dumps({"task": "x", "model": model, "name": name})
        )
        record_worker(run, NOBODY)
        run.emit(StateChanged(state="pending", reason="submitted"))
        bounds = {"least": 1, "most": 4, "requested": 1, **request}
        entry = QueueEntry(
            submitted_at=self.wall,
            request=ResourceRequest(**bounds),
            samples=float(self.steps * 32),
        )
        (run.path / Document.QUEUE_ENTRY).write_text(entry.model_dump_json())
        return run

    def tick(self, seconds: float = 1.0) -> None:
        """Every process makes a step, or meets its fate."""
        self.wall += seconds
        self.steady += seconds
        for process in [*self.processes]:
            self._live(process)

    def break_machine(self, name: str) -> None:
        self.dead.add(name)
        for process in [*self.processes]:
            if name in process.shares or name in process.wanted:
                self.processes.remove(process)

    def kill_service(self) -> None:
        """Whoever it kept pending is kept by nobody now."""
        for path in self.home.glob("*/worker.json"):
            run = open_run(path.parent)
            worker = recorded_worker(run)
            if worker is not None and worker == this_process():
                record_worker(run, WorkerProcess(pid=1 << 22, process_started_at=1.0,
                                                     host=worker.host, detached=False))  # fmt: skip

    def process_of(self, run: RunStore) -> Process | None:
        return next((p for p in self.processes if p.run.id == run.id), None)

    def held(self) -> dict[str, int]:
        """Devices that processes really take."""
        held = dict.fromkeys(self.machines, 0)
        for process in self.processes:
            for name, count in _most(process.shares, process.wanted).items():
                held[name] += count
        return held

    def check(self) -> None:
        for name, count in self.held().items():
            if count > self.machines[name]:
                self.violations.append(f"{count} devices of {name} are taken: {self.processes}")
        runs = [process.run.id for process in self.processes]
        if len(runs) != len({*runs}):
            self.violations.append(f"a run is run twice at once: {runs}")

    def point(self) -> None:
        """Where the service may be killed, and where others do not wait for it."""
        if self.meddle is not None and self.chance.random() < 0.05:
            self.meddle()
        if self.chance.random() < self.kills:
            raise Killed

    def _write_down(self, process: Process) -> None:
        process.is_known = True
        worker = WorkerProcess(pid=(1 << 22) + process.number, process_started_at=1.0, host="here",
                               detached=True)  # fmt: skip
        record_worker(process.run, worker)

    def _live(self, process: Process) -> None:
        run = process.run
        if self.chance.random() < self.dawdles:
            return  # in the middle of a long step
        if process.is_over:
            self.processes.remove(process)
            return
        if not process.is_known and self.chance.random() < 0.5:
            return  # its interpreter is still starting
        if self.chance.random() < self.crashes or run.id in self.cursed:
            self.processes.remove(process)
            if self.chance.random() < 0.5:
                run.emit(ErrorRaised(code="training", message="it crashed"))
                run.emit(StateChanged(state="failed"))
            return
        if not process.has_begun:
            process.has_begun = True
            self._write_down(process)  # says itself who works on the run
            process.step = _last_step(run)
            run.emit(sample(AttemptStarted, number=process.number, pid=(1 << 22) + process.number,
                         process_started_at=1.0))  # fmt: skip
            run.emit(StateChanged(state="planning"))
            run.emit(StateChanged(state="running"))
            return
        if process.is_stopping:
            run.emit(sample(CheckpointSaved, step=process.step))
            run.emit(StateChanged(state="stopped"))
            process.is_over = True
            return
        process.shares = dict(process.wanted)
        process.step += 1
        run.emit(sample(CheckpointSaved, step=process.step))
        if process.step >= self.steps:
            run.emit(StateChanged(state="finished"))
            process.is_over = True


class Even:
    """Every device is as good as another: an estimator and its model."""

    def __call__(self, seen, before):
        return self

    def goodput(self, device_type, nodes, devices):
        return np.asarray(devices, dtype=np.float64)

    def choose_batch(self, device_type, nodes, devices):
        raise AssertionError("nobody asks")


class Fair:
    """The least for everybody in turn, then one more for each while there are any; on one machine."""

    name = "fair"

    def decide(self, state: PoolState) -> Decision:
        free = {node.name: node.devices for node in state.nodes}
        placements: dict[str, Placement] = {}
        for job in state.jobs:
            if job.is_pinned:
                placements[job.id] = job.held
                for name, count in job.held.shares:
                    free[name] = free.get(name, 0) - count
        given: dict[str, tuple[str, int]] = {}
        for job in sorted((j for j in state.jobs if not j.is_pinned), key=lambda j: -j.priority):
            own = next((name for name, _ in job.held.shares), None)
            order = sorted(free, key=lambda name: (name != own, -free[name]))
            for name in order:
                if free[name] >= job.min_devices:
                    given[job.id] = (name, job.min_devices)
                    free[name] -= job.min_devices
                    break
        most = {job.id: job.max_devices for job in state.jobs}
        grew = True
        while grew:
            grew = False
            for run_id, (name, count) in given.items():
                if free[name] > 0 and count < most[run_id]:
                    given[run_id], grew = (name, count + 1), True
                    free[name] -= 1
        placements |= {run_id: Placement((share,)) for run_id, share in given.items()}
        reasons = {
            job.id: Reason(code="fair", text="its turn" if job.id in placements else "not its turn")
            for job in state.jobs
        }
        return Decision(placements=placements, reasons=reasons)


def _last_step(run: RunStore) -> int:
    found = [e.step for e, _ in run.read_events() if isinstance(e, CheckpointSaved)]
    return found[-1] if found else 0


def _most(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """In the order of the first: where a run is led from stays first."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one | other}
