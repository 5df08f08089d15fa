"""How busy machines are, and what runs take of them."""

import os

import pytest

from yunlu.executors import usage as usage_module
from yunlu.executors.lease_executor import LeaseRecord, write_record
from yunlu.executors.usage import LeaseUse, NodeUse, UsageMeter, read_gpus, read_uses, write_use
from yunlu.hardware.fleet import Node
from yunlu.runs.home import open_run
from yunlu.scheduler import usage_monitor as gauge_module
from yunlu.scheduler.usage_monitor import UsageMonitor


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A driver's program that prints what it is told to."""

    def make(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
        monkeypatch.setattr(usage_module, "_nvidia_smi", lambda: str(program))

    return make


def test_gpus_are_read_and_what_they_do_not_tell_is_nothing(smi):
    smi("83, 20000, 80000\n[N/A], 0, 0\nsome warning")
    assert read_gpus() == ((0.83, 0.25), (0.0, 0.0))


def test_busy_cores_are_those_since_the_last_look():
    meter = UsageMeter()
    assert meter.measure("a", [os.getpid()])[0] is None
    then = os.times()
    while sum(os.times()[:2]) - sum(then[:2]) < 0.1:
        pass
    cores, memory_bytes = meter.measure("a", [os.getpid()])
    assert 0 < cores <= 2
    assert memory_bytes > 1 << 20
    meter.keep(())
    assert meter.measure("a", [os.getpid()])[0] is None


def test_what_other_programs_keep_busy_is_the_rest_of_the_machine(monkeypatch):
    monkeypatch.setattr(gauge_module.psutil, "cpu_count", lambda: 4)
    usages = [gauge_module.Usage(cores=cores, memory_bytes=0.0) for cores in (0.5, None, 1.5)]
    assert gauge_module.other_cores(0.75, usages) == pytest.approx(1.0)
    assert gauge_module.other_cores(0.25, usages) == 0.0  # measured at other moments


class FakeStand:
    def __init__(self, run):
        self.run, self.id = run, run.id
        self.observation = type("Sight", (), {"shares": (("n1", 2),)})
        self.allocation = type("Notes", (), {"placement": type("P", (), {"devices": 2})})


def test_leases_tell_what_they_take_until_they_fall_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(gauge_module, "LOOK_S", 0.0)
    run = open_run(tmp_path / "run")
    run.path.mkdir()
    record, lead = LeaseRecord(address="slurm://main").grant("n1", 1, is_lead=True)
    record, other = record.grant("n2", 1)
    write_record(run, record)
    machine = NodeUse(cpu=0.5, memory=0.25, gpus=((0.9, 0.5),))
    for lease in (lead, other):
        use = LeaseUse(at=1.0, node=lease.node, cores=0.75, memory_bytes=100.0, machine=machine)
        write_use(run, lease.name, use)
    assert dict(read_uses(run, [lead.name]))[lead.name].cores == 0.75
    usage_monitor, scheduled_runs = UsageMonitor(is_local=False), {"run": FakeStand(run)}
    nodes = [Node(name="n1", devices=2), Node(name="n2", devices=2)]
    assert usage_monitor.update(scheduled_runs, nodes) == {}
    assert usage_monitor.usage["run"] == gauge_module.Usage(cores=1.5, memory_bytes=200.0)
    assert usage_monitor.nodes == {"n1": machine, "n2": machine}
    monkeypatch.setattr(gauge_module, "_OLD_S", 0.0)
    usage_monitor.update(
        scheduled_runs, nodes
    )  # the same words as before: nobody knows whether they are still true
    assert usage_monitor.usage["run"].cores is None
    assert usage_monitor.nodes == {}
