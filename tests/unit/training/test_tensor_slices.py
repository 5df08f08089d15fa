"""Boxes of state: whatever the two layouts, every element is found exactly once."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.checkpoints import Memory, copy_optimizer, restore_optimizer
from yunlu.core.errors import CheckpointError
from yunlu.training.engine_state import fill_optimizer, optimizer_shards
from yunlu.training.optim.fused_adam import FusedAdam
from yunlu.training.parallel.redistribute import ShardMetadata, UncoveredError, plan_transfers
from yunlu.training.tensor_slices import (
    TensorShard,
    TensorSlice,
    fill,
    find_aliases,
    full_slice,
    missing_elements,
    shard_of,
    weights_of,
)

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    offset = tuple(draw(st.integers(0, length)) for length in shape)
    return TensorSlice(
        offset,
        tuple(draw(st.integers(0, length - at)) for length, at in zip(shape, offset, strict=True)),
    )


def cut(shape: tuple[int, ...], ways: tuple[int, ...]) -> list[TensorSlice]:
    """As torch cuts: chunks of equal size, the last ones smaller or empty."""
    ranges: list[list[tuple[int, int]]] = []
    for length, parts in zip(shape, ways, strict=True):
        chunk = -(-length // parts)
        starts = [min(chunk * part, length) for part in range(parts)]
        ranges.append([(start, min(chunk, length - start)) for start in starts])
    return [
        TensorSlice(tuple(at for at, _ in one), tuple(size for _, size in one))
        for one in product(*ranges)
    ]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[TensorSlice]:
    """A cut of the shape, with some replicas."""
    regions = cut(shape, tuple(draw(st.integers(1, 4)) for _ in shape))
    copies = draw(st.integers(1, 2))
    return draw(st.permutations([region for region in regions for _ in range(copies)]))


@given(st.data())
def test_intersection_and_difference_are_the_full_slice(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    count = torch.zeros(shape, dtype=torch.int64)
    count[one.intersect(other).within(full_slice(shape))] += 1
    for rest in one.subtract(other):
        count[rest.within(full_slice(shape))] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[one.within(full_slice(shape))] = 1
    assert torch.equal(count, expected)


@given(st.data())
def test_a_partition_covers_everything(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    regions = data.draw(layouts(shape))
    assert missing_elements(full_slice(shape), regions) == []
    held = [region for region in set(regions) if not region.is_empty]
    if held:
        assert missing_elements(full_slice(shape), held[1:]) == [held[0]]


@given(st.data())
def test_between_any_two_layouts_each_element_travels_once(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    before, after = data.draw(layouts(shape)), data.draw(layouts(shape))
    size = max(len(before), len(after))
    held = [[ShardMetadata("w", shape, region, torch.int64)] for region in before] + [[]] * (
        size - len(before)
    )
    wanted = [[ShardMetadata("w", shape, region, torch.int64)] for region in after] + [[]] * (
        size - len(after)
    )
    limit = data.draw(st.sampled_from([8, 64, 1 << 20]))
    counts = [
        torch.zeros(parts[0].region.size if parts else (), dtype=torch.int64) for parts in wanted
    ]
    for transfer in plan_transfers(held, wanted, limit_bytes=limit):
        source = held[transfer.source][transfer.stored].region
        target = wanted[transfer.destination][transfer.target].region
        assert missing_elements(transfer.region, [source]) == []
        assert missing_elements(transfer.region, [target]) == []
        assert transfer.nbytes <= limit
        counts[transfer.destination][transfer.region.within(target)] += 1
    for parts, count in zip(wanted, counts, strict=True):
        assert not parts or bool((count == 1).all())


def test_own_data_comes_first_and_holders_share_the_load() -> None:
    shape = (8, 8)
    held = [[ShardMetadata("w", shape, full_slice(shape), torch.float32)] for _ in range(3)] + [
        [],
        [],
        [],
    ]
    wanted = [[ShardMetadata("w", shape, full_slice(shape), torch.float32)] for _ in range(6)]
    sources = [transfer.source for transfer in plan_transfers(held, wanted, limit_bytes=1 << 20)]
    assert sources[:3] == [0, 1, 2]
    assert sorted(sources[3:]) == [0, 1, 2]


def test_what_nobody_holds_is_named() -> None:
    shape = (4,)
    held = [[ShardMetadata("a", shape, TensorSlice((0,), (3,)), torch.float32)]]
    wanted = [
        [
            ShardMetadata("a", shape, full_slice(shape), torch.float32),
            ShardMetadata("b", (), full_slice(()), torch.int8),
        ]
    ]
    with pytest.raises(UncoveredError) as caught:
        plan_transfers(held, wanted)
    assert caught.value.names == ("a", "b")


SHARDED = """
import sys
from itertools import product
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.checkpoints import Memory, copy_optimizer, restore_optimizer
from yunlu.core.errors import CheckpointError
from yunlu.training.tensor_slices import shard_of


