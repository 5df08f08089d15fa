"""Contract test of executors, to inherit: the same job, unchanged, on all of them.

In your own test suite::

    class TestMyExecutor(ExecutorContract):
        @classmethod
        @contextmanager
        def open_setup(cls, directory):
            yield ExecutorSetup(executor=MyExecutor("mine://"), ...)

The runs are real: processes start, train, are killed and go on. Allow minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import pytest

from yunlu.core.errors import StoreError
from yunlu.core.limits import decode_json
from yunlu.executors.executor import ExecutorError, LeaseState, NodeScaling
from yunlu.executors.registry import executor_of
from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.jobs import lifecycle
from yunlu.runs.events import DataOpened, ErrorRaised, RunEvent, StateChanged, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log
from yunlu.runs.worker_group import read_worker_group
from yunlu.spec.load import load_job
from yunlu.testing.waiting import LIMIT_S, wait_until
from yunlu.training.data.sample_order import StepOrder, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from yunlu.executors.executor import Executor
    from yunlu.runs.run_store import RunStore

EventT = TypeVar("EventT", bound=RunEvent)

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
    vocabulary = ["furnace", "cloud", "ember", "spark", "ash", "coal", "fire", "smoke"]
    lines = [" ".join(vocabulary[(i * k) % 8] for k in range(1, 9)) for i in range(400)]
    (directory / "text.txt").write_text("\n".join(lines))
    (directory / "job.yaml").write_text(JOB.replace("STEPS", str(steps)))
    return lifecycle.submit(load_job(directory / "job.yaml"), source=directory / "job.yaml")


def events_of(run: RunStore, kind: type[EventT]) -> list[EventT]:
    """Events of one kind, in order."""
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def state(run: RunStore) -> str:
    """Newest state of the run."""
    return events_of(run, StateChanged)[-1].state


def step(run: RunStore) -> int:
    """Newest step that was logged."""
    return max((record["step"] for record, _ in run.read_metrics()), default=0)


def await_(run: RunStore, until: Callable[[], bool], what: str) -> None:
    """Until something is so; with the run's own logs where it never is."""

    def explain() -> str:
        files = [
            Path(run.address) / WORKER_LOG,
            *sorted((Path(run.address) / Area.LOGS).glob("*.log")),
            Path(run.address) / Log.LEASE_EVENTS,
        ]
        logs = (f"--- {file.name}\n{file.read_text()[-2500:]}" for file in files if file.exists())
        return "\n".join([str(events_of(run, StateChanged)), *logs])

    wait_until(until, what, explain=explain)


def await_step(run: RunStore, wanted: int) -> None:
    """Until so many steps are logged; an error of the run fails the test."""

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
    lines = (Path(run.address) / Log.LEDGER).read_text().splitlines()
    records = [decode_json(line) for line in lines]
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
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and run.address in process.cmdline():
                processes.append(process)
    return processes


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
    """Workers that hold a rank now."""
    group = read_worker_group(run)
    return sum(member.rank is not None for member in group.workers) if group else 0


