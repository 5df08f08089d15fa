"""Runs on a real Slurm: its queue, preemption, nodes that die, and nodes that come when wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slurm_rig import SlurmRig, why_no_slurm
from tests.waiting import wait_until
from yunlu.executors import slurm
from yunlu.executors.executor import ExecutorError, LeaseState
from yunlu.executors.lease_executor import known_record
from yunlu.executors.slurm import SlurmExecutor
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.runs.events import AttemptStarted, StateChanged, WorkerGroupFormed, WorkerLost
from yunlu.runs.run_store import Document, RunStore
from yunlu.testing.executors import (
    await_,
    await_step,
    await_workers,
    check_samples,
    events_of,
    kill_processes,
    state,
    step,
    submit,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

N1 = Placement((("n1", 1),))


@pytest.fixture(scope="module")
def module_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRig]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with SlurmRig(tmp_path_factory.mktemp("slurm"), nodes=3) as made:
        yield made


@pytest.fixture
def rig(module_rig: SlurmRig, monkeypatch: pytest.MonkeyPatch) -> SlurmRig:
    for name, value in module_rig.environment.items():
        monkeypatch.setenv(name, value)
    return module_rig


@pytest.fixture
def run(rig: SlurmRig, tmp_path: Path) -> Iterator[RunStore]:
    made = submit(tmp_path)
    try:
        yield made
    finally:
        if (made.path / Document.LEASES).exists():
            SlurmExecutor().stop(made, now=True)
        kill_processes(made)
        rig.call("scancel", "--me")
        wait_until(
            lambda: not rig.call("squeue", "--noheader"),
            "an empty queue",
            explain=rig.describe_logs,
        )


def block(rig: SlurmRig, node: str, *, gpus: int = 2, seconds: int = 600) -> str:
    """A job of somebody else on a node."""
    words = ["sbatch", "--parsable", "--partition=main", f"--nodelist={node}", "--output=/dev/null"]
    return rig.call(*words, f"--gres=gpu:{gpus}", f"--wrap=exec sleep {seconds}")


def test_a_run_that_waits_in_the_queue_is_pending_with_the_reason_and_can_be_stopped(
    rig: SlurmRig, run: RunStore
) -> None:
    blocker = block(rig, "n1", gpus=1)
    wait_until(
        lambda: "RUNNING" in rig.call("squeue", "--noheader", "--format=%T"), "it is blocked"
    )
    executor = SlurmExecutor()
    free = {node.name: node.devices for node in executor.nodes()}
    assert free == {"n1": 1, "n2": 2, "n3": 2}
    lifecycle.start(run, on=executor, placement=Placement((("n1", 2), ("n2", 1))))
    wait_until(lambda: bool(executor.status(run).reason), "Slurm has a reason")
    status = executor.status(run)
    assert status.is_waiting
    wait_until(
        lambda: "Resources" in executor.status(run).reason,
        "it waits for devices",
        explain=rig.describe_logs,
    )
    assert not executor.status(run).held
    assert (
        lifecycle.read_record(run).state == "pending"
    )  # not lost, though no process answers for it
    assert lifecycle.stop(run).state == "stopped"
    assert not executor.status(run).is_alive
    assert rig.call("squeue", "--noheader", "--format=%i") == blocker


def test_without_slurm_and_while_it_is_mute_the_words_are_clear(
    rig: SlurmRig, run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(rig, "n1")
    executor = SlurmExecutor("slurm://main")
    lifecycle.start(run, on=executor, placement=N1)
    with pytest.raises(ExecutorError, match="this Slurm has no partition 'nowhere'"):
        SlurmExecutor("slurm://nowhere").submit(
            run, known_record(run).leases[0], directory=run.path, lead=None
        )
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "_ANSWER_S", 1)
        patch.setenv("SLURM_CONF", str(rig.place / "nowhere.conf"))
        with pytest.raises(ExecutorError, match=r"Slurm (refused|has not answered) squeue"):
            executor.status(run)
        assert lifecycle.read_record(run).state == "pending"  # who cannot be asked is believed
        patch.setenv("PATH", str(run.path))
        with pytest.raises(ExecutorError, match="there is no squeue"):
            executor.nodes()


def test_nodes_are_powered_up_and_down_as_they_are_wanted(rig: SlurmRig) -> None:
    executor = SlurmExecutor()
    (reserve,) = executor.reserves()
    assert (reserve.type, reserve.devices, reserve.most) == ("gpu", 2, 2)
    assert {node.name for node in executor.nodes()} == {"n1", "n2", "n3"}
    executor.scale("gpu", 1)

    def awake() -> set[str]:
        return {node.name for node in executor.nodes()} - {"n1", "n2", "n3"}

    wait_until(lambda: awake() == {"c1"}, "c1 is there", explain=rig.describe_logs)
    executor.scale("gpu", 0)
    wait_until(lambda: not awake(), "c1 is gone", explain=rig.describe_logs)
    wait_until(
        lambda: executor.reserves()[0].awake == 0, "all sleep again", explain=rig.describe_logs
    )


@pytest.mark.long
def test_a_run_grows_onto_nodes_that_wake_for_it_and_they_sleep_afterwards(
    rig: SlurmRig, run: RunStore
) -> None:
    executor = SlurmExecutor()
    lifecycle.start(run, on=executor, placement=N1)
    await_step(run, 5)
    assert (
        lifecycle.change_placement(run, Placement((("n1", 1), ("c1", 1), ("c2", 1)))).how == "live"
    )
    await_workers(run, 3)
    assert executor.reserves()[0].awake == 2
    assert lifecycle.change_placement(run, N1).how == "live"
    await_workers(run, 1)
    wait_until(
        lambda: executor.reserves()[0].awake == 0,
        "the nodes sleep again",
        explain=rig.describe_logs,
    )
    assert {"resume c1", "resume c2", "suspend c1", "suspend c2"} <= {*rig.power_log()}
    lifecycle.stop(run)
    check_samples(run)


@pytest.mark.long
def test_a_preempted_run_saves_and_goes_on_by_itself_when_its_devices_are_free_again(
    rig: SlurmRig, run: RunStore
) -> None:
    executor = SlurmExecutor("slurm://spot?spot=yes")
    lifecycle.start(run, on=executor, placement=Placement((("n1", 2), ("n2", 1))))
    await_workers(run, 3)
    blocker = block(rig, "n1")
    await_(run, lambda: state(run) == "stopped", "it has saved")
    saved = step(run)
    assert any(happening.what == "noticed" for happening, _ in executor.events(run))
    await_(run, lambda: executor.status(run).is_waiting, "it is queued again")
    rig.call("scancel", blocker)
    await_(run, lambda: state(run) == "running", "it goes on")
    await_step(run, saved + 5)
    assert lifecycle.stop(run).state == "stopped"
    check_samples(run)
    resumed = [each.resumed_from_step for each in events_of(run, StateChanged)]
    assert saved in resumed  # nothing was done twice


@pytest.mark.long
def test_a_preempted_part_of_a_run_leaves_it_with_notice(rig: SlurmRig, run: RunStore) -> None:
    executor = SlurmExecutor("slurm://spot")
    lifecycle.start(run, on=executor, placement=Placement((("n1", 1), ("n2", 2))))
    await_workers(run, 3)
    blocker = block(rig, "n2")
    await_workers(run, 1)
    faults = [fault.cause for fault in events_of(run, WorkerLost)]
    assert faults == ["left", "left"]
    rig.call("scancel", blocker)
    await_(run, lambda: len(events_of(run, WorkerGroupFormed)[-1].ranks) == 3, "it is back")
    lifecycle.stop(run)
    check_samples(run)


@pytest.mark.long
def test_a_node_that_dies_takes_only_its_own_workers(rig: SlurmRig, run: RunStore) -> None:
    executor = SlurmExecutor()
    lifecycle.start(run, on=executor, placement=Placement((("n1", 1), ("n3", 1))))
    await_workers(run, 2)
    rig.kill_node("n3")
    try:
        await_workers(run, 1)

        def lost() -> bool:
            status = executor.status(run)
            return any(each.lease.node == "n3" and each.state is not LeaseState.RUNNING
                       for each in status.leases)  # fmt: skip

        await_(run, lost, "Slurm has found out")
        assert "n3" not in {node.name for node in executor.nodes()}
        assert lifecycle.change_placement(run, Placement((("n1", 1), ("n2", 1)))).how == "live"
        await_workers(run, 2)
        assert executor.status(run).held == Placement((("n1", 1), ("n2", 1)))
    finally:
        rig.start_node("n3")
    lifecycle.stop(run)
    check_samples(run)


@pytest.mark.long
def test_asynchronous_workers_are_on_several_nodes_and_come_and_go(
    rig: SlurmRig, run: RunStore
) -> None:
    executor = SlurmExecutor()
    job = json.loads((run.path / Document.JOB).read_text())
    job["communication"] = {"method": "asynchronous"}
    (run.path / Document.JOB).write_text(json.dumps(job))
    lifecycle.start(run, on=executor, placement=Placement((("n1", 1), ("n2", 1))))
    await_workers(run, 2)
    assert executor.status(run).workers == 2
    more = Placement((("n1", 1), ("n2", 1), ("n3", 1)))
    assert lifecycle.change_placement(run, more).how == "live"
    await_workers(run, 3)
    fewer = Placement((("n1", 1), ("n3", 1)))
    assert lifecycle.change_placement(run, fewer).how == "live"
    await_workers(run, 2)
    await_(run, lambda: executor.status(run).held == fewer, "the devices to be given back")
    lifecycle.stop(run)
    check_samples(run)
    assert events_of(run, WorkerLost) == []


@pytest.mark.long
def test_when_the_node_that_leads_dies_another_one_leads(rig: SlurmRig, run: RunStore) -> None:
    executor = SlurmExecutor()
    lifecycle.start(run, on=executor, placement=Placement((("n3", 2), ("n1", 1))))
    await_workers(run, 3)
    rig.kill_node("n3")
    try:
        before = step(run)
        await_workers(run, 1)
        await_step(run, before + 5)
        await_(run, lambda: known_record(run).wanted[0].node == "n1", "n1 leads")
        assert lifecycle.read_record(run).state == "running"
    finally:
        rig.start_node("n3")
    assert lifecycle.stop(run).state == "stopped"
    await_(run, lambda: not executor.status(run).is_alive, "no lease is left")
    check_samples(run)


@pytest.mark.long
def test_before_its_time_is_over_a_run_saves(rig: SlurmRig, run: RunStore) -> None:
    executor = SlurmExecutor("slurm://main?minutes=3&notice_s=60")
    lifecycle.start(run, on=executor, placement=N1)
    await_step(run, 5)
    await_(run, lambda: state(run) == "stopped", "it has saved")
    assert any(happening.what == "noticed" for happening, _ in executor.events(run))
    await_(run, lambda: executor.status(run).is_waiting, "it is queued again")
    check_samples(run)


@pytest.mark.long
def test_a_run_that_is_never_given_the_time_for_a_step_is_not_started_for_ever(
    rig: SlurmRig, run: RunStore
) -> None:
    executor = SlurmExecutor()
    for _ in range(2):
        run.emit(AttemptStarted(number=1, pid=1, process_started_at=0.0, began_at=0.0))
    lifecycle.start(run, on=executor, placement=N1)
    await_(run, lambda: state(run) == "planning", "it is being started")
    (lease,) = known_record(run).leases
    rig.call("scancel", "--signal=TERM", lease.handle)  # as Slurm itself does
    await_(run, lambda: not executor.status(run).is_alive, "it is gone")
    assert lifecycle.read_record(run).state == "stopped"
