"""The pool's service as a process, killed under load; runs as processes that train nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import wait_until
from yunlu.core.errors import StoreError
from yunlu.core.files import read_lines
from yunlu.executors.worker_process import recorded_worker
from yunlu.jobs import lifecycle
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.run_store import WORKER_LOG, Document, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group
from yunlu.scheduler import control, queue
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.pool_view import explain
from yunlu.scheduler.queue import SubmitOptions, enqueue
from yunlu.spec.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SERVICE = (sys.executable, str(Path(__file__).with_name("pool_service.py")))
DEVICES = 4


class Pool:
    """A pool of four shares of this machine, and what was queued in it."""

    def __init__(self, home: Path, policy: str = "yunlu") -> None:
        self.home, self.policy = home, policy
        self.runs: list[RunStore] = []

    def up(self) -> int:
        address = f"local://?devices={DEVICES}"
        settings = PoolSettings(
            executor=address, policy=self.policy, round_s=2.0, look_s=0.1, stall_s=600.0
        )
        return control.bring_up(self.home, settings).pid

    def kill(self) -> None:
        """As the system does when memory runs out."""
        found = control.find_service(self.home)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        self.wait(lambda: control.find_service(self.home) is None)

    def submit(
        self, name: str = "light", *, steps: int = 100, step_s: float = 0.05, fate: str = "",
        devices: int | str = "auto", **asked: object,
    ) -> RunStore:  # fmt: skip
        args = {"steps": steps, "step_s": step_s, "fate": fate}
        job = Job.model_validate(
            {
                "name": name,
                "task": "tabular-classification",
                "data": "synthetic:x",
                "model": {"name": "mlp", "args": args},
                "train": {"steps": steps, "batch": 8},
                "devices": devices,
            }
        )
        self.runs.append(enqueue(job, SubmitOptions.model_validate(asked)))
        return self.runs[-1]

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(
            condition, "what the test waits for", meanwhile=self.judge, explain=self.describe
        )

    def wait_states(self, state: RunState) -> None:
        self.wait(lambda: all(state_of(run) is state for run in self.runs))

    def judge(self) -> None:
        """Nobody works on a run that another one works on; nobody takes what is not there."""
        held = 0
        for run in self.runs:
            found = processes_of(run)
            assert len(found) <= 1, f"{run.id} is run twice: {found}"
            group = read_worker_group(run)
            if found and group is not None and group.pid == found[0]:
                held += group.target
        assert held <= DEVICES, self.describe()

    def check_samples(self) -> None:
        """Every step was made once: nothing was lost, and nothing done again."""
        for run in self.runs:
            steps = [line["step"] for line, _ in read_lines(run.path / Log.LEDGER)]
            assert steps == list(range(1, len(steps) + 1)), run.id

    def describe(self) -> str:
        pool_store = PoolStore(self.home)
        texts = [str(pool_store.read_view()), *map(str, pool_store.read_decisions())]
        texts.append(pool_store.log.read_text() if pool_store.log.exists() else "")
        for run in self.runs:
            texts += [run.id, *(str(event)[:300] for event, _ in run.read_events())]
            texts += (
                [(run.path / Document.ALLOCATION).read_text()]
                if (run.path / Document.ALLOCATION).exists()
                else []
            )
            texts += (
                [(run.path / WORKER_LOG).read_text()] if (run.path / WORKER_LOG).exists() else []
            )
        return "\n".join(texts)

    def close(self) -> None:
        control.bring_down(self.home)
        for run in self.runs:
            for pid in processes_of(run):
                with suppress(ProcessLookupError):  # it may just be leaving
                    os.kill(pid, signal.SIGKILL)


def processes_of(run: RunStore) -> list[int]:
    """Heads of a session that work on the run."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            mine = str(run.path) in process.cmdline() and os.getsid(process.pid) == process.pid
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def state_of(run: RunStore) -> RunState:
    told = [e.state for e, _ in run.read_events() if isinstance(e, StateChanged)]
    return RunState(told[-1])


def attempts_of(run: RunStore) -> int:
    return sum(isinstance(event, AttemptStarted) for event, _ in run.read_events())


