"""Parameter servers with workers that come, go, lag and lie, all in one process."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.communication.served import (
    LR,
    Worker,
    build,
    loss_of,
    losses_by_step,
    score,
    serving,
    train_alone,
)
from tests.waiting import LIMIT_S
from yunlu.core.errors import ModelError, TrainingError
from yunlu.core.framing import encode_frame
from yunlu.core.secure_link import connect_link, derive_secret
from yunlu.spec.train import OptimizerSpec
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.engine_adapter import ServerOptimizer, ticket_batches
from yunlu.training.communication.servers.messages import (
    Pull,
    Push,
    ServerHello,
    TakeTicket,
    dump_message,
)
from yunlu.training.communication.servers.rules import ServerRules, Ticket, shard_ranges
from yunlu.training.communication.servers.server_link import ServerLink, ServerLostError
from yunlu.training.communication.servers.store import read_address
from yunlu.training.communication.servers.weights import FlatWeights
from yunlu.training.communication.transport import Traffic
from yunlu.training.data.sample_order import StepOrder
from yunlu.training.optim.build import build_optimizer
from yunlu.training.tasks.task import Batch

ADAMW = OptimizerSpec(name="adamw")


@pytest.mark.parametrize(
    ("workers", "shards", "shares", "name"),
    [(1, 1, 1, "adamw"), (2, 3, 2, "adamw"), (2, 2, 3, "momentum")],
)
def test_in_step_the_losses_are_those_of_one_process(
    tmp_path: Path, workers: int, shards: int, shares: int, name: Any
):
    rules = ServerRules(
        steps=20,
        mode="bsp",
        shards=shards,
        shares=shares,
        optimizer=OptimizerSpec(name=name),
        weight_decay=0.1,
        l2=0.01,
    )
    losses, weights = train_alone(rules)
    with serving(tmp_path, rules) as servers:
        group = [Worker(servers, f"w{number}") for number in range(workers)]
        for worker in group:
            worker.end()
        torch.testing.assert_close(servers.weights(), weights, rtol=0, atol=1e-5)
    assert losses_by_step(group, rules.steps) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "asp"},
        {"mode": "asp", "correction": "rate", "shares": 2},
        {"mode": "asp", "correction": "delay", "codec": "int8", "pull_codec": "bf16"},
        {"mode": "ssp", "staleness": 1, "codec": "topk", "codec_share": 0.25},
    ],
)
def test_out_of_step_it_learns_as_well_within_a_margin(tmp_path: Path, changes: dict[str, Any]):
    """Stated: the loss on new samples at most a quarter above synchronous training's."""
    rules = ServerRules.model_validate({"steps": 100, "shards": 2, "optimizer": ADAMW, **changes})
    _, alone = train_alone(rules)
    start = score(torch.cat([w.reshape(-1) for w in build().parameters()]))
    with serving(tmp_path, rules) as servers:
        group = [Worker(servers, f"w{number}") for number in range(3)]
        for worker in group:
            worker.end()
        found = score(servers.weights())
    assert all(outcome == "taken" for worker in group for outcome in worker.outcomes)
    assert sum(len(worker.losses) for worker in group) == rules.steps * rules.shares
    assert found < 1.25 * score(alone) < start / 4


