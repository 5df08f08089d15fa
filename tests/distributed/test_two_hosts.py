"""Training on two hosts with somebody on the cable between them, who reads and alters what passes."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.netrig import Rig, why_no_rig

from tests.distributed.test_external_launcher import Bench, events, losses, states
from tests.waiting import LIMIT_S, wait_until
from yunlu.runs.events import ErrorRaised, WorkerGroupFormed
from yunlu.runs.worker_group import read_worker_group

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.network_rig]


@pytest.fixture(autouse=True)
def permitted() -> None:
    reason = why_no_rig()
    if reason is not None:
        pytest.skip(reason)


class Wiretap:
    """Two hosts, and what the one on their cable sees and does."""

    def __init__(self, rig: Rig, directory: Path, bench: Bench) -> None:
        self.rig, self.directory, self.bench = rig, directory, bench

    def start(self, host: int, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        environment = {
            "YUNLU_HOME": str(self.bench.directory / "home"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, "-m", "yunlu.cli.main", *words]
        return self.rig.run(host, command, environment=environment, cwd=self.bench.directory)

    def launch(self, host: int) -> subprocess.Popen[bytes]:
        """One of two tasks, as srun would start them."""
        return self.start(
            host,
            *("train", "job.yaml"),
            SLURM_JOB_ID="7",
            SLURM_STEP_ID="0",
            SLURM_NTASKS="2",
            SLURM_PROCID=str(host),
            SLURM_LOCALID="0",
            SLURM_JOB_NODELIST="hosts",
            MASTER_ADDR=self.rig.address(0),
            MASTER_PORT="29577",
        )

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            home = self.bench.directory / "home"
            return any(home.glob("job-*")) and max(losses(self.bench.run()), default=0) >= step

        wait_until(is_there, f"step {step}")

    def alter(self) -> None:
        (self.directory / "alter").touch()
        wait_until((self.directory / "altered").exists, "a segment to be altered")

    def seen(self) -> bytes:
        return (self.directory / "seen").read_bytes()

    def check_listeners(self, counts: dict[int, int]) -> None:
        """Only so many sockets of each host can be reached from others: none but ours, none by accident."""

        def outside(host: int) -> list[str]:
            own = {"127.0.0.1", self.rig.address(host)}
            assert {address for address, _ in self.listeners(host)} <= own
            return [address for address, _ in self.listeners(host) if address != "127.0.0.1"]

        for host, count in counts.items():  # workers that connect to each other listen meanwhile
            wait_until(lambda: len(outside(host)) == count, f"{count} listeners on host {host}")  # noqa: B023

    def listeners(self, host: int) -> list[tuple[str, str]]:
        """Addresses on which programs of a host listen, and their programs."""
        command = self.rig.on(host, ["ss", "-Hltnp"])
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [(line.split()[3].rpartition(":")[0], line) for line in shown.splitlines()]


@pytest.fixture
def wiretap(tmp_path: Path) -> Iterator[Wiretap]:
    directory = tmp_path / "tap"
    directory.mkdir()
    bench = Bench(tmp_path)
    job = tmp_path / "job.yaml"
    # A method that is named keeps all workers: on a busy machine this cable is slow enough for the far
    # one to be excluded.
    text = job.read_text().replace("steps: 24", "steps: 3000")
    job.write_text(text + "communication: {method: all-reduce}\n")
    with Rig(2, tap=directory, prefix=f"yt{os.getpid() % 10_000}") as rig:
        try:
            yield Wiretap(rig, directory, bench)
        finally:
            bench.end()


def test_a_launched_run_hides_what_it_sends_and_ends_when_it_is_altered(wiretap: Wiretap) -> None:
    processes = [wiretap.launch(host) for host in range(2)]
    wiretap.wait_for_step(5)
    wiretap.check_listeners({0: 2, 1: 1})  # each a tunnel, and rank 0 the store
    seen = wiretap.seen()
    secret = (wiretap.bench.directory / "home" / ".secret").read_bytes()
    assert len(seen) > 100_000
    for word in (
        secret,
        b"YUNLU",
        b'"op": "',
        b"layout",
        b"host-",
        b"tunnel-",
    ):
        assert word not in seen
    assert len(zlib.compress(seen)) > 0.98 * len(
        seen
    )  # as if random: weights and gradients are not

    wiretap.alter()
    assert [process.wait(LIMIT_S) for process in processes] == [1, 1]
    run = wiretap.bench.run()
    assert states(run)[-1] == "failed"
    assert events(run, ErrorRaised)


def test_an_elastic_run_hides_what_it_sends_and_goes_on_when_it_is_altered(
    wiretap: Wiretap,
) -> None:
    host = wiretap.rig.address(0)
    words = ("train", "job.yaml", "--devices", "2", "--detach", "--json")
    assert wiretap.start(0, *words, YUNLU_BIND=host).wait(LIMIT_S) == 0
    wiretap.wait_for_step(1)
    run = wiretap.bench.run()
    group = read_worker_group(run)
    assert group is not None
    (wiretap.bench.directory / "token").write_text(group.token)
    where = ("join", f"{group.host}:{group.port}", "--name", "far", "--token-file", "token")
    wiretap.start(1, *where, YUNLU_BIND=wiretap.rig.address(1))

    def formed() -> list[WorkerGroupFormed]:
        return [event for event in events(run, WorkerGroupFormed) if len(event.ranks) == 3]

    wait_until(formed, "a group of both hosts")
    wiretap.wait_for_step(formed()[0].from_step + 5)
    wiretap.check_listeners({0: 4, 1: 1})  # each worker a tunnel, rank 0 the store, the supervisor
    seen = wiretap.seen()
    for word in (
        group.token.encode(),
        b"YUNLU",
        b'"kind": "',
        b'"op": "',
        b"hello_",
        b"assignment",
    ):
        assert word not in seen
    assert len(zlib.compress(seen)) > 0.98 * len(seen)

    before = len(events(run, WorkerGroupFormed))
    wiretap.alter()
    wait_until(lambda: len(events(run, WorkerGroupFormed)) > before, "another generation")
    wiretap.wait_for_step(events(run, WorkerGroupFormed)[-1].from_step + 5)
    assert wiretap.start(0, "stop", run.id).wait(LIMIT_S) == 0
    assert states(run)[-1] == "stopped"


def test_the_one_on_the_cable_can_alter(wiretap: Wiretap) -> None:
    """Otherwise the tests above would prove nothing: over plain TCP nobody notices."""
    program = """
import socket, sys
if sys.argv[1] == "serve":
    with socket.create_server((sys.argv[2], 5000)) as server:
        print("ready", flush=True)
        sock, _ = server.accept()
        print(sock.makefile("rb").read().hex())
else:
    with socket.create_connection((sys.argv[2], 5000)) as sock:
        sock.sendall(bytes(1000))
"""
    address = wiretap.rig.address(0)
    serving = wiretap.rig.run(
        0, [sys.executable, "-c", program, "serve", address], stdout=subprocess.PIPE
    )
    assert serving.stdout is not None
    assert serving.stdout.readline() == b"ready\n"
    (wiretap.directory / "alter").touch()
    wiretap.rig.run(1, [sys.executable, "-c", program, "call", address]).wait(LIMIT_S)
    received = bytes.fromhex(serving.communicate(timeout=LIMIT_S)[0].decode().strip())
    assert len(received) == 1000
    assert sum(map(int.bit_count, received)) == 1
    assert wiretap.seen() == bytes(1000)
