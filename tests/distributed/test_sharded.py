"""Sharded weights: the steps of one process, whatever the number of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.ranks import run_world
from tests.distributed.shared_steps import accumulate, adam, alone, build, furthest
from yunlu.planning.layouts import Layout
from yunlu.training.device import move_model
from yunlu.training.models.transformer import CausalTransformer, Seq2SeqTransformer
from yunlu.training.parallel.fsdp import (
    UsedWeights,
    find_blocks,
    set_sync,
    shard,
    why_not_shard,
)

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed


def _train(world: World, kind: str, micros: int, freezes: bool) -> tuple[float, float]:
    model, single = build(kind).to(world.device), build(kind)
    _freeze(single, freezes=freezes)
    expected, grads, _ = alone(kind, steps=20, micros=micros, model=single)
    if world.layout.tp > 1:
        _split(model, world)
    mesh = world.axis("dp", "fsdp")
    assert mesh is not None
    assert why_not_shard(model, world.layout.fsdp) is None
    _freeze(model, freezes=freezes)
    shard(model, mesh, blocks=find_blocks(model))
    used = UsedWeights(model, world.group("dp", "fsdp"))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    leaves = [_local(weight).requires_grad_() for weight in weights]
    optimizer = adam(leaves)
    losses: list[float] = []
    first: list[Tensor | None] = []
    for step in range(20):
        model.zero_grad(set_to_none=True)
        loss = accumulate(
            model,
            kind,
            step,
            micros=micros,
            replica=world.replica,
            replicas=world.layout.replicas,
            before=lambda last: set_sync(model, last=last),
        )
        used.clear_unused()
        first = first or [_whole(weight.grad) for weight in model.parameters()]
        total = world.sum_over_all(torch.tensor(loss, dtype=torch.float64)).item()
        losses.append(total / world.layout.tp)
        for leaf, weight in zip(leaves, weights, strict=True):
            leaf.grad = None if weight.grad is None else _local(weight.grad)
        optimizer.step()
    drift = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return drift, furthest(first, grads)


def _freeze(model: nn.Module, *, freezes: bool) -> None:
    """As with adapters: frozen and trained weights side by side in every block."""
    for number, weight in enumerate(model.parameters()):
        weight.requires_grad_(not freezes or number % 3 == 0)


def _split(model: nn.Module, world: World) -> None:
    assert isinstance(model, CausalTransformer)
    mesh = world.axis("tp")
    assert mesh is not None
    plan: dict[str, Any] = {
        f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")
    }
    plan |= {"attention.out": RowwiseParallel(), "feed.up": ColwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan | {"feed.down": RowwiseParallel()})


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("kind", "layout", "micros", "freezes"),
    [
        ("transformer", Layout(fsdp=3), 3, False),
        ("transformer", Layout(fsdp=3), 2, True),
        ("branching", Layout(fsdp=3), 2, False),
        ("mlp", Layout(fsdp=4), 2, False),
    ],
    ids=str,
)
def test_shards_learn_as_one_process(kind: str, layout: Layout, micros: int, freezes: bool) -> None:
    for drift, distance in run_world(_train, layout, kind, micros, freezes):
        assert drift < 1e-5
        assert distance < 1e-6


def test_blocks_are_the_repeated_layers() -> None:
    model = build("transformer")
    assert isinstance(model, CausalTransformer)
    assert find_blocks(model) == list(model.layers)
    assert find_blocks(nn.Linear(2, 2)) == []
    both = Seq2SeqTransformer(vocabulary=7, max_length=5, width=8, layers=2, heads=2)
    assert len(find_blocks(both)) == 4


def test_blocks_of_a_hugging_face_model_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    assert find_blocks(model) == list(model.transformer.h)


def _tied(world: World) -> float:
    """Two blocks that share a weight: it must stay one weight."""
    torch.manual_seed(0)
    single = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for one in (single, model):
        one[2].weight = one[0].weight
    model.load_state_dict(single.state_dict())
    move_model(model, world.device)
    mesh = world.axis("fsdp")
    assert mesh is not None
    shard(model, mesh, blocks=find_blocks(model))
    values = torch.randn(4, 4)
    single(values).square().sum().backward()
    model(values[2 * world.rank : 2 * world.rank + 2].to(world.device)).square().sum().backward()
    assert model[2].weight is model[0].weight
    assert single[0].weight.grad is not None
    found, expected = _whole(model[0].weight.grad), single[0].weight.grad
    return furthest([found], [expected]) / expected.abs().max().item()


def test_a_weight_shared_by_blocks_stays_shared() -> None:
    assert max(run_world(_tied, Layout(fsdp=2))) < 1e-6


def test_what_cannot_be_sharded_is_said_in_words() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    assert "scale" in str(why_not_shard(model, 2))
    assert why_not_shard(model, 1) is None
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Conv1d(2, 2, 1).bfloat16()])
    assert "bfloat16" in str(why_not_shard(mixed, 2))