class ExecutorContract:
    """Behaviour that runs and the scheduler rely on. Override ``open_setup``."""

    @classmethod
    def open_setup(cls, directory: Path) -> AbstractContextManager[ExecutorSetup]:
        """The executor for as long as the tests of the class take; ``directory`` is for its files."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def setup(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorSetup]:
        """What ``open_setup`` gives, opened once."""
        with cls.open_setup(tmp_path_factory.mktemp("executor")) as opened:
            yield opened

    @pytest.fixture
    def run(self, setup: ExecutorSetup, tmp_path: Path) -> Iterator[RunStore]:
        """A pending run; nothing of it outlives the test."""
        submitted = submit(tmp_path)
        try:
            yield submitted
        finally:
            if submitted.has(Document.LEASES):
                setup.executor.stop(submitted, now=True)
            kill_processes(submitted)

    def test_a_run_grows_shrinks_stops_and_goes_on_without_losing_a_sample(
        self, setup: ExecutorSetup, run: RunStore
    ) -> None:
        """A sample lost or taken twice would change the training."""
        executor = setup.executor
        lifecycle.start(run, on=executor, placement=setup.small)
        with pytest.raises(StoreError, match="was started before"):
            lifecycle.start(run, on=executor, placement=setup.small)
        await_step(run, 5)
        assert executor.status(run).held == setup.small
        before = (run.read(Document.LEASES), run.stat(Log.LEASE_EVENTS))
        assert executor.observe(run).held == setup.small
        assert (run.read(Document.LEASES), run.stat(Log.LEASE_EVENTS)) == before

        if executor.capabilities().resizes_live:
            assert lifecycle.change_placement(run, setup.large).how == "live"
            await_workers(run, setup.large.devices)
            status = executor.status(run)
            assert status.is_alive
            assert status.workers == setup.large.devices
            assert sorted(status.held.shares) == sorted(setup.large.shares)
            node, devices = setup.small.shares[0]
            less = executor.resize(run, Placement(((node, devices - 1),))).how
            assert less == ("live" if executor.capabilities().moves_lead else "restart")
            assert lifecycle.change_placement(run, setup.small).how == "live"
            await_workers(run, setup.small.devices)
            await_(run, lambda: executor.status(run).held == setup.small, "the lease is given back")

        record = lifecycle.stop(run)
        assert record.state == "stopped"
        await_(run, lambda: not executor.status(run).is_alive, "no lease is left")
        await_(run, lambda: not processes_of(run), "no process is left")
        check_samples(run)

        before = step(run)
        lifecycle.resume(run)  # where it was, with what it had
        await_step(run, before + 5)
        assert executor.status(run).held == setup.small
        assert lifecycle.stop(run, now=True).state == "stopped"
        await_(run, lambda: not executor.status(run).is_alive, "no lease is left")
        assert executor.logs(run)[0] == WORKER_LOG
        happenings = [happening for happening, _ in executor.events(run)]
        assert {"asked", "running", "gone"} <= {happening.what for happening in happenings}

    def test_a_run_outlives_who_started_it_and_when_it_is_killed_too_it_is_lost_with_the_reason(
        self, setup: ExecutorSetup, run: RunStore
    ) -> None:
        """Starting is not keeping: the pool may restart at any time."""
        _start_and_be_killed(setup, run, "after")
        await_(run, lambda: state(run) != "pending", "it has begun")
        executor = executor_of(run)
        assert executor is not None
        assert executor.status(run).held == setup.small
        await_step(run, 3)
        setup.kill(run)
        await_(run, lambda: lifecycle.read_record(run).state == "lost", "it is found to be lost")
        assert lifecycle.read_record(run).error
        (lease,) = executor.status(run).leases
        assert lease.state is LeaseState.GONE
        assert lease.reason

    def test_a_run_comes_to_its_end(self, setup: ExecutorSetup, tmp_path: Path) -> None:
        """With its model exported and no device held."""
        run = submit(tmp_path, steps=30)
        try:
            lifecycle.start(run, on=setup.executor, placement=setup.large)
            await_(run, lambda: lifecycle.read_record(run).state == "finished", "its end")
            await_(run, lambda: not setup.executor.status(run).is_alive, "no lease is left")
            check_samples(run)
            assert (Path(run.address) / Area.MODEL / "model.safetensors").exists()
        finally:
            setup.executor.stop(run, now=True)
            kill_processes(run)

    def test_who_is_killed_before_starting_a_run_leaves_nothing_behind(
        self, setup: ExecutorSetup, run: RunStore
    ) -> None:
        """A half-started run must not hold devices."""
        _start_and_be_killed(setup, run, "before")
        assert lifecycle.read_record(run).state in {"pending", "lost"}
        (lease,) = setup.executor.status(run).leases
        assert (lease.state, lease.reason) == (LeaseState.GONE, "it was never started")
        assert not processes_of(run)

    def test_what_cannot_be_is_refused_with_a_reason(
        self, setup: ExecutorSetup, tmp_path: Path
    ) -> None:
        """Unknown runs, unknown nodes and empty placements."""
        executor = setup.executor
        for stranger in (open_run(tmp_path / "nowhere"), submit(tmp_path)):
            with pytest.raises(StoreError, match=stranger.address):
                executor.status(stranger)
            with pytest.raises(StoreError, match=stranger.address):
                executor.stop(stranger)
            with pytest.raises(StoreError, match=stranger.address):
                executor.resize(stranger, setup.small)
        for placement in (NOTHING, Placement((("no-such-node", 1),))):
            pending = submit(tmp_path)
            with pytest.raises(ExecutorError, match=r"no-such-node|no devices|nothing"):
                lifecycle.start(pending, on=executor, placement=placement)
            assert lifecycle.read_record(pending).state == "failed"

    def test_its_nodes_have_what_is_asked_of_them(self, setup: ExecutorSetup) -> None:
        """The scheduler allocates by what ``nodes`` says."""
        executor = setup.executor
        assert executor.capabilities().scales == isinstance(executor, NodeScaling)
        nodes = {node.name: node.devices for node in executor.nodes()}
        for name, devices in setup.large.shares:
            assert nodes[name] >= devices


_STARTER = """
import importlib, json, os, signal, sys
from pathlib import Path
from yunlu.runs.home import open_run
from yunlu.jobs import lifecycle
from yunlu.hardware.fleet import Placement
from yunlu.executors.registry import open_executor

path, address, shares, starter, moment = sys.argv[1:]
module, _, name = starter.partition(":")
owner = importlib.import_module(module)
for part in name.split(".")[:-1]:
    owner = getattr(owner, part)
name = name.split(".")[-1]
real = getattr(owner, name)

def start(*words, **options):
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(*words, **options)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, start)
placement = Placement(tuple((node, count) for node, count in json.loads(shares)))
lifecycle.start(open_run(Path(path)), on=open_executor(address), placement=placement)
"""


def _start_and_be_killed(setup: ExecutorSetup, run: RunStore, moment: str) -> None:
    """Start the run from a process that dies before or after it has started something."""
    arguments = [
        run.address,
        setup.executor.address,
        json.dumps(setup.small.shares),
        setup.starter,
        moment,
    ]
    done = subprocess.run(
        [sys.executable, "-c", _STARTER, *arguments], check=False, timeout=LIMIT_S
    )
    assert done.returncode == -signal.SIGKILL
