"""The parts of the parameter servers that need no connection: journal, tickets, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from yunlu.core.errors import CheckpointError, StoreError
from yunlu.spec.train import OptimizerSpec
from yunlu.training.communication.servers.dispatcher import Dispatcher
from yunlu.training.communication.servers.messages import CompleteTicket, Push
from yunlu.training.communication.servers.rules import ServerRules, Ticket, TicketSet, shard_ranges
from yunlu.training.communication.servers.store import (
    Shard,
    ShardJournal,
    prepare,
    shard_directory,
    write_state,
)
from yunlu.training.communication.servers.weights import HeldWeights, RefusedPushError


def make_journal(directory: Path) -> ShardJournal:
    directory.mkdir()
    write_state(directory, {"log": "log-0"}, b"begin")
    journal = ShardJournal(directory)
    journal.read_state()
    assert list(journal.read_changes()) == []
    return journal


def test_half_a_record_is_cut_off_and_damage_is_told(tmp_path: Path):
    journal = make_journal(tmp_path / "shard")
    ends = [0]
    for number in range(3):
        journal.append({"number": number}, bytes([number]) * 5)
        ends.append(journal.log_bytes)
    journal.close()
    log = tmp_path / "shard" / "log-0"
    whole = log.read_bytes()
    for size in range(len(whole) + 1):
        log.write_bytes(whole[:size])
        again = ShardJournal(tmp_path / "shard")
        again.read_state()
        found = [each.control["number"] for each in again.read_changes()]
        assert found == [number for number in range(3) if ends[number + 1] <= size]
        again.append({"number": 9})
        again.close()
        assert log.read_bytes()[: ends[len(found)]] == whole[: ends[len(found)]]
    for place in range(len(whole)):
        log.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        again = ShardJournal(tmp_path / "shard")
        again.read_state()
        with pytest.raises(CheckpointError):
            list(again.read_changes())
        again.close()


def test_a_state_names_its_log_so_neither_is_read_with_the_other(tmp_path: Path):
    journal = make_journal(tmp_path / "shard")
    journal.append({"number": 1})
    old = (tmp_path / "shard" / "log-0").read_bytes()
    journal.write_state({"version": 1}, b"state")
    journal.append({"number": 2})
    journal.close()
    # Killed after the new state was published and before the old log was removed.
    (tmp_path / "shard" / "log-0").write_bytes(old)
    again = ShardJournal(tmp_path / "shard")
    state = again.read_state()
    assert (state.control["version"], bytes(state.body)) == (1, b"state")
    assert [each.control["number"] for each in again.read_changes()] == [2]
    assert not (tmp_path / "shard" / "log-0").exists()
    with pytest.raises(StoreError, match="another process"):
        ShardJournal(tmp_path / "shard")
    again.close()
    (tmp_path / "shard" / "state").write_bytes(b"half")
    torn = ShardJournal(tmp_path / "shard")
    with pytest.raises(CheckpointError, match="too early"):
        torn.read_state()
    torn.close()


@given(st.lists(st.integers(0, 30)), st.integers(0, 5))
def test_a_ticket_set_is_a_set(numbers: list[int], below: int):
    found = TicketSet(below)
    for number in numbers:
        found.add(number)
    expected = {*range(below), *numbers}
    assert {number for number in range(40) if number in found} == expected
    assert TicketSet.unpack(found.pack()).pack() == found.pack()


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_hold_each_weight_once(length: int, shards: int):
    parts = shard_ranges(length, shards)
    assert [place for part in parts for place in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


MODES = st.sampled_from(
    [
        ServerRules(steps=6, first_step=1, mode="asp", shares=2),
        ServerRules(steps=9, mode="ssp", staleness=0),
        ServerRules(steps=5, mode="ssp", shares=2, staleness=2),
        ServerRules(steps=5, mode="bsp", shares=3),
        ServerRules(steps=5, mode="bsp", shares=4, backups=2),
    ]
)


class Play:
    """Workers around a dispatcher."""

    def __init__(self, rules: ServerRules) -> None:
        self.rules, self.dispatcher = rules, Dispatcher(rules)
        self.counted = dict[Ticket, int]()

    def act(self, worker: str, what: str = "work") -> None:
        if what == "restart":
            self.restart()
        elif what == "leave":
            self.dispatcher.leave(worker)
        elif worker not in self.dispatcher.workers:
            self.dispatcher.join(worker)
        elif held := sorted(self.dispatcher.workers[worker].held):
            self.finish(worker, held[0])
        else:
            self.begin(worker)

    def restart(self) -> None:
        state, workers = self.dispatcher.state(), self.dispatcher.workers
        self.dispatcher = Dispatcher(self.rules)
        self.dispatcher.restore(state)
        for name, standing in workers.items():
            self.dispatcher.join(name, standing.held)

    def begin(self, worker: str) -> None:
        found = self.dispatcher.take(worker)
        if isinstance(found, Ticket):
            assert found.exists(self.rules)
            assert found.number(self.rules) not in self.dispatcher.done
            ahead = found.step - self.dispatcher.done.below // self.rules.shares
            most = {"asp": self.rules.steps, "ssp": self.rules.staleness, "bsp": 0}
            assert 0 <= ahead <= most[self.rules.mode]

    def finish(self, worker: str, ticket: Ticket) -> None:
        if not self.dispatcher.may_claim(ticket):
            self.dispatcher.forget(worker, ticket)
            return
        if self.rules.backups:
            self.dispatcher.claim(ticket)
        if ticket.number(self.rules) not in self.dispatcher.done:
            self.counted[ticket] = self.counted.get(ticket, 0) + 1
        self.dispatcher.complete(worker, ticket)


@settings(max_examples=100)
@given(MODES, st.data())
def test_every_ticket_is_done_once_whoever_comes_and_goes(rules: ServerRules, data: st.DataObject):
    play = Play(rules)
    workers = st.sampled_from(["a", "b", "c"])
    events = st.sampled_from(["work", "work", "work", "work", "leave", "restart"])
    for worker, what in data.draw(st.lists(st.tuples(workers, events), max_size=60)):
        play.act(worker, what)
    for _ in range(200):  # at last everyone works on: it must come to an end
        for worker in "abc":
            play.act(worker)
    assert play.dispatcher.take("a") == "end"
    steps = range(rules.first_step, rules.steps)
    assert set(play.counted.values()) == {1}
    for step in steps:
        assert sum(ticket.step == step for ticket in play.counted) == rules.needed
    assert play.dispatcher.completed == len(play.counted)
    assert play.dispatcher.dropped == len(steps) * rules.backups


def test_nothing_new_is_handed_out_while_somebody_pauses():
    dispatcher = Dispatcher(ServerRules(steps=9, mode="asp"))
    for worker in "abc":
        dispatcher.join(worker)
    ticket = dispatcher.take("a")
    assert dispatcher.pause("b")
    assert dispatcher.take("c") == "wait"
    assert not dispatcher.is_drained()
    dispatcher.leave("a")
    assert not dispatcher.is_drained()  # a shard may have had its gradient, another not
    assert dispatcher.can_drain()  # c asked for work
    assert dispatcher.take("c") == ticket
    assert not dispatcher.pause("c")
    dispatcher.complete("c", Ticket(0))
    assert dispatcher.is_drained()
    dispatcher.resume("b")
    assert dispatcher.take("c") == Ticket(1)


def test_who_only_reads_holds_nobody_back():
    dispatcher = Dispatcher(ServerRules(steps=9, mode="ssp", staleness=0))
    for worker in ("reader", "a"):
        dispatcher.join(worker)
    for step in range(5):
        assert dispatcher.take("a") == Ticket(step)
        dispatcher.complete("a", Ticket(step))
    assert dispatcher.pause("a")  # it looks at the weights for a while
    dispatcher.resume("a")
    for step in range(5, 8):
        assert dispatcher.take("reader") == Ticket(step)
        dispatcher.complete("reader", Ticket(step))
    assert dispatcher.take("a") == Ticket(8)


def test_one_who_is_slow_holds_the_others_back_only_by_the_ticket_it_has():
    dispatcher = Dispatcher(ServerRules(steps=100, mode="ssp", shares=2, staleness=2))
    for worker in ("slow", "fast"):
        dispatcher.join(worker)
    done = 0
    while (ticket := dispatcher.take("slow")) != "end":
        for _ in range(4):  # it takes five times as long
            quick = dispatcher.take("fast")
            if isinstance(quick, Ticket):
                dispatcher.complete("fast", quick)
                done += 1
        if isinstance(ticket, Ticket):
            dispatcher.complete("slow", ticket)
    assert done >= 0.75 * 200


def test_stopping_ends_with_what_is_under_way():
    dispatcher = Dispatcher(ServerRules(steps=9, mode="asp"))
    for worker in "ab":
        dispatcher.join(worker)
    ticket = dispatcher.take("a")
    assert isinstance(ticket, Ticket)
    dispatcher.is_stopping = True
    assert dispatcher.take("b") == "wait"  # a may be lost yet
    dispatcher.complete("a", ticket)
    assert dispatcher.take("b") == "end"


@pytest.mark.parametrize(
    "wrong",
    [
        {"backups": 1, "shares": 2, "mode": "ssp"},
        {"backups": 2, "shares": 2, "mode": "bsp"},
        {"correction": "delay", "mode": "bsp"},
        {"optimizer": OptimizerSpec(name="lamb")},
    ],
)
def test_rules_that_contradict_each_other_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        ServerRules.model_validate({"steps": 1, **wrong})


def push_of(
    step: int, *, share: int = 0, version: int = 0, items: int = 1, lr: float = 0.1
) -> Push:
    return Push(ticket=Ticket(step, share), lr=lr, items=items, version=version)


def body_of(values: Tensor) -> bytearray:
    return bytearray(values.numpy().tobytes())


SGD = OptimizerSpec(name="sgd")


def test_stale_gradients_are_corrected_as_the_papers_say():
    def held(**changes: Any) -> HeldWeights:
        rules = ServerRules(steps=9, mode="asp", optimizer=SGD, delay_strength=0.5, **changes)
        return HeldWeights(rules, torch.tensor([1.0, -2.0]), 0)

    gradient = torch.tensor([0.5, 1.0])
    plain, slower, carried = held(), held(correction="rate"), held(correction="delay")
    for weights in (plain, slower, carried):
        for step in range(3):
            weights.apply(push_of(step, version=step), torch.ones(2))
    before = torch.tensor([1.0, -2.0])
    now = plain.flat.clone()
    for weights in (plain, slower, carried):
        torch.testing.assert_close(weights.flat, now, rtol=0, atol=0)
    plain.apply(push_of(3, version=0), gradient.clone())
    torch.testing.assert_close(plain.flat, now - 0.1 * gradient)
    slower.apply(push_of(3, version=0), gradient.clone())
    torch.testing.assert_close(slower.flat, now - 0.1 / 4 * gradient)
    moved = gradient.clone()
    carried.compensate(moved, before)
    torch.testing.assert_close(moved, gradient + 0.5 * gradient * gradient * (now - before))


def test_a_step_is_the_mean_over_its_items_in_whatever_order_they_come():
    rules = ServerRules(steps=9, mode="bsp", shares=3, optimizer=OptimizerSpec(name="adamw"))
    gradients = [torch.tensor([0.1, 0.3]), torch.tensor([-0.7, 0.2]), torch.tensor([0.9, 1e-7])]
    ends: list[Tensor] = []
    for order in ((0, 1, 2), (2, 0, 1)):
        weights = HeldWeights(rules, torch.tensor([1.0, -2.0]), 1)
        for share in order:
            weights.apply(push_of(0, share=share, items=share + 1), gradients[share].clone())
            assert weights.check_ticket(Ticket(0, share)) == "duplicate"
        assert weights.version == 1
        ends.append(weights.flat)
    assert torch.equal(*ends)
    alone = HeldWeights(rules.model_copy(update={"shares": 1}), torch.tensor([1.0, -2.0]), 1)
    mean = sum(((share + 1) / 6 * gradients[share] for share in range(3)), torch.zeros(2))
    alone.apply(push_of(0), mean)
    torch.testing.assert_close(ends[0], alone.flat)


def test_gradients_that_do_not_fit_are_refused():
    weights = HeldWeights(ServerRules(steps=3, mode="bsp"), torch.ones(4), 2)
    with pytest.raises(RefusedPushError, match="12 bytes"):
        weights.unpack(push_of(0), body_of(torch.ones(3)))
    with pytest.raises(RefusedPushError, match="not finite"):
        weights.unpack(push_of(0), body_of(torch.tensor([1, 1, torch.nan, 1])))
    with pytest.raises(RefusedPushError, match="unknown ticket"):
        weights.check_ticket(Ticket(3))
    with pytest.raises(RefusedPushError, match="not begun"):
        weights.check_ticket(Ticket(1))
    assert weights.unpack(push_of(0, items=0), b"") is None


@pytest.mark.parametrize("name", ["adamw", "adam", "momentum", "sgd"])
@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("log_bytes", [0, 1 << 20])
def test_a_restored_shard_has_the_same_bits(tmp_path: Path, name: Any, mode: Any, log_bytes: int):
    rules = ServerRules(
        steps=20,
        mode=mode,
        shares=2,
        shards=2,
        optimizer=OptimizerSpec(name=name),
        weight_decay=0.1,
        log_bytes=log_bytes,
        correction="none" if mode == "bsp" else "delay",
    )
    generator = torch.Generator().manual_seed(1)
    prepare(tmp_path / "servers", rules, torch.randn(9, generator=generator), 3)
    place = shard_directory(tmp_path / "servers", 0)
    shard = Shard(place)
    steady = HeldWeights(rules, shard.weights.flat.clone(), 3)
    for step in range(13):
        for share in range(2):
            push = push_of(step, share=share, version=max(shard.weights.version - 1, 0))
            gradient = torch.randn(4, generator=generator)
            before = torch.randn(4, generator=generator) if mode == "asp" else None
            assert shard.push(push, body_of(gradient), before) == "taken"
            assert shard.push(push, body_of(gradient), before) == "duplicate"
            shard.complete("w", CompleteTicket(ticket=push.ticket, metrics={"loss": 1.0}))
            if before is not None:
                steady.compensate(gradient, before)
            steady.apply(push, gradient)
            shard.close()
            shard = Shard(place)
            assert torch.equal(shard.weights.flat, steady.flat)
            assert shard.weights.version == steady.version
            assert shard.weights.check_ticket(push.ticket) == "duplicate"
            assert shard.dispatcher is not None
            assert push.ticket.number(rules) in shard.dispatcher.done
    assert shard.dispatcher is not None
    assert shard.dispatcher.completed == 26
    assert len((place / "done.jsonl").read_text().splitlines()) == 26
    shard.close()
    assert (len(list(place.glob("log-*"))), log_bytes > 0) == (1, (place / "log-0").exists())
