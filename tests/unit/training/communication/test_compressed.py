from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from tests.unit.training.communication.crowd import run_workers
from yunlu.core.framing import HEADER_BYTES
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.compressed import (
    CompressedAllReduce,
    CompressedAllReducer,
    make_compressed_allreducer,
)
from yunlu.training.communication.error_feedback import fold_owner_residuals, redistribute_residuals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.communication.transport import Transport

_LENGTH = 3 * 512 + 77
CODECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "topk", "randomk")
_LOSSY = [name for name in CODECS if name not in {"none", "fp16", "bf16"}]
_SETTINGS = {"topk": 0.2, "randomk": 0.2}


def make(name: str) -> CompressedAllReduce:
    return CompressedAllReduce(make_codec(name, block=64, share=_SETTINGS.get(name, 0.01)))


def share(rank: int, step: int, length: int = _LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(97 * rank + step))


def total(size: int, steps: Sequence[int], length: int = _LENGTH) -> Tensor:
    return torch.stack([share(rank, step, length) for rank in range(size) for step in steps]).sum(0)


def lacking(sums: Sequence[CompressedAllReduce], length: int = _LENGTH) -> Tensor:
    nothing = torch.zeros(length)
    return torch.stack(
        [fold_owner_residuals(each.state()).get("worker/0", nothing) for each in sums]
    ).sum(0)


def run_steps(
    transport: Transport,
    compressed: CompressedAllReduce,
    steps: Sequence[int],
    length: int = _LENGTH,
) -> list[Tensor]:
    sums: list[Tensor] = []
    for step in steps:
        flat = share(transport.rank, step, length)
        compressed(transport, flat, 0, step)
        sums.append(flat)
    return sums


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [2, 3])
def test_all_get_the_same_bits_and_what_they_lack_is_kept(name: str, size: int) -> None:
    sums = [make(name) for _ in range(size)]
    found = run_workers(
        lambda transport: run_steps(transport, sums[transport.rank], range(4)), size
    )
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    expected = total(size, range(4))
    if name in _LOSSY:
        arrived = torch.stack(found[0]).sum(0)
        assert float((arrived - expected).abs().max()) > 1e-4
        assert torch.allclose(arrived + lacking(sums), expected, atol=1e-4)
    else:
        assert torch.allclose(torch.stack(found[0]).sum(0), expected, atol=0.2, rtol=1e-2)
        assert not lacking(sums).any()


@pytest.mark.parametrize("length", [0, 1, 2, 511, 513, 2 * (1 << 16) * 3 + 5])
def test_any_length_can_be_added_up(length: int) -> None:
    sums = [make("int8") for _ in range(3)]
    found = run_workers(
        lambda transport: run_steps(transport, sums[transport.rank], [0], length)[0], 3
    )
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.allclose(found[0] + lacking(sums, length), total(3, [0], length), atol=1e-5)


def test_the_bytes_are_those_of_the_codec() -> None:
    length, size, header = 4 * 512, 4, HEADER_BYTES

    def work(transport: Transport) -> int:
        run_steps(transport, make("int4"), [0], length)
        return transport.traffic.sent_bytes

    message = make_codec("int4", block=64).size_bytes(512) + header
    assert run_workers(work, size) == [2 * (size - 1) * message] * size


