"""State between live workers: any layout to any other, in messages of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_world
from yunlu.planning.layouts import Layout
from yunlu.training.parallel import redistribute as exchanges
from yunlu.training.parallel.redistribute import (
    UncoveredError,
    broadcast_json,
    gather_json,
    gather_specs,
    redistribute,
)
from yunlu.training.tensor_slices import TensorShard, TensorSlice, full_slice

if TYPE_CHECKING:
    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed

WHOLE = {
    "w": torch.arange(7 * 10, dtype=torch.float32).view(7, 10),
    "half": torch.arange(33).to(torch.bfloat16),
    "flags": torch.arange(9) % 2 == 0,
    "count": torch.tensor(11),
    "empty": torch.zeros(0, 3),
}


def rows(rank: int, size: int) -> list[TensorShard]:
    shards: list[TensorShard] = []
    for name, tensor in WHOLE.items():
        shape = tuple(tensor.shape)
        if not shape:
            shards.append(TensorShard(name, shape, full_slice(shape), tensor.clone()))
            continue
        chunk = -(-shape[0] // size)
        start = min(chunk * rank, shape[0])
        part = tensor[start : start + chunk].clone()
        region = TensorSlice((start, *(0,) * (len(shape) - 1)), tuple(part.shape))
        shards.append(TensorShard(name, shape, region, part))
    return shards


def columns(rank: int, size: int) -> list[TensorShard]:
    shards: list[TensorShard] = []
    for shard in rows(0, 1):
        if shard.name != "w":
            shards.append(shard)
            continue
        part = shard.tensor.tensor_split(size, dim=1)[rank].clone()
        start = sum(one.shape[1] for one in shard.tensor.tensor_split(size, dim=1)[:rank])
        shards.append(TensorShard("w", (7, 10), TensorSlice((0, start), tuple(part.shape)), part))
    return shards


def emptied(shards: list[TensorShard]) -> list[TensorShard]:
    return [
        TensorShard(one.name, one.shape, one.region, torch.full_like(one.tensor, 1))
        for one in shards
    ]


def _reshard(world: World, chunk_bytes: int) -> None:
    exchanges.CHUNK_BYTES = exchanges._SMALLEST_BYTES = chunk_bytes
    rank, size = world.rank, 3
    specs = gather_specs(rows(rank, size))
    assert specs["w"].shape == (7, 10)
    for held, good in (
        (rows(rank, size), columns(rank, size)),
        (columns(rank, size), rows(rank, size)),
        # The last one is new here; the others have everything.
        (rows(0, 1) if rank < 2 else [], rows(0, 1)),
        # Two go on, in halves; what the third had has to go to them.
        (rows(rank, size), rows(rank, 2) if rank < 2 else []),
    ):
        wanted = emptied(good)
        redistribute(held, wanted)
        for shard, expected in zip(wanted, good, strict=True):
            assert torch.equal(shard.tensor, expected.tensor), shard.name


@pytest.mark.parametrize("chunk_bytes", [16, 64 << 20])
def test_state_moves_between_layouts(chunk_bytes: int) -> None:
    run_world(_reshard, Layout(fsdp=3), chunk_bytes)


def _special(world: World) -> Any:
    told = gather_json({"rank": world.rank, "text": "é" * world.rank})
    assert [one["rank"] for one in told] == [0, 1, 2]
    assert broadcast_json({"from": world.rank}, source=2) == {"from": 2}
    # Types may differ: the receiver's counts.
    wanted = [TensorShard("w", (2,), full_slice((2,)), torch.zeros(2, dtype=torch.float64))]
    redistribute(
        [TensorShard("w", (2,), full_slice((2,)), torch.tensor([1.5, 2.5], dtype=torch.bfloat16))]
        if world.rank == 1
        else [],
        wanted,
    )
    assert wanted[0].tensor.tolist() == [1.5, 2.5]
    # Into a view of something larger.
    large = torch.zeros(4, 4)
    redistribute(
        [TensorShard("v", (4,), full_slice((4,)), torch.ones(4))] if world.rank == 0 else [],
        [TensorShard("v", (4,), full_slice((4,)), large[:, 1])],
    )
    assert large.sum(0).tolist() == [0, 4, 0, 0]
    # Within some of the workers only.
    pair = dist.new_group([0, 2])
    if world.rank != 1:
        wanted = [TensorShard("w", (2,), full_slice((2,)), torch.zeros(2))]
        held = [TensorShard("w", (2,), full_slice((2,)), torch.ones(2))] if world.rank == 2 else []
        redistribute(held, wanted, group=pair)
        assert wanted[0].tensor.tolist() == [1, 1]
        assert broadcast_json(world.rank, source=1, group=pair) == 2
    return _uncovered(world)


def _uncovered(world: World) -> tuple[str, ...]:
    half = TensorShard("w", (4,), TensorSlice((0,), (2,)), torch.ones(2))
    wanted = TensorShard("w", (4,), full_slice((4,)), torch.zeros(4))
    try:
        redistribute([half], [wanted] if world.rank == 0 else [])
    except UncoveredError as error:
        assert wanted.tensor.tolist() == [0] * 4, "nothing was touched"
        return error.names
    return ()


def test_the_odd_cases_and_what_nobody_holds_is_known_to_all() -> None:
    assert run_world(_special, Layout(dp=3)) == [("w",)] * 3
