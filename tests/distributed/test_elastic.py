"""A worker group of real processes under real faults: nothing lost, nothing twice, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.toy_worker_group import BATCH, ENOUGH
from tests.sample_events import EventT
from tests.waiting import LIMIT_S, wait_until
from yunlu.core.errors import StoreError
from yunlu.runs.events import ErrorRaised, StateChanged, WorkerGroupFormed, WorkerLost
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Document
from yunlu.runs.worker_group import WorkerGroup, read_worker_group, send_request

pytestmark = pytest.mark.distributed


class ElasticRun:
    """One run of the toy under a supervisor of its own."""

    def __init__(self, path: Path) -> None:
        self.run = open_run(path)
        self.process: subprocess.Popen[bytes] | None = None
        self.generations = 1
        self.times: list[str] = []

    def start(self, *, devices: int, spares: int = 1, bind: str = "127.0.0.1", **job: Any) -> None:
        self.run.path.mkdir()
        told = {"axis": "dp", "steps": 6000, "step_s": 0.1, **job}
        (self.run.path / Document.JOB).write_text(json.dumps(told))
        words = [sys.executable, "-m", "yunlu.training.elastic.supervisor", str(self.run.path)]
        words += ["--devices", str(devices), "--spares", str(spares)]
        with (self.run.path / WORKER_LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [*words, "--node-module", "tests.distributed.toy_worker_group"],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "YUNLU_BIND": bind},
                start_new_session=True,
            )

    def worker_group(self) -> WorkerGroup:
        found = read_worker_group(self.run)
        assert found is not None
        return found

    def pid_of(self, rank: int) -> int:
        return next(member.pid for member in self.worker_group().workers if member.rank == rank)

    def events(self, kind: type[EventT]) -> list[EventT]:
        return [event for event, _ in self.run.read_events() if isinstance(event, kind)]

    def states(self) -> list[str]:
        return [event.state for event in self.events(StateChanged)]

    def has_ended(self) -> bool:
        return self.states()[-1:] in (["finished"], ["stopped"], ["failed"])

    def wait(self, condition: Callable[[], bool]) -> None:
        def check() -> None:
            assert not self.has_ended() or condition(), self.describe()

        wait_until(condition, "what the test waits for", meanwhile=check, explain=self.describe)

    def wait_generation(self, number: int) -> WorkerGroupFormed:
        self.wait(lambda: len(self.events(WorkerGroupFormed)) >= number)
        return self.events(WorkerGroupFormed)[number - 1]

    def finish(self) -> None:
        (self.run.path / ENOUGH).touch()
        self.wait_for_end()

    def wait_for_end(self) -> None:
        self.wait(self.has_ended)
        # The supervisor itself leaves a moment after its last word.
        wait_until(lambda: not self.processes(), "everyone to leave", explain=self.describe)

    def check_samples(self) -> None:
        result = json.loads((self.run.path / "result.json").read_text())
        done = result["step"] * BATCH
        assert done > 0
        assert result["counts"][:done] == [1] * done
        assert not any(result["counts"][done:])

    def next_generation(self, what: str) -> WorkerGroupFormed:
        """The generation after a fault; how long it took is told, not judged."""
        self.generations += 1
        group = self.wait_generation(self.generations)
        self.times.append(f"{what}: {group.lost_s} s to the next step ({group.layout})")
        return group

    def next_full_generation(self, what: str) -> WorkerGroupFormed:
        """The same, once two work again: a spare that still loads is not waited for."""
        group = self.next_generation(what)
        while group.layout == "single":
            group = self.next_generation("the spare is there")
        return group

    def processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                mine = str(self.run.path) in process.cmdline()
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def describe(self) -> str:
        logs = (
            sorted((self.run.path / Area.LOGS).glob("*.log"))
            if (self.run.path / Area.LOGS).exists()
            else []
        )
        texts = [
            f"== {log.name}\n{log.read_text()[-3000:]}"
            for log in [self.run.path / WORKER_LOG, *logs]
        ]
        events = "\n".join(str(event)[:600] for event, _ in self.run.read_events())
        return f"{events}\n" + "\n".join(texts)

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[ElasticRun]:
    found = ElasticRun(tmp_path / "toy")
    try:
        yield found
    finally:
        found.close()
        sys.stdout.write("\n".join([*found.times, ""]))


def test_no_fault_costs_a_sample_or_a_step(elastic: ElasticRun) -> None:
    elastic.start(devices=2)
    elastic.wait_generation(1)
    for rank in (0, 1):
        os.kill(elastic.pid_of(rank), signal.SIGKILL)
        assert elastic.next_full_generation(f"SIGKILL of rank {rank}").layout == "dp2"
    os.kill(elastic.pid_of(1), signal.SIGSTOP)
    assert elastic.next_full_generation("SIGSTOP").layout == "dp2"
    for devices in (4, 3):
        answer = send_request(elastic.worker_group(), {"kind": "resize", "devices": devices})
        assert answer["is_accepted"], answer
        assert elastic.next_generation(f"resize to {devices}").layout == f"dp{devices}"
    os.kill(elastic.pid_of(1), signal.SIGTERM)
    assert elastic.next_generation("SIGTERM").layout == "dp2"
    told = [fault.cause for fault in elastic.events(WorkerLost)]
    assert told == ["killed", "killed", "hung", "left"]
    assert not any(group.redone_steps for group in elastic.events(WorkerGroupFormed))
    elastic.finish()
    elastic.check_samples()
    assert elastic.states()[-1] == "finished"


def test_a_leader_killed_at_the_very_end_is_replaced_too(elastic: ElasticRun) -> None:
    """The others are done when it dies exporting; another one does it."""
    elastic.start(devices=2, steps=3, linger=True)
    elastic.wait((elastic.run.path / "result.json").exists)
    (elastic.run.path / "result.json").unlink()
    os.kill(elastic.pid_of(0), signal.SIGKILL)
    elastic.wait_for_end()
    elastic.check_samples()
    assert elastic.states()[-1] == "finished"
    assert [fault.cause for fault in elastic.events(WorkerLost)] == ["killed"]


def test_without_a_spare_the_rest_go_on_until_the_replacement_is_there(elastic: ElasticRun) -> None:
    elastic.start(devices=2, spares=0)
    elastic.wait_generation(1)
    os.kill(elastic.pid_of(0), signal.SIGKILL)
    assert elastic.next_generation("SIGKILL without a spare").layout == "single"
    assert elastic.next_generation("replacement").layout == "dp2"
    elastic.finish()
    elastic.check_samples()


def test_shards_are_passed_on_before_their_holder_leaves(elastic: ElasticRun) -> None:
    elastic.start(devices=3, axis="fsdp")
    elastic.wait_generation(1)
    os.kill(elastic.pid_of(1), signal.SIGTERM)
    assert elastic.next_generation("SIGTERM under fsdp").layout == "fsdp2"
    for devices in (4, 1, 2):
        send_request(elastic.worker_group(), {"kind": "resize", "devices": devices})
        group = elastic.next_generation(f"fsdp to {devices}")
        assert group.layout == (f"fsdp{devices}" if devices > 1 else "single")
    assert [group.redone_steps for group in elastic.events(WorkerGroupFormed)] == [0] * 5
    # With a shard lost and no copy of it, everything starts again from what is on disk: nothing.
    os.kill(elastic.pid_of(1), signal.SIGKILL)
    group = elastic.next_generation("SIGKILL under fsdp, no copies")
    assert group.from_step == 0
    assert group.redone_steps > 0
    elastic.finish()
    elastic.check_samples()


def test_training_goes_on_without_its_supervisor(elastic: ElasticRun) -> None:
    elastic.start(devices=2)
    elastic.wait_generation(1)
    before = elastic.worker_group()
    assert elastic.process is not None
    elastic.process.kill()
    elastic.process.wait()
    elastic.wait(lambda: _accepts_requests(elastic.worker_group()))
    after = elastic.worker_group()
    assert after.pid != before.pid
    assert after.token == before.token
    workers = {member.pid: member.rank for member in before.workers if member.rank is not None}
    assert {m.pid: m.rank for m in after.workers if m.rank is not None} == workers
    assert after.generation == before.generation == 1
    recorded = json.loads((elastic.run.path / "worker.json").read_text())
    assert recorded["pid"] == after.pid
    # The new one can do all that the old one could.
    os.kill(elastic.pid_of(1), signal.SIGKILL)
    assert elastic.next_generation("SIGKILL under the second supervisor").generation == 2
    elastic.finish()
    elastic.check_samples()


def _accepts_requests(group: WorkerGroup) -> bool:
    try:
        return send_request(group, {"kind": "resize", "devices": 2})["is_accepted"]
    except StoreError:
        return False


def test_a_stopped_run_saves_and_ends_and_strangers_are_not_heard(elastic: ElasticRun) -> None:
    elastic.start(devices=2)
    elastic.wait_generation(1)
    assert (elastic.run.path / Document.WORKER_GROUP).stat().st_mode & 0o777 == 0o600
    stranger = elastic.worker_group().model_copy(update={"token": "guessed"})
    with pytest.raises(StoreError, match="another token"):
        send_request(stranger, {"kind": "resize", "devices": 1})
    assert elastic.process is not None
    elastic.process.send_signal(signal.SIGTERM)
    elastic.wait_for_end()
    assert len(elastic.events(WorkerGroupFormed)) == 1
    assert elastic.states()[-2:] == ["stopping", "stopped"]
    elastic.check_samples()


@pytest.mark.parametrize(
    ("where", "words"),
    [("step", "rank 1 cannot go on"), ("plan", "no layout fits")],
)
def test_the_first_failure_is_told_once(elastic: ElasticRun, where: str, words: str) -> None:
    elastic.start(devices=2, fail=where)
    elastic.wait_for_end()
    assert elastic.states()[-1] == "failed"
    (error,) = elastic.events(ErrorRaised)
    assert words in error.message
    assert words in error.traceback
    if where == "step":
        assert error.rank == 1
        assert [fault.cause for fault in elastic.events(WorkerLost)] == ["failed"]


@pytest.fixture
def far_net() -> Iterator[Callable[..., Any]]:
    """A machine of its own, as far as the network can tell: 10.117.0.2 in a namespace."""
    name = f"yl{os.getpid() % 100_000}"

    def ip(*words: str, check: bool = True) -> Any:
        return subprocess.run(["ip", *words], capture_output=True, check=check)

    if ip("netns", "add", name, check=False).returncode:
        pytest.skip("making a network namespace needs root")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", "10.117.0.1/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", "10.117.0.2/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield lambda *words: ip(*words, check=False) if words else name
    finally:
        ip("link", "del", f"{name}a", check=False)
        ip("netns", "del", name, check=False)


def _children(node: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(node.pid).children()]


def test_a_node_joins_leaves_is_cut_off_and_found_again(
    elastic: ElasticRun, far_net: Callable[..., Any]
) -> None:
    elastic.start(devices=1, bind="10.117.0.1")
    elastic.wait_generation(1)
    name = far_net()
    words = [sys.executable, "-m", "tests.distributed.toy_worker_group", str(elastic.run.path)]
    words = ["ip", "netns", "exec", name, *words, "--node", "far", "--devices", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen(words, env=env)]
    try:
        assert elastic.next_generation("a node joins").layout == "dp3"
        nodes[0].send_signal(signal.SIGTERM)
        assert elastic.next_generation("a node leaves").layout == "single"
        assert nodes[0].wait(LIMIT_S) == 0
        nodes.append(subprocess.Popen(words, env=env))
        assert elastic.next_generation("a node joins again").layout == "dp3"
        far_net("link", "set", f"{name}a", "down")
        assert elastic.next_generation("a node is cut off").layout == "single"
        told = [fault.cause for fault in elastic.events(WorkerLost)]
        assert told == ["left", "left", "cut off", "cut off"]
        given_up = _children(nodes[1])
        assert len(given_up) == 2, "nobody can reach them"
        far_net("link", "set", f"{name}a", "up")
        assert elastic.next_generation("the cable is back").layout == "dp3"
        assert nodes[1].poll() is None, "it was not started again"
        assert not {*_children(nodes[1])} & {*given_up}, "who was given up holds no device"
        (elastic.run.path / ENOUGH).touch()
        elastic.wait(elastic.has_ended)
        elastic.check_samples()
        assert nodes[1].wait(LIMIT_S) == 0
    finally:
        for process in elastic.processes():
            process.kill()
        for node in nodes:
            node.kill()
            node.wait()
