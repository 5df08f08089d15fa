"""Runs on a real Ray cluster of several raylets, some of which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.ray_rig import RayRig, why_no_ray
from tests.waiting import LIMIT_S, wait_until
from yunlu.executors.executor import ExecutorError, LeaseState
from yunlu.executors.ray_executor import RayExecutor
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.runs.events import WorkerGroupFormed
from yunlu.runs.run_store import Document, RunStore
from yunlu.testing.executors import (
    await_,
    await_step,
    await_workers,
    check_samples,
    events_of,
    kill_processes,
    processes_of,
    state,
    step,
    submit,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.skipif(why_no_ray() is not None, reason=str(why_no_ray())),
]

_DRIVER = """
import sys, time
from pathlib import Path
from yunlu.runs.run_store import RunStore
from yunlu.runs.home import open_run
from yunlu.jobs import lifecycle
from yunlu.hardware.fleet import Placement
from yunlu.executors.ray_executor import RayExecutor
shares = tuple((node, 1) for node in sys.argv[3:])
on = RayExecutor(sys.argv[1])
lifecycle.start(open_run(Path(sys.argv[2])), on=on, placement=Placement(shares))
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def rig() -> Generator[RayRig]:
    with RayRig(1, 1, 1, client=True) as made:
        yield made


@pytest.fixture
def executor(rig: RayRig) -> Generator[RayExecutor]:
    made = RayExecutor(f"ray?head={rig.head}")
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path, executor: RayExecutor) -> Generator[RunStore]:
    """A pending run; nothing of it outlives the test."""
    made = submit(tmp_path)
    try:
        yield made
    finally:
        if (made.path / Document.LEASES).exists():
            executor.stop(made, now=True)
        kill_processes(made)


def family_on(run: RunStore, raylet: int) -> list[psutil.Process]:
    """Who works for the run on the node of a raylet."""
    found: list[psutil.Process] = []
    for each in processes_of(run):
        with suppress(psutil.NoSuchProcess):  # who starts a keeper leaves it alone at once
            if str(raylet) in each.cmdline():
                found += [each, *each.children(recursive=True)]
    return found


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def spread(nodes: list[str]) -> Placement:
    return Placement(tuple((node, 1) for node in nodes))


def stop_and_check(run: RunStore, executor: RayExecutor) -> None:
    """Stopped and saved, nobody left, no sample lost or taken twice."""
    lifecycle.stop(run)
    assert state(run) == "stopped"
    await_(run, lambda: not executor.status(run).is_alive, "no lease is left")
    await_(run, lambda: not processes_of(run), "no process is left")
    check_samples(run)


def test_leases_outlive_their_driver_and_a_node_that_is_lost_costs_no_sample(
    rig: RayRig, executor: RayExecutor, run: RunStore
) -> None:
    nodes = list(rig.raylets)
    assert {node.name: node.devices for node in executor.nodes()} == dict.fromkeys(nodes, 1)
    words = [sys.executable, "-c", _DRIVER, executor.address, str(run.path), *nodes]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "started\n"
        os.kill(driver.pid, signal.SIGKILL)
    await_workers(run, 3)
    status = executor.status(run)  # of an executor that has started nothing
    assert [each.state for each in status.leases] == [LeaseState.RUNNING] * 3
    assert status.held == status.wanted == spread(nodes)

    on_it = family_on(run, rig.raylets[nodes[2]])
    assert len(on_it) > 3  # the keeper, the lease, the node and its worker
    killed_at = time.time()
    rig.kill(nodes[2])
    await_(run, lambda: all(map(has_ended, on_it)), "no orphan of the dead node is left")
    await_(run, lambda: executor.status(run).leases[2].state is LeaseState.GONE, "it is known")
    assert "raylet" in executor.status(run).leases[2].reason
    await_workers(run, 2)
    await_step(run, step(run) + 20)
    group = events_of(run, WorkerGroupFormed)[-1]
    assert group.redone_steps == 0
    first = next(each for each, _ in run.read_metrics() if each["step"] > group.from_step)
    sys.stdout.write(f"a step again {first['at'] - killed_at:.2f} s after the kill of a raylet\n")
    stop_and_check(run, executor)