@pytest.mark.parametrize("name", _LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_reaches_all_and_is_forgotten(name: str, bad: float) -> None:
    sums, clean = ([make(name) for _ in range(3)] for _ in range(2))

    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        compressed = sums[transport.rank]
        run_steps(transport, compressed, [0])
        flat = share(transport.rank, 1)
        if transport.rank == 1:
            flat[700] = bad
        compressed(transport, flat, 0, 1)
        return flat, run_steps(transport, compressed, [2])[0]

    found = run_workers(work, 3)
    assert not any(spoilt.isfinite().all() for spoilt, _ in found)
    if name == "randomk":  # which numbers it takes next depends on how many sums there were
        assert all(after.isfinite().all() for _, after in found)
        return
    expected = run_workers(
        lambda transport: run_steps(transport, clean[transport.rank], [0, 2])[1], 3
    )
    assert all(torch.equal(after, one) for (_, after), one in zip(found, expected, strict=True))


def test_a_sum_that_overflows_is_forgotten() -> None:
    sums = [make("int4") for _ in range(2)]

    def work(transport: Transport) -> Tensor:
        flat = torch.full((_LENGTH,), 3e38)
        sums[transport.rank](transport, flat, 0, 0)
        assert not flat.isfinite().all()
        return run_steps(transport, sums[transport.rank], [1])[0]

    found = run_workers(work, 2)
    assert torch.allclose(found[0] + lacking(sums), total(2, [1]), atol=1e-5)


def test_a_step_that_was_left_out_does_not_go_into_the_next() -> None:
    sums, clean = ([make("onebit") for _ in range(2)] for _ in range(2))

    def work(transport: Transport) -> Tensor:
        compressed = sums[transport.rank]
        run_steps(transport, compressed, [0])
        compressed.commit()
        spike = share(transport.rank, 1) * 1e6
        compressed(transport, spike, 0, 1)
        compressed.revert()
        return run_steps(transport, compressed, [2])[0]

    found = run_workers(work, 2)
    expected = run_workers(
        lambda transport: run_steps(transport, clean[transport.rank], [0, 2])[1], 2
    )
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", ["int4", "topk", "randomk"])
def test_a_restored_run_goes_on_with_the_same_bits(name: str) -> None:
    def whole(transport: Transport) -> Tensor:
        return run_steps(transport, make(name), range(4))[3]

    def halves(transport: Transport) -> Tensor:
        first, second = make(name), make(name)
        run_steps(transport, first, [0, 1])
        state = first.state()
        second.restore(state)
        assert second.state().keys() == state.keys()  # also before the first sum
        return run_steps(transport, second, [2, 3])[1]

    assert torch.equal(run_workers(whole, 3)[0], run_workers(halves, 3)[0])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_another_number_of_workers_delivers_what_the_others_left(before: int, after: int) -> None:
    old, new = ([make("onebit") for _ in range(size)] for size in (before, after))
    first = run_workers(
        lambda transport: run_steps(transport, old[transport.rank], [0, 1])[0:2], before
    )
    states = redistribute_residuals([each.state() for each in old], after)
    for compressed, state in zip(new, states, strict=True):
        compressed.restore(state)
    assert torch.allclose(lacking(new), lacking(old), atol=1e-5)
    second = run_workers(lambda transport: run_steps(transport, new[transport.rank], [2, 3]), after)
    arrived = torch.stack(first[0] + second[0]).sum(0)
    expected = total(before, [0, 1]) + total(after, [2, 3])
    assert torch.allclose(arrived + lacking(new), expected, atol=1e-4)


def test_a_survivor_goes_on_with_what_it_has() -> None:
    """No checkpoint: one worker of three is gone with its residual, those of the others are not."""
    old, new = ([make("int4") for _ in range(size)] for size in (3, 2))
    run_workers(lambda transport: run_steps(transport, old[transport.rank], [0, 1]), 3)
    new[0].restore(old[0].state())
    new[1].restore(old[2].state())
    kept = lacking([old[0], old[2]])
    found = run_workers(lambda transport: run_steps(transport, new[transport.rank], [2])[0], 2)
    assert torch.allclose(found[0] + lacking(new), total(2, [2]) + kept, atol=1e-4)


def test_residuals_of_another_arrangement_are_dropped() -> None:
    sums = [make("int4") for _ in range(2)]
    run_workers(lambda transport: run_steps(transport, sums[transport.rank], [0]), 2)
    states = [each.state() for each in sums]
    for each, state in zip(sums, states, strict=True):
        each.restore(state)
    found = run_workers(
        lambda transport: run_steps(transport, sums[transport.rank], [1], 900)[0], 2
    )
    assert torch.allclose(found[0] + lacking(sums, 900), total(2, [1], 900), atol=1e-5)


def test_numbers_that_are_no_gradients_are_added_up_exactly() -> None:
    def work(transport: Transport) -> Tensor:
        flags = torch.tensor([0.0, 1.0, float(transport.rank)])
        make("onebit")(transport, flags, -1, 0)
        return flags

    assert all(found.tolist() == [0.0, 3.0, 3.0] for found in run_workers(work, 3))


def test_an_outlier_is_bounded_before_it_is_left_out() -> None:
    sums = [CompressedAllReduce(make_codec("onebit"), clip_norm=1.0) for _ in range(2)]

    def work(transport: Transport) -> None:
        flat = share(transport.rank, 0) * (1e4 if transport.rank else 1e-4)
        sums[transport.rank](transport, flat, 0, 0)

    run_workers(work, 2)
    assert float(lacking(sums).norm()) < 1.5


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_the_engine_gets_sums_that_run_beside_it(name: str) -> None:
    def work(transport: Transport) -> tuple[list[Tensor], CompressedAllReducer]:
        allreducer = make_compressed_allreducer(transport, name, rank=2)
        flats = [share(transport.rank, key, 4096).to(torch.float64) for key in range(3)]
        pending = [allreducer.begin(flat, key=key) for key, flat in enumerate(flats)]
        for each in pending:
            each.wait()
        allreducer.commit()
        error = allreducer.error()
        assert error is not None
        assert 0 < error < 1
        assert allreducer.traffic().sent_bytes < 3 * 4 * 4096
        allreducer.close()
        return flats, allreducer

    found = run_workers(work, 2)
    states = [fold_owner_residuals(allreducer.state()) for _, allreducer in found]
    for key in range(3):
        assert torch.equal(found[0][0][key], found[1][0][key])
        left = states[0][f"worker/{key}"] + states[1][f"worker/{key}"]
        arrived = found[0][0][key].float() + left
        assert torch.allclose(arrived, total(2, [key], 4096), atol=1e-4)


def test_after_a_switch_to_whole_numbers_nothing_is_lacking_or_comes_twice() -> None:
    sums = [make("onebit") for _ in range(2)]

    def work(transport: Transport) -> list[Tensor]:
        compressed = sums[transport.rank]
        first = run_steps(transport, compressed, [0, 1])
        compressed.switch(make_codec("int4", block=64))
        second = run_steps(transport, compressed, [2])
        compressed.switch(make_codec("none"))
        return first + second + run_steps(transport, compressed, [3, 4])

    arrived = torch.stack(run_workers(work, 2)[0]).sum(0)
    assert torch.allclose(arrived, total(2, range(5)), atol=1e-4)
    assert not lacking(sums).any()
