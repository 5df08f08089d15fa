"""Sums over wires: right, and the same bits everywhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.communication.connected import close_all, in_threads, make_wires
from yunlu.core.framing import HEADER_BYTES
from yunlu.training.communication.allreduce import (
    ALGORITHMS,
    TreeNode,
    double_tree_nodes,
    group_ranks,
    heap_tree_node,
    segments,
    server_allreduce,
    split_evenly,
)
from yunlu.training.communication.transport import LinkLostError

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from yunlu.training.communication.transport import Transport

SIZES = (2, 3, 4, 5, 6)


@contextmanager
def _wires(*hosts: str) -> Generator[list[Transport]]:
    transports = make_wires(hosts)
    try:
        yield transports
    finally:
        close_all(transports)


def _inputs(size: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(length, generator=generator, dtype=dtype) * 10.0**rank for rank in range(size)
    ]


def _sum_everywhere(
    transports: list[Transport], method: str, given: list[Tensor], tag: int
) -> list[Tensor]:
    def work(rank: int) -> Tensor:
        flat = given[rank].clone()
        ALGORITHMS[method](transports[rank], flat, tag=tag)
        return flat

    return in_threads(work, len(transports))


@pytest.mark.parametrize("size", SIZES)
def test_every_way_gives_the_plain_sum_with_the_same_bits_on_all(size: int) -> None:
    # Three hosts: unequal numbers on them for most sizes, one each for three workers.
    with _wires(*(f"127.0.0.{1 + rank % 3}" for rank in range(size))) as transports:
        for tag, length in enumerate((0, 1, size - 1, size, 1001, 100_003)):
            given = _inputs(size, length)
            plain = torch.stack(given).double().sum(0)
            slack = torch.stack(given).double().abs().sum(0) * 1e-6
            for method in ALGORITHMS:
                first, *others = _sum_everywhere(transports, method, given, tag)
                assert all(torch.equal(first, other) for other in others), (method, length)
                assert ((first.double() - plain).abs() <= slack).all(), (method, length)


@pytest.mark.parametrize(
    "hosts", [(1, 1, 1), (1, 2, 3), (1, 2, 2, 2), (1, 2, 1, 2), (2, 1, 1, 3, 1)]
)
def test_machines_with_any_number_of_workers_add_up(hosts: tuple[int, ...]) -> None:
    with _wires(*(f"127.0.0.{host}" for host in hosts)) as transports:
        given = _inputs(len(hosts), 5000)
        found = _sum_everywhere(transports, "hierarchical", given, 0)
        exact = torch.stack(given).double().sum(0)
        assert all(torch.equal(found[0], each) for each in found)
        assert torch.allclose(found[0].double(), exact, rtol=1e-5, atol=1e-2)
        between = {
            transport.rank: transport.traffic.sent_bytes
            for transport in transports
            if transport.rank not in {ranks[0] for ranks in group_ranks(transport.hosts)}
        }
        if len(set(hosts)) > 1:  # who does not lead sends its share to its leader, and that is all
            pieces = len(segments(slice(0, 5000), 4))
            assert set(between.values()) <= {5000 * 4 + pieces * HEADER_BYTES}


def test_a_sum_does_not_depend_on_who_is_faster() -> None:
    # With such values every order of adding gives other bits.
    given = [torch.tensor([1e8, 1.0, -1e8]) * scale for scale in (1.0, 1.1, -1.0, 3e-8, -1.1)]
    in_order = given[0].clone()
    for each in given[1:]:
        in_order += each
    with _wires(*["127.0.0.1"] * 5) as transports:
        before = {method: _sum_everywhere(transports, method, given, 0)[0] for method in ALGORITHMS}
        for tag in range(1, 20):
            for method in ALGORITHMS:
                assert torch.equal(
                    _sum_everywhere(transports, method, given, tag)[0], before[method]
                ), method
    assert torch.equal(before["direct"], in_order)
    assert torch.equal(before["server"], in_order)


@pytest.mark.parametrize("method", ["ring", "direct"])
def test_the_fewest_bytes_travel(method: str) -> None:
    with _wires(*["127.0.0.1"] * 4) as transports:
        _sum_everywhere(transports, method, _inputs(4, 40_000), 0)
        for transport in transports:
            body = transport.traffic.sent_bytes - transport.traffic.messages * HEADER_BYTES
            assert body == 2 * 3 * 40_000 * 4 // 4


def test_several_servers_share_the_work() -> None:
    given = _inputs(4, 999)

    def work(rank: int) -> Tensor:
        flat = given[rank].clone()
        server_allreduce(transports[rank], flat, tag=3, servers=2)
        return flat

    with _wires(*["127.0.0.1"] * 4) as transports:
        found = in_threads(work, 4)
        assert all(torch.equal(found[0], each) for each in found)
        sent = [transport.traffic.sent_bytes for transport in transports]
        assert sent[0] == pytest.approx(sent[1], rel=0.01)
        assert sent[0] > 1.9 * sent[2]


def test_doubles_add_up_as_doubles() -> None:
    given = _inputs(3, 301, torch.float64)
    with _wires(*["127.0.0.1"] * 3) as transports:
        for tag, method in enumerate(ALGORITHMS):
            found = _sum_everywhere(transports, method, given, tag)[0]
            assert torch.allclose(found, torch.stack(given).sum(0), rtol=1e-12, atol=1e-12)


@given(
    length=st.integers(0, 3_000_000), parts=st.integers(1, 9), item_bytes=st.sampled_from([4, 8])
)
@settings(max_examples=60, deadline=None)
def test_parts_and_segments_cover_everything_once(length: int, parts: int, item_bytes: int) -> None:
    end = 0
    for part in split_evenly(length, parts):
        assert part.start == end
        assert length // parts <= part.stop - part.start <= length // parts + 1
        for piece in segments(part, item_bytes):
            assert piece.start == end
            assert piece.stop > piece.start
            end = piece.stop
        assert end == part.stop
    assert end == length


@given(size=st.integers(2, 70))
@settings(max_examples=69, deadline=None)
def test_trees_reach_everyone_and_leaves_of_one_twin_are_inside_the_other(size: int) -> None:
    heap = [heap_tree_node(rank, size) for rank in range(size)]
    first, second = zip(*(double_tree_nodes(rank, size) for rank in range(size)), strict=True)
    for tree in (heap, first, second):
        _check_tree(tree)
    for one, other in zip(first, second, strict=True):
        if size > 2 and not (one.parent is None or other.parent is None):
            assert bool(one.children) != bool(other.children)


def _check_tree(places: list[TreeNode] | tuple[TreeNode, ...]) -> None:
    reached = [rank for rank, place in enumerate(places) if place.parent is None]
    assert len(reached) == 1
    depth = 0
    level = list(reached)
    while level := [child for rank in level for child in places[rank].children]:
        reached += level
        depth += 1
    assert sorted(reached) == list(range(len(places)))
    assert depth <= len(places).bit_length()
    for rank, place in enumerate(places):
        assert len(place.children) <= 2
        assert all(places[child].parent == rank for child in place.children)


def test_an_error_on_one_worker_ends_the_sum_on_all() -> None:
    with _wires(*["127.0.0.1"] * 4) as transports:

        def work(rank: int) -> str:
            if rank == 3:
                transports[3].abort()
                return "gone"
            try:
                ALGORITHMS[method](transports[rank], torch.ones(1000), tag=0)
            except LinkLostError:
                return "told"
            return "not told"

        method = "ring"
        assert in_threads(work, 4) == ["told", "told", "told", "gone"]
