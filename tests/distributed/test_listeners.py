"""Sockets on which a run of one machine listens: none that another machine can reach, and no more than needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_external_launcher import Bench, finish, losses
from tests.waiting import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text().replace("steps: 24", "steps: 100000"))
    try:
        yield made
    finally:
        made.end()


def listeners(bench: Bench) -> Counter[str]:
    """How many sockets the programs of this run listen on, by address."""
    return Counter(
        connection.laddr.ip
        for process in bench.left()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def wait_for_step(bench: Bench, step: int) -> None:
    def is_there() -> bool:
        home = bench.directory / "home"
        return any(home.glob("job-*")) and max(losses(bench.run()), default=0) >= step

    wait_until(is_there, f"step {step}")


def expect(bench: Bench, count: int) -> None:
    """Workers that connect to each other listen meanwhile; soon there are no more than these."""
    wait_until(
        lambda: listeners(bench) == Counter({"127.0.0.1": count}),
        f"{count} listeners on 127.0.0.1",
        explain=lambda: listeners(bench),
    )


def test_a_worker_alone_listens_nowhere(bench: Bench) -> None:
    bench.start("-m", "yunlu.cli.main", "train", "job.yaml", "--devices", "1")
    wait_for_step(bench, 3)
    assert listeners(bench) == Counter()


def test_a_worker_group_listens_on_loopback_only(bench: Bench) -> None:
    bench.start("-m", "yunlu.cli.main", "train", "job.yaml", "--devices", "2")
    wait_for_step(bench, 3)
    expect(bench, 4)  # the supervisor, the store of the generation, gloo of two workers


def test_asynchronous_workers_listen_on_loopback_only(bench: Bench) -> None:
    job = bench.directory / "job.yaml"
    job.write_text(job.read_text() + "communication: {method: asynchronous, servers: 1}\n")
    bench.start("-m", "yunlu.cli.main", "train", "job.yaml", "--devices", "2")
    wait_for_step(bench, 3)
    expect(bench, 2)  # one server of the weights, and the door for nodes that join


def test_launched_workers_listen_on_loopback_only(bench: Bench) -> None:
    bench.srun("-m", "yunlu.cli.main", "train", "job.yaml")
    wait_for_step(bench, 3)
    expect(bench, 3)  # the store, gloo of two workers


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_nobody_listens_on_every_network(bench: Bench, address: str) -> None:
    words = ("-m", "yunlu.cli.main", "train", "job.yaml", "--devices", "2")
    out, err = finish(bench.start(*words, YUNLU_BIND=address), code=1)
    assert "one address" in out + err
    assert "Traceback" not in out + err
    assert not listeners(bench)