def chunk(tensor, ways, number):
    parts = tensor.chunk(ways)
    return parts[number] if number < len(parts) else tensor[:0]


for rank in range(8):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    for length in range(1, 20):
        whole = torch.arange(length * 3).view(length, 3)
        local = chunk(chunk(whole, 2, rank % 2), 4, rank // 2)
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        spread = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        shard = shard_of("w", spread)
        (start, left), (rows, columns) = shard.region.offset, shard.region.size
        assert torch.equal(whole[start : start + rows, left : left + columns], local)
        assert shard.tensor.data_ptr() == local.data_ptr()
    partial = DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate()), run_check=False)
    try:
        shard_of("sum", partial)
        sys.exit("a sum was taken for a value")
    except CheckpointError:
        pass
    dist.destroy_process_group()
"""


def test_shards_of_shards_are_where_torch_put_them() -> None:
    """In a process of its own: torch's pretended process groups cannot be undone wholly."""
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_worker_alone_does_not_load_distributed_tensors() -> None:
    code = "import sys, yunlu.training.checkpoint.store; assert 'torch.distributed.tensor' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_tied_weights_stand_once_and_passing_buffers_not_at_all() -> None:
    model = Tied()
    shards = weights_of([model])
    assert "head.weight" not in shards
    assert "scratch" not in shards
    assert shards["norm.num_batches_tracked"].shape == ()
    assert find_aliases(model) == {"head.weight": "embed.weight"}


def test_a_tie_over_two_stages_has_one_name() -> None:
    model = Tied()
    last = nn.Module()
    last.head = nn.Linear(3, 5, bias=False)
    assert set(weights_of([last], aliases=find_aliases(model))) == {"embed.weight"}


def test_state_of_another_model_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    other["1.bias"] = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"1\.bias is \[3\] here, and the state has \[4\]"):
        fill(weights_of([model]).values(), Memory(other))
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "adam foreach": lambda weights: torch.optim.Adam(weights, lr=0.1, foreach=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "fused": lambda weights: FusedAdam(
        [{"params": list(weights), "weight_decay": 0.1}],
        lr=0.1, betas=(0.8, 0.9), eps=1e-8, decoupled=True,
    ),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.1),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=0.1),
}  # fmt: skip


def train(model: nn.Module, optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_is_restored_from_its_shards(name: str) -> None:
    torch.manual_seed(1)
    model, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](copy.parameters())
    train(model, optimizer, 3, seed=2)
    train(copy, fresh, 1, seed=9)  # what it remembers already must not matter
    fill(weights_of([copy]).values(), Memory(dict(model.state_dict())))
    restore_optimizer(copy, fresh, *copy_optimizer(model, optimizer))
    train(model, optimizer, 3, seed=5)
    train(copy, fresh, 3, seed=5)
    assert torch.equal(model.weight, copy.weight)
    assert torch.equal(model.bias, copy.bias)


def test_state_that_cannot_be_sharded_is_refused() -> None:
    leaf = torch.zeros(4, 4)
    optimizer = torch.optim.SGD([leaf], lr=0.1)
    optimizer.state[leaf]["absmax1"] = torch.zeros(7)
    shard = {id(leaf): TensorShard("w", (8, 4), TensorSlice((4, 0), (4, 4)), leaf)}
    with pytest.raises(CheckpointError, match="cannot be sharded"):
        optimizer_shards(optimizer, shard)
    of_one = {id(leaf): shard_of("w", leaf)}
    assert optimizer_shards(optimizer, of_one)[0]["w/absmax1"].shape == (7,)


def test_plain_numbers_of_an_optimiser_come_back_as_what_they_were() -> None:
    leaf = torch.zeros(4)
    optimizer = torch.optim.SGD([leaf], lr=0.1)
    optimizer.state[leaf] |= {"step": 7, "scale": 0.1, "is_warm": True, "nothing": None}
    names = {id(leaf): shard_of("w", leaf)}
    shards, packed = optimizer_shards(optimizer, names)
    fresh = torch.optim.SGD([leaf], lr=0.3)
    fill_optimizer(fresh, names, Memory({key: one.tensor for key, one in shards.items()}), packed)
    assert fresh.state[leaf] == {"step": 7, "scale": 0.1, "is_warm": True}
    assert [type(value) for value in fresh.state[leaf].values()] == [int, float, bool]
    assert fresh.param_groups[0]["lr"] == 0.1
