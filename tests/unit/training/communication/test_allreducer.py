"""The engine's door to sums: threads of their own, torch's backend, and what happens when one fails."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.unit.training.communication.connected import in_threads, make_wires
from yunlu.training.communication.allreduce import ring_allreduce
from yunlu.training.communication.allreducer import AllReducer, ThreadedAllReducer, TorchAllReducer
from yunlu.training.communication.transport import LinkLostError, Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def _ring(transport: Transport, flat: Tensor, key: int, tag: int) -> None:
    if key < 0:
        raise ArithmeticError("no such key")
    ring_allreduce(transport, flat, tag=tag)


@pytest.fixture
def pair() -> Iterator[list[ThreadedAllReducer]]:
    """Two workers."""
    both = [ThreadedAllReducer(transport, _ring) for transport in make_wires(["127.0.0.1"] * 2)]
    yield both
    for each in both:
        each.close()


def test_sums_begun_together_are_waited_for_in_any_order(pair: list[ThreadedAllReducer]) -> None:
    def work(rank: int) -> list[float]:
        allreducer: AllReducer = pair[rank]
        flats = [torch.full((1000,), float(rank + key)) for key in range(5)]
        pendings = [allreducer.begin(flat, key=key) for key, flat in enumerate(flats)]
        for pending in reversed(pendings):
            pending.wait()
        assert allreducer.traffic().sent_bytes > 5 * 4000
        assert allreducer.error() is None
        allreducer.restore(allreducer.state())
        return [float(flat.mean()) for flat in flats]

    assert in_threads(work, 2) == [[1, 3, 5, 7, 9]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_kinds_of_numbers_come_back_as_they_were_given(
    pair: list[ThreadedAllReducer], dtype: torch.dtype
) -> None:
    def work(rank: int) -> Tensor:
        flat = torch.tensor([1.5, 2.0, 0.1], dtype=dtype) * (rank + 1)
        pair[rank].begin(flat, key=0).wait()
        return flat

    first, second = in_threads(work, 2)
    assert torch.equal(first, second)
    assert torch.allclose(first.double(), torch.tensor([4.5, 6.0, 0.3]).double(), rtol=1e-2)
    assert first.dtype == dtype


def test_a_failure_is_raised_where_it_is_waited_for_and_ends_all_sums_on_all(
    pair: list[ThreadedAllReducer],
) -> None:
    pendings = [pair[0].begin(torch.ones(3), key=key) for key in (-1, 0)]
    for pending in pendings:
        with pytest.raises(ArithmeticError):
            pending.wait()
    with pytest.raises(LinkLostError):
        pair[1].begin(torch.ones(3), key=0).wait()


def test_abort_ends_the_wait_for_someone_who_does_not_come(pair: list[ThreadedAllReducer]) -> None:
    pending = pair[0].begin(torch.ones(3), key=0)
    pair[0].abort()
    with pytest.raises(LinkLostError):
        pending.wait()


def test_close_ends_what_is_under_way_and_nothing_begins_after_it(
    pair: list[ThreadedAllReducer],
) -> None:
    pendings = [pair[0].begin(torch.ones(3), key=key) for key in range(3)]
    pair[0].close()
    pair[0].close()
    for pending in pendings:
        with pytest.raises(LinkLostError):
            pending.wait()
    with pytest.raises(LinkLostError):
        pair[0].begin(torch.ones(3), key=0)


def test_sums_run_while_others_work() -> None:
    going, may_end = Event(), Event()

    def run(_transport: Transport, flat: Tensor, _key: int, _tag: int) -> None:
        going.set()
        may_end.wait()
        flat.mul_(2)

    allreducer = ThreadedAllReducer(Transport(0, ("a",), {}), run)
    flat = torch.ones(1)
    pending = allreducer.begin(flat, key=0)
    going.wait()
    assert flat.item() == 1
    may_end.set()
    pending.wait()
    assert flat.item() == 2
    allreducer.close()


def test_torch_adds_up_by_its_own_means() -> None:
    cuts: list[bool] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        allreducer: AllReducer = TorchAllReducer(dist.group.WORLD, cut=lambda: cuts.append(True))
        flat = torch.ones(4)
        allreducer.begin(flat, key=0).wait()
        assert flat.tolist() == [1, 1, 1, 1]
        assert allreducer.traffic().sent_bytes == 0
        assert allreducer.error() is None
        allreducer.restore(allreducer.state())
        allreducer.abort()
        allreducer.close()
    finally:
        dist.destroy_process_group()
    assert cuts == [True]