class Gate:
    """Holds a worker back before it pushes."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()

    def __call__(self, client: ServerClient, ticket: Ticket) -> None:
        self.arrived.set()
        assert self.opened.wait(LIMIT_S)


def test_a_slow_worker_does_not_slow_others_that_need_not_wait(tmp_path: Path):
    rules = ServerRules(steps=40, mode="asp", optimizer=ADAMW)
    with serving(tmp_path, rules) as servers:
        gate = Gate()
        slow = Worker(servers, "slow", gate)
        assert gate.arrived.wait(LIMIT_S)
        done = threading.Event()
        fast = Worker(
            servers,
            "fast",
            lambda _, ticket: done.set() if ticket.step == rules.steps - 1 else None,
        )
        assert done.wait(LIMIT_S)  # all other tickets, while the slow one holds its first
        gate.opened.set()
        slow.end()
        fast.end()
    assert (len(slow.losses), len(fast.losses)) == (1, rules.steps - 1)


@pytest.mark.parametrize("staleness", [0, 3])
def test_nobody_runs_further_ahead_of_the_slowest_than_the_bound(tmp_path: Path, staleness: int):
    rules = ServerRules(steps=30, mode="ssp", staleness=staleness, optimizer=ADAMW)
    with serving(tmp_path, rules) as servers:
        gate, pushed = Gate(), threading.Semaphore(0)
        slow = Worker(servers, "slow", gate)
        assert gate.arrived.wait(LIMIT_S)
        fast = Worker(servers, "fast", lambda _client, _ticket: pushed.release())
        for _ in range(staleness):
            assert pushed.acquire(timeout=LIMIT_S)
        probe = servers.client(
            "probe", build()
        )  # an answer to it comes after what was asked before
        probe.pull()
        assert not pushed.acquire(timeout=0.05)
        probe.close()
        gate.opened.set()
        slow.end()
        fast.end()
    assert len(slow.losses) + len(fast.losses) == rules.steps


@pytest.mark.parametrize("mode", ["bsp", "ssp", "asp"])
def test_the_ticket_of_a_lost_worker_is_done_by_another(tmp_path: Path, mode: Any):
    rules = ServerRules(steps=12, mode=mode, shards=2, shares=2, staleness=0, optimizer=ADAMW)
    losses, weights = train_alone(rules)
    with serving(tmp_path, rules) as servers:
        gate = Gate()
        lost = Worker(servers, "lost", gate)
        assert gate.arrived.wait(LIMIT_S)
        others = [Worker(servers, "a"), Worker(servers, "b")]
        lost.client.abort()  # its connections end before its gradient is there
        gate.opened.set()
        for worker in others:
            worker.end()
        joined = Worker(servers, "late")
        joined.end()
        lost.join(LIMIT_S)
        found = servers.weights()
    assert isinstance(lost.error, ServerLostError)
    assert not lost.losses
    assert sum(len(worker.losses) for worker in others) == rules.steps * rules.shares
    if mode == "bsp":
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
        assert losses_by_step(others, rules.steps) == pytest.approx(losses, abs=1e-5)


def test_a_silent_worker_counts_as_lost_and_its_late_gradient_as_a_duplicate(tmp_path: Path):
    rules = ServerRules(steps=6, mode="ssp", staleness=0, shards=2, optimizer=ADAMW)
    with serving(tmp_path, rules) as servers:
        gate = Gate()
        silent = Worker(servers, "silent", gate)
        assert gate.arrived.wait(LIMIT_S)
        servers.backdate("silent", 2 * rules.silence_s)
        other = Worker(servers, "other")
        other.end()
        gate.opened.set()
        silent.end()
    assert len(other.losses) == rules.steps
    assert silent.outcomes == ["duplicate"]
    told = (tmp_path / "servers" / "shard-0" / "done.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["step"] for line in told) == list(range(rules.steps))


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_step_that_one_shard_has_and_another_not_is_done_with_the_weights_it_began_with(
    tmp_path: Path, is_restored: bool
):
    rules = ServerRules(steps=4, mode="bsp", shards=2, optimizer=ADAMW, log_bytes=0)
    _, weights = train_alone(rules)
    with serving(tmp_path, rules) as servers:
        model = build()
        flat = FlatWeights(list(model.parameters()))
        link = ServerLink(servers.directory, 0, "half", tuple, Traffic(), patience_s=LIMIT_S)
        ticket = link.call(TakeTicket(), waits=True).ticket
        assert ticket is not None
        loss_of(model, ticket)[0].backward()
        part = flat.read_gradients()[: len(shard_ranges(flat.length, 2)[0])].numpy().data
        asked = link.send(Push(ticket=ticket, lr=LR, items=24, version=0), part)
        assert link.receive(asked).reply.outcome == "taken"
        link.close()
        if is_restored:
            servers.stop(0)
            servers.start(0)
        assert [shard.weights.version for shard in servers.shards] == [1, 0]
        other = Worker(servers, "other")
        other.end()
        torch.testing.assert_close(servers.weights(), weights, rtol=0, atol=1e-6)


def test_backup_workers_let_a_step_end_without_the_last(tmp_path: Path):
    rules = ServerRules(steps=8, mode="bsp", shares=3, backups=1, shards=2, optimizer=ADAMW)
    with serving(tmp_path, rules) as servers:
        gate = Gate()
        slow = Worker(servers, "slow", gate)
        assert gate.arrived.wait(LIMIT_S)
        others = [Worker(servers, "a"), Worker(servers, "b")]
        for worker in others:
            worker.end()
        gate.opened.set()
        slow.end()
        versions = [shard.weights.version for shard in servers.shards]
        assert servers.shards[0].dispatcher is not None
        dropped = servers.shards[0].dispatcher.dropped
    assert slow.outcomes == ["late"]
    assert sum(worker.outcomes.count("taken") for worker in others) == 16
    assert (versions, dropped) == ([8, 8], 8)


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_servers_that_end_and_come_back_lose_nothing(tmp_path: Path, mode: Any):
    rules = ServerRules(steps=30, mode=mode, shards=2, shares=2, optimizer=ADAMW, log_bytes=3000)
    losses, weights = train_alone(rules)
    chance = random.Random(5)
    with serving(tmp_path, rules) as servers:
        turn = threading.Semaphore(0)
        group = [
            Worker(servers, f"w{number}", lambda _client, _ticket: turn.release())
            for number in range(2)
        ]
        for _ in range(8):
            for _ in range(chance.randrange(1, 8)):
                assert turn.acquire(timeout=LIMIT_S)
            index = chance.randrange(2)
            before = servers.shards[index].weights
            servers.stop(index)
            version, held = servers.start(index)
            # The old one has ended: what it had then, the new one began with.
            assert version == before.version
            assert torch.equal(held, before.flat)
        for worker in group:
            worker.end()
        found = servers.weights()
        assert [shard.weights.version for shard in servers.shards] == [
            30 * (1 + (mode == "asp"))
        ] * 2
    assert {t for worker in group for t in worker.losses} == {
        Ticket(step, share) for step in range(30) for share in range(2)
    }
    if mode == "bsp":
        assert losses_by_step(group, rules.steps) == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)


def test_a_snapshot_holds_the_same_tickets_in_every_shard(tmp_path: Path):
    rules = ServerRules(steps=200, mode="asp", shards=3, optimizer=OptimizerSpec(name="sgd"))
    with serving(tmp_path, rules) as servers:
        reader = servers.client("reader", build())
        group = [Worker(servers, f"w{number}") for number in range(3)]
        seen: list[list[int]] = []
        for _ in range(10):
            assert reader.snapshot() is not None
            seen.append(list(reader.versions))
        assert all(len(set(versions)) == 1 for versions in seen)
        reader.stop()
        for worker in group:
            worker.end()
        assert reader.take_ticket() is None
        reader.close()
        done = sum(len(worker.losses) for worker in group)
        assert [shard.weights.version for shard in servers.shards] == [done] * 3


def test_a_snapshot_waits_for_nobody_who_is_not_there(tmp_path: Path):
    with serving(tmp_path, ServerRules(steps=2, mode="asp", optimizer=ADAMW)) as servers:
        last, lost = servers.client("last", build()), servers.client("lost", build())
        ticket = lost.take_ticket()
        assert ticket is not None
        lost.close()
        assert last.snapshot() is None  # who knows which shards had its gradient
        assert last.take_ticket() == ticket
        with pytest.raises(TrainingError, match="push"):
            last.snapshot()
        assert last.push(ticket, lr=LR, items=0) == "taken"
        before = last.snapshot()
        assert before is not None
        assert score(before) == score(torch.cat([before]))
        last.close()


def test_strangers_and_damaged_messages_harm_nobody(tmp_path: Path):
    rules = ServerRules(steps=15, mode="bsp", shards=2, optimizer=ADAMW)
    _, weights = train_alone(rules)
    with serving(tmp_path, rules) as servers:
        address = read_address(servers.directory, 0)
        secret = derive_secret(address.token.encode(), "shard")
        hello = b"".join(encode_frame(dump_message(ServerHello(worker="bad"))))
        length = servers.shards[0].weights.body_bytes
        push = b"".join(
            encode_frame(
                dump_message(Push(ticket=Ticket(0), lr=1, items=1, version=0)), bytes(length)
            )
        )
        damaged = bytearray(push)
        damaged[-3] ^= 1
        too_long = b"".join(encode_frame(dump_message(Pull()), bytes(length + 4)))
        strangers = [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), hello, b"\x16\x03\x01" + bytes(500)]
        attempts = [
            b"".join(encode_frame(dump_message(TakeTicket()))),
            b"".join(encode_frame({**dump_message(ServerHello(worker="bad")), "extra": 1})),
            b"".join(encode_frame({"kind": "hello", "worker": "x" * 100_000})),
            b"".join(encode_frame({"kind": "hello", "worker": "\ud800"})),
            hello + bytes(damaged),
            hello + too_long,
            hello + b"".join(encode_frame({"kind": "load", "pickle": "gASV"})),
            hello + b"".join(encode_frame({"kind": "push", "ticket": [0, 0], "lr": "nan"})),
            hello + push[: len(push) // 2],
        ]
        group = [Worker(servers, "w0"), Worker(servers, "w1")]
        where = (address.host, address.port)
        for attempt in (*strangers, *attempts):
            is_stranger = attempt in strangers
            with (
                socket.create_connection(where, timeout=LIMIT_S)
                if is_stranger
                else connect_link(where, secret, timeout_s=LIMIT_S)
            ) as link:
                answer = b""
                with suppress(OSError):  # it may have been hung up on before it had said all
                    link.sendall(attempt)
                    link.shutdown(socket.SHUT_WR)
                    while more := link.recv(65536):
                        answer += more
                if is_stranger:
                    assert answer in {b"", b"\x15\x03\x03\x00\x02\x02F"}  # an alert of TLS at most
                else:
                    assert not answer or attempt.startswith(hello)
        for worker in group:
            worker.end()
        torch.testing.assert_close(servers.weights(), weights, rtol=0, atol=1e-6)


def test_what_cannot_go_well_is_told(tmp_path: Path):
    with serving(tmp_path, ServerRules(steps=2, mode="asp", optimizer=ADAMW)) as servers:
        with pytest.raises(ModelError, match="129"):
            servers.client("other", torch.nn.Linear(2, 2))
        model = build()
        client = servers.client("w", model)
        ticket = client.take_ticket()
        assert ticket is not None
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, torch.nan)
        with pytest.raises(TrainingError, match="not finite"):
            client.push(ticket, lr=LR, items=1)
        servers.stop(0)
        for link in client._links:
            link._patience_s = 0.2
        with pytest.raises(ServerLostError, match="away"):
            client.pull()
        client.close()


def test_an_engine_trains_by_tickets_and_takes_each_sample_once(tmp_path: Path):
    """Ten samples in steps of four, in three shares: the last step has none for one of them."""
    rules = ServerRules(steps=6, mode="bsp", shares=3, shards=2, optimizer=ADAMW)
    order = StepOrder(samples=10, batch=4, seed=1)
    data = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    taken: list[int] = []

    def collate(samples: Sequence[int]) -> Batch:
        rows = torch.tensor(samples)
        return Batch(inputs=(data[rows],), targets=rows, samples=len(rows), items=len(rows))

    def loss_on(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        assert isinstance(batch.inputs, tuple)
        return (model(*batch.inputs) - batch.inputs[0].sum(1, keepdim=True)).square().sum()

    def work(name: str) -> None:
        model = build()
        weights = list(model.parameters())
        client = servers.client(name, model)
        optimizer = ServerOptimizer(client, weights)
        micros = ticket_batches(
            client, range(10), collate, order, micro_batch=1, begin=optimizer.begin
        )
        with closing(client):
            for batches in micros:
                for batch in batches:
                    loss = loss_on(model, batch) / optimizer.items
                    (loss if batch.counts else 0 * loss).backward()
                    taken.extend(batch.targets.tolist() if batch.counts else [])
                optimizer.param_groups[0]["lr"] = LR
                optimizer.step()
                optimizer.zero_grad()

    with serving(tmp_path, rules) as servers:
        group = [threading.Thread(target=work, args=(name,), daemon=True) for name in "ab"]
        for worker in group:
            worker.start()
        for worker in group:
            worker.join(LIMIT_S)
        found = servers.weights()
    assert sorted(taken) == sorted([*range(10)] * 2)
    model = build()
    alone: Any = build_optimizer(model, ADAMW, lr=LR, weight_decay=0.0, l2=0.0)
    for _, rows in zip(range(6), order.steps_from(0), strict=False):
        (loss_on(model, collate(rows.tolist())) / len(rows)).backward()
        alone.step()
        alone.zero_grad()
    torch.testing.assert_close(
        found, FlatWeights(list(model.parameters())).read(), rtol=0, atol=1e-5
    )