@pytest.fixture
def pool(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(control, "PROGRAM", SERVICE)
    found = Pool(own_home)
    try:
        yield found
    finally:
        found.close()


def addresses_of_listeners(pid: int) -> set[str]:
    """Addresses on which a process listens; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        connections = psutil.Process(pid).net_connections("tcp")
        return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return set()


def test_queue_survives_the_service_being_killed_at_random_moments(pool: Pool) -> None:
    seed = int(os.environ.get("YUNLU_SEED", "7"))
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    sizes = [(1, 4), (1, 2), (2, 2), (1, 4), (1, 1)]
    for number, (least, most) in enumerate(sizes):
        pool.submit(f"job{number}", steps=chance.randrange(60, 140), min_devices=least,
                    max_devices=most)  # fmt: skip
    for _ in range(3):
        pool.up()
        until = time.monotonic() + chance.uniform(0.0, 2.5)
        pool.wait(lambda until=until: time.monotonic() > until)
        pool.kill()
    pool.up()
    pool.wait_states(RunState.FINISHED)
    pool.wait(lambda: not any(processes_of(run) for run in pool.runs))
    pool.check_samples()
    view = PoolStore(pool.home).read_view()
    pool.wait(lambda: (PoolStore(pool.home).read_view() or {}).get("held") == 0)
    assert view is not None


def test_running_workers_are_adopted_not_restarted_and_verbs_work(pool: Pool) -> None:
    first = pool.submit("first", steps=40_000, step_s=0.2, max_devices=4)
    pool.up()
    with pytest.raises(StoreError, match="up already"):
        pool.up()
    pool.wait(lambda: (read_worker_group(first) or Nothing).target == 4)
    worker = recorded_worker(first)
    assert worker is not None
    pool.kill()
    assert worker.is_alive()
    pool.up()
    second = pool.submit("second", steps=40_000, step_s=0.2, priority=1)
    pool.wait(lambda: state_of(second) is RunState.RUNNING)
    assert attempts_of(first) == 1
    assert recorded_worker(first) == worker
    service = control.find_service(pool.home)
    assert service is not None
    assert addresses_of_listeners(service.pid) == set()  # it is reached through files only
    for run in (first, second):
        for pid in processes_of(run):
            assert addresses_of_listeners(pid) <= {"127.0.0.1"}
    pool.judge()

    pool.wait(lambda: explain(pool.home, second).standing.startswith(("running", "changing")))
    said = explain(pool.home, second)
    assert said.history
    assert set(said.holders) == {first.id, second.id}

    queue.pause(first)
    pool.wait(lambda: state_of(first) is RunState.STOPPED and not processes_of(first))
    pool.wait(lambda: (read_worker_group(second) or Nothing).target == 4)
    pool.wait(lambda: "paused" in explain(pool.home, first).standing)
    queue.change_terms(
        first, priority=2
    )  # else it might wait: the other makes good use of all devices
    queue.requeue(first)
    pool.wait(lambda: state_of(first) is RunState.RUNNING)
    assert attempts_of(first) == 2

    for run in (first, second):
        queue.withdraw(run)
        lifecycle.stop(run)
    pool.wait(lambda: not processes_of(first) and not processes_of(second))
    pool.wait(lambda: (PoolStore(pool.home).read_view() or {}).get("held") == 0)
    pool.check_samples()
    assert [attempts_of(first), attempts_of(second)] == [2, 1]


def test_job_that_crashes_at_start_does_not_hold_up_the_others(pool: Pool) -> None:
    bad = pool.submit("bad", fate="crash")
    good = pool.submit("good", steps=20)
    pool.up()
    pool.wait(lambda: state_of(good) is RunState.FINISHED)

    def allocation() -> dict[str, Any]:
        path = bad.path / Document.ALLOCATION
        return json.loads(path.read_text()) if path.exists() else {"failures": 0}

    pool.wait(lambda: allocation()["failures"] >= 1)
    pool.wait(lambda: allocation()["shares"] == [])
    pool.wait(lambda: "failed" in explain(pool.home, bad).standing)


def test_pool_goes_down_with_its_jobs_and_goes_on_with_them(pool: Pool) -> None:
    run = pool.submit("long", steps=300, step_s=2.0, max_devices=2)
    pool.up()
    pool.wait((run.path / Log.LEDGER).exists)
    assert control.bring_down(pool.home, stop_jobs=True)
    pool.wait(lambda: state_of(run) is RunState.STOPPED and not processes_of(run))
    assert not control.bring_down(pool.home)
    job = json.loads((run.path / Document.JOB).read_text())
    job["model"]["args"]["step_s"] = 0.01  # stopped for certain, it need not be slow any more
    (run.path / Document.JOB).write_text(json.dumps(job))
    pool.up()
    pool.wait_states(RunState.FINISHED)
    pool.check_samples()
    assert attempts_of(run) == 2


class Nothing:
    target = 0
