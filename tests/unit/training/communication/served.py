"""Servers and workers in threads of one process, on a task that can be learnt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tests.waiting import LIMIT_S
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.rules import ServerRules, Ticket
from yunlu.training.communication.servers.server import ShardServer
from yunlu.training.communication.servers.store import Shard, prepare, shard_directory
from yunlu.training.communication.servers.weights import FlatWeights
from yunlu.training.optim.build import build_optimizer

BATCH = 24
LR = 0.02


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batch_of(step: int, share: int = 0, shares: int = 1) -> tuple[Tensor, Tensor]:
    """Shares are of unequal size, as real ones."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 6, generator=generator)
    y = (x[:, :2].sum(1, keepdim=True) * 0.7).sin() + 0.8 * x[:, 2:3]
    y += 0.3 * torch.randn(y.shape, generator=generator)  # a loss no training goes below
    first = 0 if share == 0 else BATCH * share // shares + 1
    last = BATCH if share == shares - 1 else BATCH * (share + 1) // shares + 1
    return x[first:last], y[first:last]


def loss_of(model: nn.Module, ticket: Ticket, shares: int = 1) -> tuple[Tensor, int]:
    """The mean loss over a ticket's items, and their number."""
    x, y = batch_of(ticket.step, ticket.share, shares)
    return (model(x) - y).square().mean(), len(x)


def score(weights: Tensor) -> float:
    """The loss on samples nobody trains on."""
    model = build()
    FlatWeights(list(model.parameters())).write(weights)
    with torch.no_grad():
        return float(sum(loss_of(model, Ticket(step))[0] for step in range(5000, 5008))) / 8


def train_alone(rules: ServerRules) -> tuple[list[float], Tensor]:
    """Synchronous training: the losses, and the weights."""
    model = build()
    optimizer: Any = build_optimizer(
        model, rules.optimizer, lr=LR, weight_decay=rules.weight_decay, l2=rules.l2
    )
    losses: list[float] = []
    for step in range(rules.steps):
        loss, _ = loss_of(model, Ticket(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, FlatWeights(list(model.parameters())).read()


class Servers:
    """All shards of a directory, in threads."""

    def __init__(self, directory: Path, rules: ServerRules) -> None:
        self.directory, self.rules = directory, rules
        flat = FlatWeights(list(build().parameters()))
        prepare(directory, rules, flat.read(), flat.decayed)
        self.shards: list[Shard] = []
        self._running: list[tuple[ShardServer, threading.Thread] | None] = [None] * rules.shards
        for index in range(rules.shards):
            self.start(index)

    def start(self, index: int) -> tuple[int, Tensor]:
        """Returns the version and weights that it begins with: workers change them at once."""
        shard = Shard(shard_directory(self.directory, index))
        begun = shard.weights.version, shard.weights.flat.clone()
        self.shards[index : index + 1] = [shard]
        server = ShardServer(shard, "127.0.0.1")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        self._running[index] = (server, thread)
        return begun

    def stop(self, index: int) -> None:
        running, self._running[index] = self._running[index], None
        if running is not None:
            running[0].stop()
            running[1].join(LIMIT_S)
            assert not running[1].is_alive()

    def backdate(self, worker: str, seconds: float) -> None:
        """As if nothing had come from a worker for so long."""
        for running in self._running:
            assert running is not None
            for connection in running[0]._clients.values():
                if connection.worker == worker:
                    connection.received_at -= seconds

    def client(self, worker: str, model: nn.Module, patience_s: float = LIMIT_S) -> ServerClient:
        return ServerClient(
            self.directory, list(model.parameters()), worker=worker, patience_s=patience_s
        )

    def weights(self) -> Tensor:
        client = self.client("reader", build())
        found = client.snapshot()
        client.close()
        assert found is not None
        return found


@contextmanager
def serving(directory: Path, rules: ServerRules) -> Generator[Servers]:
    servers = Servers(directory / "servers", rules)
    try:
        yield servers
    finally:
        for index in range(rules.shards):
            servers.stop(index)


class Place(Protocol):
    """Where servers are."""

    def client(self, worker: str, model: nn.Module) -> ServerClient: ...


class Worker(threading.Thread):
    """Trains until the tickets are over; ``before_push`` is called with the client and each ticket."""

    def __init__(
        self,
        servers: Place,
        name: str,
        before_push: Callable[[ServerClient, Ticket], Any] = lambda _client, _ticket: None,
    ) -> None:
        super().__init__(daemon=True)
        self.model = build()
        self.client = servers.client(name, self.model)
        self.losses: dict[Ticket, tuple[float, int]] = {}
        self.outcomes: list[str] = []
        self.error: BaseException | None = None
        self._before_push = before_push
        self.start()

    def run(self) -> None:
        try:
            while (ticket := self.client.take_ticket()) is not None:
                self.do(ticket)
            self.client.close()
        except BaseException as error:  # noqa: BLE001 - ``end`` tells it
            self.error = error
            self.client.close()

    def do(self, ticket: Ticket) -> None:
        self.client.pull()
        self.model.zero_grad()
        loss, items = loss_of(self.model, ticket, self.client.rules.shares)
        loss.backward()
        self._before_push(self.client, ticket)
        outcome = self.client.push(
            ticket, lr=LR, items=items, metrics={"loss": float(loss.detach())}
        )
        self.outcomes.append(outcome)
        self.losses[ticket] = (float(loss.detach()), items)

    def end(self) -> None:
        self.join(LIMIT_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def losses_by_step(workers: list[Worker], steps: int) -> list[float]:
    """The mean over the items of each step."""
    found = {ticket: loss for worker in workers for ticket, loss in worker.losses.items()}
    losses: list[float] = []
    for step in range(steps):
        parts = [loss for ticket, loss in found.items() if ticket.step == step]
        losses.append(sum(loss * items for loss, items in parts) / sum(n for _, n in parts))
    return losses
