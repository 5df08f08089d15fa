"""This machine as an executor: its shares, its limits, its GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from yunlu.executors import cpu_limits
from yunlu.executors import local as module
from yunlu.executors.executor import ExecutorError
from yunlu.executors.lease_executor import known_record
from yunlu.executors.local import LocalExecutor
from yunlu.executors.registry import open_executor, read_address
from yunlu.hardware.accelerators import VisibleDevices
from yunlu.hardware.fleet import Placement
from yunlu.runs.home import open_run
from yunlu.runs.run_store import RunStore


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child.pid
        child.kill()


def test_a_process_is_kept_to_its_share_and_nothing_stays(sleeper: int) -> None:
    run_id = f"test-{os.getpid()}"
    cpu_limits.limit(run_id, sleeper, cpus=0.5)
    if cpu_limits.find_kind() == "affinity":
        assert len(os.sched_getaffinity(sleeper)) == 1
        return
    group = cpu_limits.group_of(run_id)
    assert str(sleeper) in (group / "cgroup.procs").read_text().split()

    def quota() -> list[str]:
        files = [group / name for name in ("cpu.max", "cpu.cfs_quota_us")]
        return next(file.read_text().split() for file in files if file.exists())

    assert quota()[0] == "50000"
    cpu_limits.change(run_id, sleeper, cpus=1.5)
    assert quota()[0] == "150000"
    cpu_limits.forget(run_id)
    assert group.is_dir()  # somebody is still in it
    os.kill(sleeper, 9)
    os.waitpid(sleeper, 0)
    cpu_limits.sweep()
    assert not group.exists()


def test_where_no_group_can_be_made_cores_are_set(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_limits, "find_kind", lambda: "affinity")
    cpu_limits.limit("run", sleeper, cpus=0.5)
    assert len(os.sched_getaffinity(sleeper)) == 1
    cpu_limits.change("run", sleeper, cpus=99)
    assert os.sched_getaffinity(sleeper) == os.sched_getaffinity(0)


def test_devices_are_shares_of_the_processor_unless_said_otherwise() -> None:
    (node,) = open_executor("local").nodes()
    assert node.devices >= 1
    (node,) = open_executor("local://?devices=7&type=share&node=here").nodes()
    assert (node.name, node.devices, node.type) == ("here", 7, "share")


@pytest.mark.parametrize("address", ["local://?devices=0", "local://?devices=x", "local://?size=1"])
def test_an_address_with_a_mistake_is_refused(address: str) -> None:
    with pytest.raises(ExecutorError):
        open_executor(address)


def test_an_address_is_read() -> None:
    assert read_address("slurm", ()) == ("", {})
    assert read_address("slurm://main/?a=1&b=", ("a", "b")) == ("main", {"a": "1", "b": ""})
    assert read_address("ray://head:10001", ()) == ("head:10001", {})
    with pytest.raises(ExecutorError, match="There is no executor 'loca'"):
        open_executor("loca")


def test_two_runs_on_one_machine_get_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "visible_devices", lambda: VisibleDevices("cuda", ("0", "2", "5")))
    idle = (sys.executable, "-c", "import time; time.sleep(600)")

    def program(store: RunStore, devices: int) -> tuple[str, ...]:
        return idle

    monkeypatch.setattr(module, "lead_program", program)
    with pytest.raises(ExecutorError, match="has 3 accelerators, not 4"):
        LocalExecutor("local://?devices=4")
    executor = LocalExecutor("local://?node=here")
    runs: list[RunStore] = []
    try:
        for name, count in (("one", 2), ("two", 1)):
            (tmp_path / name).mkdir()
            runs.append(open_run(tmp_path / name))
            executor.start(runs[-1], Placement((("here", count),)))
        slots = [known_record(run).leases[0].slots for run in runs]
        assert slots == [(0, 1), (2,)]
        (worker,) = (module.recorded_worker(run) for run in runs[:1])
        assert worker is not None
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0,2" in environment
        (tmp_path / "three").mkdir()
        with pytest.raises(ExecutorError, match="0 are free"):
            executor.start(open_run(tmp_path / "three"), Placement((("here", 1),)))
        assert executor.resize(runs[0], Placement((("here", 1),))).how == "restart"
        assert not executor.capabilities().resizes_live
    finally:
        for run in runs:
            executor.stop(run, now=True)
