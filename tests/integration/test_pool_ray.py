"""The pool's service on a real Ray cluster of several raylets: it is killed, and so is a raylet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.pool_drill import (
    PATIENCE_S,
    Drill,
    attempts_of,
    held_by,
    nodes_of,
    sizes_of,
)
from tests.integration.ray_rig import RayRig, why_no_ray
from yunlu.executors.ray_executor import RayExecutor
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.testing.executors import FOR_EVER, check_samples, processes_of, state, step

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_no_ray() is not None, reason=str(why_no_ray())),
]


@pytest.fixture
def rig() -> Iterator[RayRig]:
    with RayRig(2, 1, 1) as made:
        yield made


@pytest.fixture
def pool(rig: RayRig, own_home: Path, tmp_path: Path) -> Iterator[Drill]:
    settings = PoolSettings(executor=rig.address, policy="fair", round_s=5.0, look_s=0.5)
    made, executor = Drill(own_home, tmp_path, settings), RayExecutor(rig.address)
    try:
        yield made
    finally:
        made.close(executor)
        executor.close()


def test_queue_outlives_its_service_and_a_raylet(rig: RayRig, pool: Drill) -> None:
    first = pool.submit("first", steps=FOR_EVER, max_devices=3)
    pool.up()
    pool.wait(lambda: 3 in sizes_of(first), "alone, it grows over two nodes")
    assert len(nodes_of(first)) == 2
    pool.wait(lambda: pool.is_measured(first), "it is known how busy it and its machines are")

    others = [pool.submit(f"short{number}", steps=300, max_devices=1) for number in range(2)]
    pool.wait(lambda: any(map(nodes_of, others)), "one of the others was asked for")
    pool.kill()  # in the middle of starting them
    pool.up()
    pool.await_training(first, *others)
    assert attempts_of(first) == 1  # it made room, and was not stopped for that

    attempts = {run.id: attempts_of(run) for run in pool.runs}
    pool.kill()
    pool.await_training(first)  # nobody minds
    pool.up()
    pool.wait(lambda: pool.phase(first) == "running", "it is adopted")
    assert {run.id: attempts_of(run) for run in pool.runs} == attempts

    lost, before = nodes_of(first)[0], step(first)
    rig.kill(lost)
    pool.wait(lambda: all(lost not in held_by(run) for run in pool.runs), f"{lost} is left")
    pool.await_end(*others)
    pool.wait(lambda: step(first) > before + 5, "it goes on elsewhere", 2 * PATIENCE_S)
    pool.wait(
        lambda: lost not in {node["name"] for node in pool.view()["nodes"]},
        "Ray has given it up",
    )
    assert read_allocation(first).failures == 0  # not counted against it

    pool.dismiss(first)
    assert state(first) == "stopped"
    pool.wait(lambda: pool.view().get("held") == 0, "every device is given back")
    pool.wait(lambda: not any(map(processes_of, pool.runs)), "nobody is left")
    for run in pool.runs:
        check_samples(run)
    assert "Traceback" not in PoolStore(pool.home).log.read_text()


def test_asynchronous_workers_share_the_pool_and_outlive_the_node_of_their_servers(
    rig: RayRig, pool: Drill
) -> None:
    first = pool.submit("apart", steps=FOR_EVER, exchange="asynchronous", max_devices=3)
    pool.up()
    pool.wait(lambda: 3 in sizes_of(first), "alone, it grows over two nodes")
    assert len(nodes_of(first)) == 2

    other = pool.submit("short", steps=200, max_devices=2)
    pool.await_end(other)
    pool.kill()
    pool.await_training(first)  # nobody minds
    pool.up()
    pool.wait(lambda: pool.phase(first) == "running", "it is adopted")
    assert attempts_of(first) == 1  # it made room, and was not stopped for that

    lost, before = nodes_of(first)[0], step(first)
    rig.kill(lost)
    pool.wait(lambda: lost not in held_by(first), f"{lost} is left")
    pool.wait(lambda: step(first) > before + 5, "it goes on elsewhere", 2 * PATIENCE_S)
    assert read_allocation(first).failures == 0  # not counted against it

    pool.dismiss(first)
    assert state(first) == "stopped"
    pool.wait(lambda: pool.view().get("held") == 0, "every device is given back")
    for run in pool.runs:
        check_samples(run)
    assert "Traceback" not in PoolStore(pool.home).log.read_text()
