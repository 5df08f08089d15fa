"""Parameter servers and workers as processes of their own, killed in the middle of what they do."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import ranks
from tests.unit.training.communication.served import (
    Servers,
    Worker,
    build,
    losses_by_step,
    serving,
    train_alone,
)
from tests.waiting import LIMIT_S, wait_until
from yunlu.core.files import read_lines
from yunlu.spec.train import OptimizerSpec
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.rules import ServerRules, Ticket
from yunlu.training.communication.servers.server import serve
from yunlu.training.communication.servers.store import Shard, prepare, shard_directory
from yunlu.training.communication.servers.weights import FlatWeights

pytestmark = pytest.mark.distributed

_context: Any = ranks._context  # pyright: ignore[reportPrivateUsage] - one for all tests


def _serve(directory: Path, index: int) -> None:
    torch.set_num_threads(1)
    serve(directory, index, "127.0.0.1", with_parent=True)


class Processes:
    """Each shard a process."""

    def __init__(self, directory: Path, rules: ServerRules) -> None:
        self.directory = directory
        flat = FlatWeights(list(build().parameters()))
        prepare(directory, rules, flat.read(), flat.decayed)
        self.running = [self._start(index) for index in range(rules.shards)]

    def _start(self, index: int) -> Any:
        process = _context.Process(target=_serve, args=(self.directory, index))
        process.start()
        return process

    def kill(self, index: int) -> Shard:
        """End a server, and read what it left."""
        os.kill(self.running[index].pid, signal.SIGKILL)
        self.running[index].join()
        return Shard(shard_directory(self.directory, index))

    def restart(self, index: int) -> None:
        self.running[index] = self._start(index)

    def client(self, worker: str, model: torch.nn.Module) -> ServerClient:
        return ServerClient(
            self.directory, list(model.parameters()), worker=worker, patience_s=LIMIT_S
        )

    def weights(self) -> torch.Tensor:
        client = self.client("reader", build())
        found = client.snapshot()
        client.close()
        assert found is not None
        return found


@contextmanager
def processes(directory: Path, rules: ServerRules) -> Generator[Processes]:
    servers = Processes(directory / "servers", rules)
    try:
        yield servers
        for each in servers.running:
            os.kill(each.pid, signal.SIGTERM)
            each.join(LIMIT_S)
            assert each.exitcode == 0
    finally:
        for each in servers.running:
            if each.is_alive():
                os.kill(each.pid, signal.SIGKILL)
            each.join()


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_killed_and_restored_shard_has_lost_no_acknowledged_update(tmp_path: Path, mode: Any):
    rules = ServerRules(
        steps=50,
        mode=mode,
        shards=2,
        shares=2,
        optimizer=OptimizerSpec(name="adamw"),
        log_bytes=8000,
    )
    chance = random.Random(7)
    with processes(tmp_path, rules) as servers:
        turn = threading.Semaphore(0)
        group = [
            Worker(servers, f"w{number}", lambda _client, _ticket: turn.release())
            for number in range(2)
        ]
        for _ in range(6):
            for _ in range(chance.randrange(3, 16)):
                assert turn.acquire(timeout=LIMIT_S)
            index = chance.randrange(2)
            acknowledged = [ticket for worker in group for ticket in list(worker.losses)]
            left = servers.kill(index)
            assert all(left.weights.check_ticket(ticket) == "duplicate" for ticket in acknowledged)
            kept = left.weights.flat.clone()
            left.close()
            again = Shard(left.directory)
            assert torch.equal(again.weights.flat, kept)
            again.close()
            servers.restart(index)
        for worker in group:
            worker.end()
        found = servers.weights()
    done = [ticket for worker in group for ticket in worker.losses]
    assert set(done) == {Ticket(step, share) for step in range(50) for share in range(2)}
    assert {(line["step"], line["share"]) for line in _done(servers.directory)} == set(done)
    if mode == "asp":
        return
    losses, alone = train_alone(rules)
    assert losses_by_step(group, rules.steps) == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
    with serving(tmp_path / "unharmed", rules) as unharmed:
        Worker(unharmed, "w").end()
        assert torch.equal(found, unharmed.weights())  # bit by bit, as if nothing had happened


def _work(directory: Path, name: str) -> None:
    class Place:
        def client(self, worker: str, model: torch.nn.Module) -> ServerClient:
            return ServerClient(
                directory, list(model.parameters()), worker=worker, patience_s=LIMIT_S
            )

    torch.set_num_threads(1)
    Worker(Place(), name).end()


def _done(directory: Path) -> list[dict[str, Any]]:
    return [line for line, _ in read_lines(shard_directory(directory, 0) / "done.jsonl")]


def _wait_for(servers: Servers, worker: str, allowed: threading.Semaphore) -> None:
    """Until a worker has done something; only when it is there do the others go on."""

    def has_worked() -> bool:
        return any(line["worker"] == worker for line in _done(servers.directory))

    def release_worker() -> None:
        dispatcher = servers.shards[0].dispatcher
        if dispatcher is not None and worker in dispatcher.workers:
            allowed.release()

    wait_until(has_worked, f"work of {worker}", meanwhile=release_worker, pause_s=0.05)


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
def test_workers_are_killed_and_join_and_the_others_go_on(tmp_path: Path, mode: Any):
    rules = ServerRules(
        steps=60,
        mode=mode,
        staleness=1,
        shards=2,
        shares=2,
        optimizer=OptimizerSpec(name="adamw"),
    )
    with serving(tmp_path, rules) as servers:
        allowed = threading.Semaphore(0)
        steady = Worker(
            servers, "steady", lambda _client, _ticket: allowed.acquire(timeout=LIMIT_S)
        )
        workers: list[Any] = []
        try:
            for number in range(3):
                process = _context.Process(target=_work, args=(servers.directory, f"p{number}"))
                process.start()
                workers.append(process)
                _wait_for(servers, f"p{number}", allowed)
                allowed.release()
                if number < 2:  # the last one stays
                    os.kill(process.pid, signal.SIGKILL)
            allowed.release(1000)
            steady.end()
            workers[-1].join(LIMIT_S)
            assert workers[-1].exitcode == 0
        finally:
            for process in workers:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        found = servers.weights()
    lines = _done(servers.directory)
    tickets = [(line["step"], line["share"]) for line in lines]
    assert sorted(tickets) == [(step, share) for step in range(60) for share in range(2)]
    assert {line["worker"] for line in lines} == {"steady", "p0", "p1", "p2"}
    if mode == "bsp":
        torch.testing.assert_close(found, train_alone(rules)[1], rtol=0, atol=1e-5)
