"""Links: measured by all workers, told alike to all, watched while they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.training.communication.connected import in_threads, make_wires
from yunlu.planning.communication.method_choice import MethodQuery, choose
from yunlu.planning.communication.timing import CodecCost, SharedWork
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.links import measure_links
from yunlu.training.communication.method_selector import (
    measure_adding,
    measure_codecs,
    measure_low_rank,
)
from yunlu.training.communication.transport import LinkLostError, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "topk", "randomk")


def together(hosts: list[str], run: Callable[[Transport], Any]) -> list[Any]:
    """Run the same on a wire of each worker, as threads."""
    transports = make_wires(hosts)

    def work(rank: int) -> Any:
        try:
            return run(transports[rank])
        finally:
            transports[rank].close()

    return in_threads(work, len(hosts))


LAYOUTS = {
    "alone": ["127.0.0.1"],
    "two": ["127.0.0.1", "127.0.0.2"],
    "one host": ["127.0.0.1"] * 3,
    "three hosts": ["127.0.0.1", "127.0.0.2", "127.0.0.3"],
    "crowded": ["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2", "127.0.0.2"],
}


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_all_workers_get_the_same_sound_figures(hosts: list[str]) -> None:
    first, *others = together(hosts, lambda transport: measure_links(transport, budget_s=0.05))
    assert all(each == first for each in others)
    assert first.hosts == tuple(hosts)
    apart = ~np.eye(len(set(hosts)), dtype=bool)
    assert np.all(np.array(first.latency_s)[apart] < 5)
    assert np.all(np.array(first.bytes_per_s)[apart] > 1e5)
    assert 0.5 <= first.both_ways <= 1
    work = SharedWork(gradient_bytes=(4000,), compute_s=0.01, backward_s=0.005)
    assert choose(first, MethodQuery(work=work)).candidates


def test_the_slowest_worker_counts() -> None:
    def run(transport: Transport) -> Any:
        cost = CodecCost(
            name="int8",
            bytes_per_value=1,
            encode_s_per_value=1e-9 * (1 + transport.rank),
            decode_s_per_value=1e-9 * (3 - transport.rank),
        )
        return measure_links(
            transport,
            budget_s=0.02,
            compute_s=0.1 + transport.rank,
            codecs=[cost],
            add_bytes_per_s=1e9 * (1 + transport.rank),
        )

    figures, *_ = together(["127.0.0.1"] * 3, run)
    assert figures.compute_s == (0.1, 1.1, 2.1)
    assert figures.add_bytes_per_s == 1e9
    (codec,) = figures.codecs
    assert codec.encode_s_per_value == pytest.approx(3e-9)
    assert codec.decode_s_per_value == pytest.approx(3e-9)


def test_a_worker_without_a_step_leaves_compute_unknown() -> None:
    def run(transport: Transport) -> Any:
        return measure_links(transport, budget_s=0.02, compute_s=0.1 if transport.rank else None)

    assert together(["127.0.0.1"] * 2, run)[0].compute_s == ()


def test_the_sum_of_torch_is_tried_by_all_alike() -> None:
    def run(transport: Transport) -> Any:
        tried: list[int] = []
        figures = measure_links(transport, budget_s=0.02, all_reduce=tried.append)
        return figures.all_reduce, tried

    (first, tried), *others = together(["127.0.0.1"] * 3, run)
    assert first is not None
    assert first.bytes_per_s > 0
    assert all((told, sizes) == (first, tried) for told, sizes in others)


def test_a_lost_worker_ends_the_measurement() -> None:
    def run(transport: Transport) -> Any:
        if transport.rank == 1:
            return None
        with pytest.raises(LinkLostError):
            measure_links(transport, budget_s=0.05)
        transport.abort()
        return True

    assert together(["127.0.0.1", "127.0.0.2", "127.0.0.3"], run) == [True, None, True]


def test_costs_of_every_codec_are_told() -> None:
    told = measure_codecs(CODECS, make_codec)
    assert [each.name for each in told] == list(CODECS)
    sizes = {each.name: each.bytes_per_value for each in told}
    assert sizes["none"] == 4
    assert sizes["fp16"] == pytest.approx(2, rel=0.01)
    assert sizes["int4"] < sizes["int8"] < 1.1
    assert measure_adding() > 0
    assert measure_low_rank(2).bytes_per_value < measure_low_rank(8).bytes_per_value
