"""Workers that update weights of their own and meet rarely: as threads, over real connections."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.waiting import LIMIT_S
from yunlu.training.communication.local_updates import (
    METHODS,
    LocalRules,
    SiteFollower,
    WeightAveraging,
)
from yunlu.training.communication.transport import LinkLostError, Transport, connect

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
_SHAPES = ((5, 7), (), (3,), (2, 3, 4))
_LENGTH = 35 + 1 + 3 + 24


def _run(function: Callable[[Transport], Found], size: int) -> list[Found]:
    """``function(wire)`` in a thread for each worker; what each returned."""
    store = dist.HashStore()

    def work(rank: int) -> Found:
        transport = connect(
            store, rank, size, "127.0.0.1", secret=b"test", within_s=LIMIT_S, patience_s=LIMIT_S
        )
        try:
            return function(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(size) as workers:
        return list(workers.map(work, range(size)))


def _weights() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=numbers) for shape in _SHAPES]


def _flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights])


def _update(weights: list[Tensor], rank: int, step: int) -> None:
    """A step that depends on the worker alone."""
    for weight, change in zip(weights, _changes(rank, step), strict=True):
        weight.add_(change)


def _changes(rank: int, step: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=numbers) for shape in _SHAPES]


def _train(
    transport: Transport, rules: LocalRules, steps: int, samples: tuple[float, ...] | None = None
) -> tuple[list[Tensor], WeightAveraging]:
    weights = _weights()
    averaging = WeightAveraging(weights, transport, rules)
    for step in range(1, steps + 1):
        _update(weights, transport.rank, step)
        averaging.after_update(step, samples=samples[transport.rank] if samples else 1.0)
    return weights, averaging


@st.composite
def _rules(draw: st.DrawFn) -> LocalRules:
    every = draw(st.integers(1, 5))
    return LocalRules(
        every=every,
        parts=draw(st.integers(1, min(3, every))),
        delay=draw(st.integers(0, every)),
        codec=draw(st.sampled_from(["none", "int4", "onebit", "topk"])),
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(rules=_rules(), steps=st.integers(1, 11), size=st.integers(2, 3))
def test_all_that_was_learned_arrives_once_whatever_the_rules(
    rules: LocalRules, steps: int, size: int
) -> None:
    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        weights, averaging = _train(transport, rules, steps)
        averaging.synchronize()
        settled = _flat(weights).clone()
        averaging.synchronize(exact=True)
        averaging.close()
        return settled, _flat(weights)

    found = _run(work, size)
    learned = sum(
        (_flat(_changes(rank, step)) for rank in range(size) for step in range(1, steps + 1)),
        torch.zeros(_LENGTH),
    )
    expected = _flat(_weights()) + learned / size
    for settled, exact in found:
        assert torch.equal(settled, found[0][0])
        assert torch.equal(exact, found[0][1])
        torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)


def test_without_delay_weights_are_the_mean_after_every_exchange() -> None:
    def work(transport: Transport) -> list[Tensor]:
        weights = _weights()
        averaging = WeightAveraging(weights, transport, LocalRules(every=2))
        seen: list[Tensor] = []
        for step in range(1, 5):
            _update(weights, transport.rank, step)
            averaging.after_update(step)
            seen.append(_flat(weights).clone())
        averaging.close()
        return seen

    first, second, third = _run(work, 3)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[2], third[2])
    for step in (1, 3):
        assert torch.equal(first[step], second[step])
        assert torch.equal(first[step], third[step])


def test_steps_done_during_an_exchange_stay() -> None:
    rules = LocalRules(every=3, delay=2)
    found = _run(lambda transport: _flat(_train(transport, rules, 5)[0]), 2)
    mean = sum(
        (_flat(_changes(rank, step)) for rank in range(2) for step in (1, 2, 3)),
        torch.zeros(_LENGTH),
    )
    for rank, weights in enumerate(found):
        since = _flat(_changes(rank, 4)) + _flat(_changes(rank, 5))
        torch.testing.assert_close(weights, _flat(_weights()) + mean / 2 + since)


def test_parts_take_turns() -> None:
    rules = LocalRules(every=4, parts=2)
    found = _run(lambda transport: _flat(_train(transport, rules, 4)[0]), 2)
    assert torch.equal(found[0][: _LENGTH // 2], found[1][: _LENGTH // 2])
    assert not torch.isclose(found[0][_LENGTH // 2 :], found[1][_LENGTH // 2 :]).any()


def test_who_learned_from_more_counts_for_more() -> None:
    samples = (3.0, 1.0)
    found = _run(lambda transport: _flat(_train(transport, LocalRules(every=1), 1, samples)[0]), 2)
    mean = 0.75 * _flat(_changes(0, 1)) + 0.25 * _flat(_changes(1, 1))
    torch.testing.assert_close(found[0], _flat(_weights()) + mean)
    assert torch.equal(found[0], found[1])


def test_outer_steps_are_those_of_nesterov() -> None:
    rules = replace(METHODS["diloco"], every=1)
    found = _run(lambda transport: _flat(_train(transport, rules, 3)[0]), 1)
    expected, momentum = _flat(_weights()), torch.zeros(_LENGTH)
    for step in range(1, 4):  # torch's formula for SGD(lr=0.7, momentum=0.9, nesterov=True)
        momentum = 0.9 * momentum + _flat(_changes(0, step))
        expected = expected + 0.7 * (_flat(_changes(0, step)) + 0.9 * momentum)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_weights_that_are_not_finite_are_left_out_and_replaced(codec: str, delay: int) -> None:
    rules = LocalRules(every=2, delay=delay, codec=codec)

    def work(transport: Transport) -> Tensor:
        weights = _weights()
        averaging = WeightAveraging(weights, transport, rules)
        for step in range(1, 4):
            _update(weights, transport.rank, step)
            if (transport.rank, step) == (1, 2):
                weights[0][2, 3] = float("nan")
            averaging.after_update(step)
        averaging.synchronize(exact=True)
        averaging.close()
        return _flat(weights)

    first, second = _run(work, 2)
    assert torch.equal(first, second)
    healthy = _flat(_changes(0, 1)) + _flat(_changes(0, 2))
    # With the exchange still under way, the broken worker's third step went to waste as well.
    third = _flat(_changes(0, 3)) + (0.0 if delay else _flat(_changes(1, 3)))
    expected = _flat(_weights()) + healthy + third / 2
    # What was left out beside the broken worker weighs less once that one is back.
    margin = 1e-4 if codec == "none" else 0.2
    torch.testing.assert_close(first, expected, rtol=margin, atol=margin)


def test_post_local_begins_from_where_summed_steps_have_led() -> None:
    rules = LocalRules(every=2, from_step=3)
    assert [rules.sums_gradients(step) for step in (1, 3, 4)] == [True, True, False]

    def work(transport: Transport) -> tuple[int, Tensor]:
        weights = _weights()
        averaging = WeightAveraging(weights, transport, rules)
        for step in range(1, 4):
            _update(weights, 7, step)  # the same step on all
            averaging.after_update(step)
        sent = averaging.traffic().sent_bytes
        for step in (4, 5):
            _update(weights, transport.rank, step)
            averaging.after_update(step)
        averaging.close()
        return sent, _flat(weights)

    found = _run(work, 2)
    assert [sent for sent, _ in found] == [0, 0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_going_on_from_what_was_saved_is_as_if_never_stopped(codec: str) -> None:
    rules = LocalRules(every=2, parts=2, delay=1, codec=codec, outer_lr=0.9, outer_momentum=0.5)

    def go_on(averaging: WeightAveraging, weights: list[Tensor], rank: int) -> Tensor:
        for step in range(6, 10):
            _update(weights, rank, step)
            averaging.after_update(step)
        averaging.synchronize()
        return _flat(weights).clone()

    def work(transport: Transport) -> dict[str, Tensor]:
        weights, averaging = _train(transport, rules, 5)
        averaging.synchronize()
        saved = averaging.state()
        unbroken = go_on(averaging, weights, transport.rank)
        others = [torch.zeros(shape) for shape in _SHAPES]
        again = WeightAveraging(others, transport, rules)
        again.restore(saved)
        resumed = go_on(again, others, transport.rank)
        again.close()
        return {"unbroken": unbroken, "resumed": resumed, "left_out": saved["left_out"]}

    for found in _run(work, 2):
        assert torch.equal(found["resumed"], found["unbroken"])
        assert found["left_out"].any()


def test_after_settling_exactly_nothing_is_left_out() -> None:
    def work(transport: Transport) -> dict[str, Tensor]:
        _, averaging = _train(transport, LocalRules(every=2, codec="topk"), 5)
        averaging.synchronize(exact=True)
        state = averaging.state()
        averaging.close()
        return state

    first, second = _run(work, 2)
    assert not first["left_out"].any()
    assert not first["owed"].any()
    assert torch.equal(first["anchor"], second["anchor"])


def test_weights_that_were_never_the_same_are_refused() -> None:
    def work(transport: Transport) -> str:
        weights = [torch.full((9,), float(transport.rank))]
        averaging = WeightAveraging(weights, transport, LocalRules(every=1))
        with pytest.raises(LinkLostError) as caught:
            averaging.after_update(1)
        averaging.close()
        return str(caught.value)

    assert any("differ" in said for said in _run(work, 2))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_lost_worker_ends_the_exchange_and_the_rest_can_agree(delay: int) -> None:
    rules = LocalRules(every=2, delay=delay, codec="int8")

    def work(transport: Transport) -> tuple[int, Tensor] | None:
        weights, averaging = _train(transport, rules, 5 if delay else 3)
        if transport.rank == 1:
            averaging.abort()
            averaging.close()
            return None
        with pytest.raises(LinkLostError):
            averaging.synchronize()
        assert _flat(weights).isfinite().all()
        averaging.return_to_anchor()
        rounds = averaging.rounds
        averaging.close()
        return rounds, _flat(weights)

    _, *rest = [found for found in _run(work, 3) if found is not None] * 2
    by_rounds: dict[int, list[Tensor]] = {}
    for rounds, weights in rest:
        by_rounds.setdefault(rounds, []).append(weights)
    for same in by_rounds.values():
        assert all(torch.equal(weights, same[0]) for weights in same)


def test_abort_from_another_thread_ends_a_wait() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            gone.wait(LIMIT_S)  # never takes part
            return
        weights = _weights()
        averaging = WeightAveraging(weights, transport, LocalRules(every=1))
        timer = threading.Timer(0.05, averaging.abort)
        timer.start()
        with pytest.raises(LinkLostError, match="aborted"):
            averaging.after_update(1)
        averaging.close()
        timer.join()
        gone.set()

    gone = threading.Event()
    _run(work, 2)


def test_weights_may_lie_in_any_order_in_memory() -> None:
    def work(transport: Transport) -> Tensor:
        weight = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        averaging = WeightAveraging([weight], transport, LocalRules(every=1))
        weight += transport.rank
        averaging.after_update(1)
        averaging.close()
        return weight.contiguous()

    for found in _run(work, 2):
        assert torch.equal(found, torch.arange(24.0).view(2, 3, 2, 2) + 0.5)
    with pytest.raises(ValueError, match="gaps"):
        WeightAveraging([torch.zeros(4, 4)[:, :2]], Transport(0, ("a",), {}), LocalRules())


@pytest.mark.parametrize(
    "figures",
    [{"every": 0}, {"parts": 9}, {"delay": 9}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}],
)
def test_rules_that_cannot_be_kept_are_refused(figures: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="="):
        replace(LocalRules(every=8), **figures)


def _train_in_sites(
    store: dist.Store, rank: int, sites: list[list[int]], rules: LocalRules, steps: int
) -> list[Tensor]:
    """Each step of a site is the same on all its workers; one of them speaks for it."""
    number, site_ranks = next((n, ranks) for n, ranks in enumerate(sites) if rank in ranks)
    inside = connect(
        store,
        site_ranks.index(rank),
        len(site_ranks),
        "127.0.0.1",
        secret=b"test",
        name=f"site-{number}",
    )
    weights = _weights()
    if rank == site_ranks[0]:
        between = connect(store, number, len(sites), "127.0.0.1", secret=b"test", name="between")
        averaging = WeightAveraging(weights, between, rules, site_transport=inside)
    else:
        averaging = SiteFollower(weights, inside, rules)
    try:
        for step in range(1, steps + 1):
            _update(weights, number, step)
            averaging.after_update(step)
        averaging.synchronize(exact=True)
        return [*weights, averaging.state()["momentum"]]
    finally:
        averaging.close()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", ["local", "diloco"])
def test_sites_meet_as_single_workers_do(method: str, delay: int) -> None:
    """Three sites of 1, 2 and 3 workers end where three workers do, to the bit, on every worker."""
    rules = replace(METHODS[method], every=3, delay=delay, parts=2)
    sites = [[0], [1, 4], [2, 3, 5]]
    store = dist.HashStore()

    def train(rank: int) -> list[Tensor]:
        return _train_in_sites(store, rank, sites, rules, 10)

    with ThreadPoolExecutor(6) as workers:
        found = list(workers.map(train, range(6)))

    def alone(transport: Transport) -> list[Tensor]:
        weights, averaging = _train(transport, rules, 10)
        averaging.synchronize(exact=True)
        momentum = averaging.state()["momentum"]
        averaging.close()
        return [*weights, momentum]

    for wanted, got in zip(_run(alone, 3)[0], zip(*found, strict=True), strict=True):
        assert all(torch.equal(wanted, each) for each in got)
