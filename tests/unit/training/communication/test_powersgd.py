from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.training.communication.crowd import run_workers
from yunlu.training.communication.allreduce import ring_allreduce
from yunlu.training.communication.error_feedback import redistribute_residuals
from yunlu.training.communication.powersgd import MatrixSlice, PowerSgdAllReduce, as_matrix
from yunlu.training.communication.transport import Transport

_MATRICES = [MatrixSlice(5, 40, 60), MatrixSlice(2405, 30, 50)]
_LENGTH = 2405 + 1500 + 7
_PLACES = torch.cat([torch.arange(5, 2405), torch.arange(2405, 3905)])


def share(rank: int, step: int) -> Tensor:
    return torch.randn(_LENGTH, generator=torch.Generator().manual_seed(31 * rank + step))


def total(size: int, steps: range) -> Tensor:
    return torch.stack([share(rank, step) for rank in range(size) for step in steps]).sum(0)


def run_steps(transport: Transport, compressed: PowerSgdAllReduce, steps: range) -> list[Tensor]:
    found: list[Tensor] = []
    for step in steps:
        flat = share(transport.rank, step)
        compressed(transport, flat, 0, step)
        found.append(flat)
    return found


def test_all_get_the_same_bits_and_what_they_lack_is_kept() -> None:
    sums = [PowerSgdAllReduce({0: _MATRICES}, rank=3, allreduce=ring_allreduce) for _ in range(3)]
    found = run_workers(lambda transport: run_steps(transport, sums[transport.rank], range(3)), 3)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    left = torch.stack([each.state()["worker/0"] for each in sums]).sum(0)
    assert torch.allclose(torch.stack(found[0]).sum(0) + left, total(3, range(3)), atol=1e-3)


def test_what_is_no_matrix_is_exact_at_once() -> None:
    sums = [PowerSgdAllReduce({0: _MATRICES}, rank=3) for _ in range(2)]
    found = run_workers(
        lambda transport: run_steps(transport, sums[transport.rank], range(1))[0], 2
    )[0]
    others = torch.ones(_LENGTH, dtype=torch.bool)
    others[_PLACES] = False
    assert int(others.sum()) == 12
    assert torch.allclose(found[others], total(2, range(1))[others])


def test_a_sum_of_low_rank_comes_through_whole() -> None:
    left = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(1))
    right = torch.randn(2, 60, generator=torch.Generator().manual_seed(2))

    def work(transport: Transport) -> Tensor:
        flat = (left[transport.rank] @ right).reshape(-1)
        PowerSgdAllReduce({0: [MatrixSlice(0, 40, 60)]}, rank=2)(transport, flat, 0, 0)
        return flat.view(40, 60)

    assert torch.allclose(run_workers(work, 3)[0], left.sum(0) @ right, atol=1e-4)


def test_only_factors_travel() -> None:
    def work(transport: Transport) -> int:
        flat = torch.ones(100 * 100)
        PowerSgdAllReduce({0: [MatrixSlice(0, 100, 100)]}, rank=4)(transport, flat, 0, 0)
        return transport.traffic.sent_bytes

    for sent_bytes in run_workers(work, 2):
        assert 2 * 100 * 4 * 4 <= sent_bytes <= 2 * 100 * 4 * 4 + 1000


def test_one_bad_number_reaches_all_and_is_forgotten() -> None:
    sums, clean = ([PowerSgdAllReduce({0: _MATRICES}, rank=2) for _ in range(2)] for _ in range(2))

    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        compressed = sums[transport.rank]
        run_steps(transport, compressed, range(1))
        flat = share(transport.rank, 1)
        if transport.rank:
            flat[2600] = torch.inf
        compressed(transport, flat, 0, 1)
        return flat, run_steps(transport, compressed, range(2, 3))[0]

    def without(transport: Transport) -> Tensor:
        run_steps(transport, clean[transport.rank], range(1))
        return run_steps(transport, clean[transport.rank], range(2, 3))[0]

    found = run_workers(work, 2)
    assert not any(spoilt.isfinite().all() for spoilt, _ in found)
    assert torch.equal(found[0][1], run_workers(without, 2)[0])


def test_a_restored_run_goes_on_with_the_same_bits() -> None:
    def whole(transport: Transport) -> Tensor:
        return run_steps(transport, PowerSgdAllReduce({0: _MATRICES}, rank=2), range(3))[2]

    def halves(transport: Transport) -> Tensor:
        first, second = (PowerSgdAllReduce({0: _MATRICES}, rank=2) for _ in range(2))
        run_steps(transport, first, range(2))
        second.restore(first.state())
        return run_steps(transport, second, range(2, 3))[0]

    assert torch.equal(run_workers(whole, 2)[0], run_workers(halves, 2)[0])


@pytest.mark.parametrize("after", [1, 3])
def test_another_number_of_workers_delivers_what_the_others_left(after: int) -> None:
    old, new = (
        [PowerSgdAllReduce({0: _MATRICES}, rank=2) for _ in range(size)] for size in (2, after)
    )
    first = run_workers(lambda transport: run_steps(transport, old[transport.rank], range(2)), 2)[0]
    for compressed, state in zip(
        new, redistribute_residuals([each.state() for each in old], after), strict=True
    ):
        compressed.restore(state)
    second = run_workers(
        lambda transport: run_steps(transport, new[transport.rank], range(2, 4)), after
    )
    assert all(torch.equal(second[0][1], other[1]) for other in second)
    arrived = torch.stack(first + second[0]).sum(0)
    states = [each.state() for each in new]
    left = sum(state.get("worker/0", torch.zeros(_LENGTH)) for state in states)
    assert torch.allclose(arrived + left, total(2, range(2)) + total(after, range(2, 4)), atol=1e-3)


def test_a_newcomer_without_factors_gets_the_same_bits() -> None:
    sums = [PowerSgdAllReduce({0: _MATRICES}, rank=2) for _ in range(2)]
    run_workers(lambda transport: run_steps(transport, sums[transport.rank], range(2)), 2)
    sums[1] = PowerSgdAllReduce({0: _MATRICES}, rank=2)
    found = run_workers(
        lambda transport: run_steps(transport, sums[transport.rank], range(2, 4)), 2
    )
    assert torch.equal(found[0][1], found[1][1])


def test_a_gradient_of_zeros_stays_zero() -> None:
    def work(transport: Transport) -> Tensor:
        flat = torch.zeros(_LENGTH)
        PowerSgdAllReduce({0: _MATRICES}, rank=2)(transport, flat, 0, 0)
        return flat

    assert not any(found.any() for found in run_workers(work, 2))


def test_weights_become_matrices_as_they_lie_in_memory() -> None:
    conv = nn.Conv2d(6, 8, 3).weight
    assert as_matrix(7, conv) == MatrixSlice(7, 8, 54)
    assert as_matrix(7, conv.to(memory_format=torch.channels_last)) == MatrixSlice(7, 8, 54)
    assert as_matrix(0, torch.empty(4, 9).T) == MatrixSlice(0, 4, 9)
    assert as_matrix(0, torch.empty(4)) is None
    assert as_matrix(0, torch.empty(())) is None
    assert as_matrix(0, torch.empty(0, 3)) is None
