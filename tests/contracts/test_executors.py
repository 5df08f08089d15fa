"""What every executor must do: the same job, unchanged, on all of them."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.contracts.executor_setups import (
    ExecutorSetup,
    await_,
    await_step,
    await_workers,
    check_samples,
    kill_processes,
    processes_of,
    state,
    step,
    submit,
)
from tests.integration.slurm_rig import SlurmRig, why_no_slurm
from tests.waiting import LIMIT_S
from yunlu.core.errors import StoreError
from yunlu.executors.executor import ExecutorError, LeaseState, NodeScaling
from yunlu.executors.registry import executor_of, open_executor
from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.jobs import lifecycle
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Document, Log, RunStore

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@contextmanager
def local_setup(directory: Path) -> Generator[ExecutorSetup]:
    executor = open_executor("local://?devices=4&node=here")
    yield ExecutorSetup(
        executor=executor,
        small=Placement((("here", 2),)),
        large=Placement((("here", 3),)),
        starter="yunlu.executors.local:start_worker",
        kill=kill_processes,
    )


@contextmanager
def slurm_setup(directory: Path) -> Generator[ExecutorSetup]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with SlurmRig(directory) as rig, pytest.MonkeyPatch.context() as patch:
        for name, value in rig.environment.items():
            patch.setenv(name, value)
        yield ExecutorSetup(
            executor=open_executor("slurm://main"),
            small=Placement((("n1", 2),)),
            large=Placement((("n1", 2), ("n2", 1))),
            starter="yunlu.executors.slurm:SlurmExecutor.submit",
            kill=kill_processes,
        )


@contextmanager
def ray_setup(directory: Path) -> Generator[ExecutorSetup]:
    module = importlib.import_module("tests.contracts.executor_setups_ray")
    with module.open_ray_setup(directory) as setup:
        yield setup


SETUPS: dict[str, Callable[[Path], AbstractContextManager[ExecutorSetup]]] = {
    "local": local_setup,
    "slurm": slurm_setup,
    "ray": ray_setup,
}


@pytest.fixture(
    scope="module",
    params=["local", "slurm", pytest.param("ray", marks=pytest.mark.long)],
)
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ExecutorSetup]:
    with SETUPS[request.param](tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def run(setup: ExecutorSetup, tmp_path: Path) -> Iterator[RunStore]:
    """A pending run; nothing of it outlives the test."""
    made = submit(tmp_path)
    try:
        yield made
    finally:
        if (made.path / Document.LEASES).exists():
            setup.executor.stop(made, now=True)
        kill_processes(made)


def test_a_run_grows_shrinks_stops_and_goes_on_without_losing_a_sample(
    setup: ExecutorSetup, run: RunStore
) -> None:
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


_STARTER = """
import importlib, os, signal, sys
from pathlib import Path
from yunlu.runs.run_store import RunStore
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
placement = Placement(tuple((node, int(count)) for node, count in eval(shares)))
lifecycle.start(open_run(Path(path)), on=open_executor(address), placement=placement)
"""


def start_and_be_killed(setup: ExecutorSetup, run: RunStore, moment: str) -> None:
    words = [str(run.path), setup.executor.address, repr(setup.small.shares), setup.starter, moment]
    done = subprocess.run([sys.executable, "-c", _STARTER, *words], check=False, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL


def test_a_run_outlives_who_started_it_and_when_it_is_killed_too_it_is_lost_with_the_reason(
    setup: ExecutorSetup, run: RunStore
) -> None:
    start_and_be_killed(setup, run, "after")
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


@pytest.mark.long
def test_a_run_comes_to_its_end(setup: ExecutorSetup, tmp_path: Path) -> None:
    run = submit(tmp_path, steps=30)
    try:
        lifecycle.start(run, on=setup.executor, placement=setup.large)
        await_(run, lambda: lifecycle.read_record(run).state == "finished", "its end")
        await_(run, lambda: not setup.executor.status(run).is_alive, "no lease is left")
        check_samples(run)
        assert (run.path / Area.MODEL / "model.safetensors").exists()
    finally:
        setup.executor.stop(run, now=True)
        kill_processes(run)


def test_who_is_killed_before_starting_a_run_leaves_nothing_behind(
    setup: ExecutorSetup, run: RunStore
) -> None:
    start_and_be_killed(setup, run, "before")
    assert lifecycle.read_record(run).state in {"pending", "lost"}
    (lease,) = setup.executor.status(run).leases
    assert (lease.state, lease.reason) == (LeaseState.GONE, "it was never started")
    assert not processes_of(run)


def test_what_cannot_be_is_refused_with_a_reason(setup: ExecutorSetup, tmp_path: Path) -> None:
    executor = setup.executor
    for stranger in (open_run(tmp_path / "nowhere"), submit(tmp_path)):
        with pytest.raises(StoreError, match=str(stranger.path)):
            executor.status(stranger)
        with pytest.raises(StoreError, match=str(stranger.path)):
            executor.stop(stranger)
        with pytest.raises(StoreError, match=str(stranger.path)):
            executor.resize(stranger, setup.small)
    for placement in (NOTHING, Placement((("no-such-node", 1),))):
        pending = submit(tmp_path)
        with pytest.raises(ExecutorError, match=r"no-such-node|no devices|nothing"):
            lifecycle.start(pending, on=executor, placement=placement)
        assert lifecycle.read_record(pending).state == "failed"


def test_its_nodes_have_what_is_asked_of_them(setup: ExecutorSetup) -> None:
    executor = setup.executor
    assert executor.capabilities().scales == isinstance(executor, NodeScaling)
    nodes = {node.name: node.devices for node in executor.nodes()}
    for name, devices in setup.large.shares:
        assert nodes[name] >= devices
