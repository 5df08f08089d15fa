"""Batch normalisation over replicas: as one process on all their samples."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_world
from tests.distributed.shared_steps import (
    accumulate,
    adam,
    alone,
    build,
    copies,
    furthest,
    summation_of,
)
from yunlu.planning.layouts import Layout
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.sync_batch_norm import remove_sync, synchronise_batch_norm, uncounted

if TYPE_CHECKING:
    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed


def _train(world: World, micros: int) -> tuple[float, float, float]:
    model = build("cnn").to(world.device)
    optimizer = adam(list(model.parameters()))
    gradients = GradientAllReduce(list(model.parameters()), summation_of(world))
    synchronise_batch_norm(model, world.adding("dp"))
    losses: list[float] = []
    first: list[torch.Tensor | None] = []
    for step in range(20):
        optimizer.zero_grad()
        loss = accumulate(
            model,
            "cnn",
            step,
            micros=micros,
            replica=world.replica,
            replicas=world.layout.replicas,
            before=lambda last: gradients.arm() if last else None,
        )
        gradients.finish()
        first = first or copies([weight.grad for weight in model.parameters()])
        losses.append(world.sum_over_all(torch.tensor(loss, dtype=torch.float64)).item())
        optimizer.step()
    expected, grads, single = alone("cnn", steps=20, micros=micros)
    assert model.state_dict().keys() == single.state_dict().keys()
    drift = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    buffers = furthest(
        [buffer.cpu().double() for buffer in model.buffers()],
        [buffer.double() for buffer in single.buffers()],
    )
    return drift, furthest(first, grads), buffers


@pytest.mark.parametrize(("replicas", "micros"), [(2, 2), (3, 3)])
def test_replicas_train_a_cnn_as_one_process(replicas: int, micros: int) -> None:
    for drift, grads, buffers in run_world(_train, Layout(dp=replicas), micros):
        assert drift < 1e-5
        assert grads < 1e-6
        assert buffers < 1e-5


def _one_layer(world: World, kind: str, options: dict[str, Any], counts: list[int]) -> float:
    """Shares of ``counts`` samples, in double precision; zero is a batch that does not count."""
    shape = {"BatchNorm1d": (), "BatchNorm2d": (3, 2), "BatchNorm3d": (2, 1, 2)}[kind]
    torch.manual_seed(3)
    single = getattr(nn, kind)(4, **options).double()
    for tensor in (*single.parameters(), *single.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2)
    module = copy.deepcopy(single).to(world.device)
    allow_single_samples(single)
    allow_single_samples(module)
    synchronise_batch_norm(module, world.adding("dp"))
    values = torch.randn(2, sum(counts), 4, *shape, dtype=torch.float64) + 50
    slopes = torch.randn_like(values)
    start = sum(counts[: world.rank])
    mine = slice(start, start + counts[world.rank])
    worst = 0.0
    for number in range(2):  # twice: the second sees what the first left in the averages
        whole = values[number].clone().requires_grad_()
        (single(whole) * slopes[number]).sum().backward()
        assert whole.grad is not None
        if counts[world.rank]:
            share = values[number, mine].to(world.device, copy=True).requires_grad_()
            (module(share) * slopes[number, mine].to(world.device)).sum().backward()
            worst = max(worst, furthest([share.grad], [whole.grad[mine]]))
        else:
            share = torch.full((2, 4, *shape), 1e3, dtype=torch.float64, device=world.device)
            share.requires_grad_()
            with uncounted():
                (module(share) * 0).sum().backward()
    sums = [
        world.sum_over_all(weight.grad) for weight in module.parameters() if weight.grad is not None
    ]
    expected = [weight.grad for weight in single.parameters()]
    worst = max(worst, furthest(sums, expected))
    pairs = zip(module.buffers(), single.buffers(), strict=True)
    return max([worst, *((a.cpu() - b).abs().max().item() for a, b in pairs)])


@pytest.mark.parametrize(
    ("kind", "options", "counts"),
    [
        ("BatchNorm1d", {}, [5, 1, 2]),
        ("BatchNorm1d", {"momentum": None}, [1, 1]),
        ("BatchNorm2d", {"momentum": None}, [3, 0, 1]),
        ("BatchNorm2d", {"affine": False, "eps": 0.1}, [2, 1]),
        ("BatchNorm3d", {"track_running_stats": False}, [2, 3]),
        ("BatchNorm1d", {}, [1, 0]),
    ],
)
def test_a_layer_over_uneven_shares_is_exact(
    kind: str, options: dict[str, Any], counts: list[int]
) -> None:
    found = run_world(_one_layer, Layout(dp=len(counts)), kind, options, counts)
    assert max(found) < 1e-9


def _apart(world: World) -> bool:
    """Whatever does not train all together is torch's own."""
    torch.manual_seed(world.rank)
    module = nn.BatchNorm1d(3).to(world.device)
    values = torch.randn(4, 3, device=world.device)
    plain = copy.deepcopy(module)
    synchronise_batch_norm(module, world.adding("dp"))
    average = copy.deepcopy(module)
    is_same = torch.equal(average(values), plain(values))
    average.running_mean = torch.full((3,), 7.0, device=world.device)
    is_same &= not torch.equal(average.eval()(values), module.eval()(values))
    plain.reset_running_stats()
    is_same &= torch.equal(module(values), plain.eval()(values))
    remove_sync(module)
    is_same &= "forward" not in module.__dict__
    return is_same and torch.equal(module.train()(values), plain.train()(values))


def test_copies_evaluation_and_undone_modules_talk_to_nobody() -> None:
    assert run_world(_apart, Layout(dp=2)) == [True, True]


def _low_precision(world: World) -> float:
    torch.manual_seed(0)
    module = nn.BatchNorm2d(3).to(world.device)
    values = torch.randn(4, 3, 5, 5).bfloat16().to(world.device)
    expected = module(values)
    synchronise_batch_norm(module, world.adding("dp"))
    share = values[2 * world.rank : 2 * world.rank + 2].to(memory_format=torch.channels_last)
    found = module(share.requires_grad_())
    found.float().square().sum().backward()
    assert found.dtype == torch.bfloat16
    assert share.grad is not None
    return (found - expected[2 * world.rank : 2 * world.rank + 2]).abs().max().item()


def test_low_precision_values_keep_their_type() -> None:
    assert max(run_world(_low_precision, Layout(dp=2))) < 0.05