def test_asynchronous_workers_are_on_several_nodes_and_a_raylet_that_dies_holds_nobody_up(
    rig: RayRig, executor: RayExecutor, run: RunStore
) -> None:
    job = json.loads((run.path / Document.JOB).read_text())
    job["communication"] = {"method": "asynchronous"}
    (run.path / Document.JOB).write_text(json.dumps(job))
    while len(rig.raylets) < 3:
        rig.add(1)
    nodes = list(rig.raylets)
    lifecycle.start(run, on=executor, placement=spread(nodes[:2]))
    await_workers(run, 2)
    assert executor.status(run).workers == 2
    assert lifecycle.change_placement(run, spread(nodes)).how == "live"
    await_workers(run, 3)

    on_it = family_on(run, rig.raylets[nodes[1]])
    rig.kill(nodes[1])
    await_(run, lambda: all(map(has_ended, on_it)), "no orphan of the dead node is left")
    await_workers(run, 2)
    fewer = spread([nodes[0], nodes[2]])
    assert lifecycle.change_placement(run, fewer).how == "live"
    await_(run, lambda: executor.status(run).held == fewer, "the lost device is forgotten")
    stop_and_check(run, executor)


def _is_lease(process: psutil.Process) -> bool:
    """By its title; of an actor with a name that is ``ray::NAME:LeaseActor``."""
    try:
        words = [word for word in process.cmdline() if word.startswith("ray::")]
        return any("LeaseActor" in word for word in words)
    except psutil.Error:  # it has just ended
        return False


def test_a_lease_waits_for_its_devices_is_called_off_or_killed_and_they_are_free_again(
    rig: RayRig, executor: RayExecutor, run: RunStore, tmp_path: Path
) -> None:
    node = next(iter(rig.raylets))
    lifecycle.start(run, on=executor, placement=Placement(((node, 1),)))
    await_(run, lambda: bool(processes_of(run)), "it has begun")
    (tmp_path / "second").mkdir()
    second = submit(tmp_path / "second")
    lifecycle.start(second, on=executor, placement=Placement(((node, 1),)))
    (lease,) = executor.status(second).leases
    assert lease.state is LeaseState.WAITING
    assert node in lease.reason
    assert lifecycle.read_record(second).state == "pending"
    assert executor.nodes()[0].devices == 1  # ours, though it is taken
    assert lifecycle.stop(second).state == "stopped"
    await_(second, lambda: not executor.status(second).is_alive, "it is called off")
    assert not processes_of(second)

    def family() -> list[psutil.Process]:
        return family_on(run, rig.raylets[node])

    await_(run, lambda: len(family()) > 3, "keeper, lease, node and worker")
    on_it = family()
    (actor,) = [each for each in rig.processes() if _is_lease(each)]
    actor.kill()
    await_(run, lambda: all(map(has_ended, on_it)), "what the actor had started is gone")
    await_(run, lambda: not executor.status(run).is_alive, "its lease is gone")
    assert "actor" in executor.status(run).reason

    def is_free() -> bool:
        return all(each.available == each.resources for each in executor.survey().nodes)

    await_(run, is_free, "its devices are given back")


def test_a_bridge_that_dies_is_built_again(executor: RayExecutor) -> None:
    before = executor.nodes()
    (bridge,) = [
        child
        for child in psutil.Process().children()
        if any("ray_bridge" in w for w in child.cmdline())
    ]
    bridge.suspend()
    bridge.kill()
    bridge.wait(LIMIT_S)
    assert executor.nodes() == before


def test_a_cluster_that_is_not_there_is_told_in_its_own_words() -> None:
    executor = RayExecutor("ray?head=127.0.0.1:9")
    with pytest.raises(ExecutorError, match="no connection to the Ray cluster at 127"):
        executor.nodes()
    executor.close()


def test_from_outside_the_cluster_even_the_loss_of_the_lead_costs_no_sample(
    rig: RayRig, run: RunStore
) -> None:
    while len(rig.raylets) < 3:
        rig.add(1)
    nodes = list(rig.raylets)
    executor = RayExecutor(rig.address)
    try:
        lifecycle.start(run, on=executor, placement=spread(nodes))
        await_workers(run, 3)
        on_it = family_on(run, rig.raylets[nodes[0]])
        rig.kill(nodes[0])
        await_(run, lambda: all(map(has_ended, on_it)), "no orphan of the dead node is left")
        await_workers(run, 2)
        await_step(run, step(run) + 20)
        assert events_of(run, WorkerGroupFormed)[-1].redone_steps == 0
        stop_and_check(run, executor)
    finally:
        executor.close()


def test_the_autoscaler_brings_nodes_and_takes_them_away() -> None:
    with RayRig(grows=(2, 2)) as rig:
        executor = RayExecutor(f"{rig.address}&grow=cpu:2x2")
        try:
            assert executor.nodes() == ()
            for wanted in (2, 0):
                executor.scale("cpu", wanted)
                wait_until(
                    lambda wanted=wanted: executor.reserves()[0].awake == wanted,
                    f"{wanted} nodes awake",
                )
                assert [node.devices for node in executor.nodes()] == [2] * wanted
        finally:
            executor.close()
