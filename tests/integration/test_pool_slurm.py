"""The pool's service on a real Slurm: it is killed, nodes die, and nodes come when they are wanted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import Yunlu
from tests.integration.pool_drill import (
    PATIENCE_S,
    Drill,
    attempts_of,
    held_by,
    nodes_of,
    sizes_of,
)
from tests.integration.slurm_rig import SlurmRig, why_no_slurm
from tests.waiting import wait_until
from yunlu.executors.slurm import SlurmExecutor
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.scheduler.pool_store import PoolSettings, PoolStore
from yunlu.scheduler.queue import read_entry
from yunlu.testing.executors import FOR_EVER, check_samples, state, step

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
]

MakeDrill = Callable[..., tuple[SlurmRig, Drill]]


@pytest.fixture
def make_drill(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeDrill]:
    with ExitStack() as stack:

        def make(
            nodes: int, *, suspend_s: int = 3, feature: str = "cloud", **settings: object
        ) -> tuple[SlurmRig, Drill]:
            rig = SlurmRig(tmp_path / "slurm", nodes=nodes, suspend_s=suspend_s, feature=feature)
            stack.enter_context(rig)
            for name, value in rig.environment.items():
                monkeypatch.setenv(name, value)
            usual = {"executor": "slurm://main", "policy": "fair", "round_s": 5.0, "look_s": 0.5}
            drill = Drill(own_home, tmp_path, PoolSettings.model_validate(usual | settings))
            stack.callback(drill.close, SlurmExecutor("slurm://main"))
            return rig, drill

        yield make


def test_queue_outlives_its_service_and_a_node(make_drill: MakeDrill, yunlu: Yunlu) -> None:
    rig, pool = make_drill(3, max_nodes=3)
    # Two is what it is led from, and what it keeps at least: it can always make room live.
    first = pool.submit("first", steps=FOR_EVER, min_devices=2, max_devices=4)
    pool.up()
    pool.wait(lambda: 4 in sizes_of(first), "alone, it grows over two nodes")
    assert len(nodes_of(first)) == 2
    pool.wait(lambda: pool.is_measured(first), "it is known how busy it and its machines are")

    others = [pool.submit(f"short{number}", steps=250, max_devices=1) for number in range(2)]
    pool.wait(lambda: any(map(nodes_of, others)), "one of the others was asked for")
    pool.kill()  # in the middle of starting them
    pool.up()
    others.append(pool.submit("single", steps=250, max_devices=1))
    pool.await_training(first, *others)
    assert attempts_of(first) == 1  # it made room, and was not stopped for that
    pool.wait(lambda: 3 in sizes_of(first), "it has made room")

    attempts = {run.id: attempts_of(run) for run in pool.runs}
    pool.kill()
    pool.await_training(first)  # nobody minds
    pool.up()
    pool.wait(lambda: pool.phase(first) == "running", "it is adopted")
    pool.await_training(first)
    assert {run.id: attempts_of(run) for run in pool.runs} == attempts

    lost = nodes_of(first)[0]
    before, on_it = step(first), [run for run in pool.runs if lost in nodes_of(run)]
    rig.kill_node(lost)
    try:
        pool.wait(lambda: all(lost not in held_by(run) for run in pool.runs), f"{lost} is left")
        pool.wait(lambda: step(first) > before + 5, "it goes on elsewhere", 2 * PATIENCE_S)
        assert lost not in {node["name"] for node in pool.view()["nodes"]}
        assert first in on_it
        pool.await_end(*others)
    finally:
        rig.start_node(lost)
    said = yunlu("pool", "why", first.id)
    assert (said.code, first.id in said.out) == (0, True), said.err
    moved = [
        line for line in PoolStore(pool.home).read_decisions(first.id) if line["code"] == "moved"
    ]
    assert any(lost in dict(line["was"]) and lost not in dict(line["shares"]) for line in moved)

    pool.dismiss(first)
    assert state(first) == "stopped"
    pool.wait(lambda: pool.view().get("held") == 0, "every device is given back")
    wait_until(
        lambda: not rig.call("squeue", "--noheader"),
        "Slurm's queue is empty",
        explain=rig.describe_logs,
    )
    for run in pool.runs:
        check_samples(run)
    assert "Traceback" not in PoolStore(pool.home).log.read_text()


def test_run_that_others_keep_from_its_devices_is_placed_elsewhere(make_drill: MakeDrill) -> None:
    rig, pool = make_drill(2, max_nodes=2, queue_s=5.0)
    run = pool.submit("patient", steps=300, min_devices=2, max_devices=2)
    # Somebody else comes between the pool's look and its asking: the node is there, and full.
    executor = SlurmExecutor("slurm://main")
    words = ["sbatch", "--parsable", "--partition=main", "--output=/dev/null", "--gres=gpu:1"]
    blocker = rig.call(*words, "--nodelist=n1", "--wrap=exec sleep 900")
    wait_until(
        lambda: "RUNNING" in rig.call("squeue", "--noheader", "--format=%T"), "it is blocked"
    )
    lifecycle.start(run, on=executor, placement=Placement((("n1", 2),)))
    pool.up()
    pool.wait(lambda: nodes_of(run) == ["n2"], "it was called off, and sent elsewhere")
    pool.await_end(run)
    assert attempts_of(run) == 1
    rig.call("scancel", blocker)
    check_samples(run)


def test_nodes_are_resumed_for_a_queue_and_suspended_when_idle(make_drill: MakeDrill) -> None:
    # Slurm itself would suspend them after ten minutes: it is the pool that does.
    rig, pool = make_drill(1, suspend_s=600, grow_after_s=1.0, idle_s=4.0, round_s=1.0)
    executor = SlurmExecutor("slurm://main")
    pool.up()
    assert executor.reserves()[0].awake == 0
    runs = [
        pool.submit(f"job{number}", steps=200, min_devices=2, max_devices=2) for number in range(3)
    ]
    pool.wait(lambda: {"resume c1", "resume c2"} <= {*rig.power_log()}, "nodes are resumed")
    pool.await_training(*runs)
    assert {nodes_of(run)[0] for run in runs} == {"n1", "c1", "c2"}
    pool.await_end(*runs)
    pool.wait(lambda: {"suspend c1", "suspend c2"} <= {*rig.power_log()}, "nodes are suspended")
    pool.wait(lambda: executor.reserves()[0].awake == 0, "they sleep")
    pool.wait(lambda: pool.view()["devices"] == 2, "the pool knows")
    assert rig.power_log().count("resume c1") == 1  # once: nobody changed his mind
    told = [
        line["text"]
        for line in PoolStore(pool.home).read_decisions("")
        if line["code"] == "machines"
    ]
    assert any(re.search(r"more of gpu", text) for text in told), told
    assert any("idle" in text for text in told), told
    for run in runs:
        assert attempts_of(run) == 1
        check_samples(run)


def test_when_spot_is_taken_away_on_demand_makes_the_deadline(make_drill: MakeDrill) -> None:
    prices = {"gpu": 2.0, "gpu-spot": 0.5}
    rig, pool = make_drill(
        1, suspend_s=600, feature="spot", policy="yunlu", round_s=1.0, grow_after_s=1.0,
        prices=prices,
    )  # fmt: skip
    words = ["sbatch", "--parsable", "--partition=main", "--output=/dev/null", "--gres=gpu:2"]
    rig.call(*words, "--nodelist=n1", "--wrap=exec sleep 3600")  # what is always there is not ours
    wait_until(
        lambda: "RUNNING" in rig.call("squeue", "--noheader", "--format=%T"), "it is blocked"
    )
    pool.up()
    run = pool.submit("late", steps=1500, min_devices=2, max_devices=2, deadline_s=420.0)
    entry = read_entry(run)
    assert entry is not None
    assert entry.deadline_at is not None
    pool.await_training(run)
    assert nodes_of(run) == ["c1"]  # the cheaper one

    rig.kill_node("c1")
    pool.wait(lambda: not held_by(run), "it is gone from there")
    pool.wait(lambda: nodes_of(run) == ["c2"], "it is on on-demand", 420)
    pool.await_end(run)
    ended_at = [event.at for event, _ in run.read_events()][-1]
    assert ended_at <= entry.deadline_at
    told = " / ".join(line["text"] for line in PoolStore(pool.home).read_decisions(run.id))
    assert re.search("(on|for) spot.* to make its deadline", told), told
    check_samples(run)
