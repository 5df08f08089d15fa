"""Gradients of replicas, added up: equal to one process's on the whole batch."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import run_ranks, run_world
from tests.distributed.shared_steps import (
    accumulate,
    adam,
    alone,
    build,
    copies,
    furthest,
    summation_of,
)
from tests.training_device import device_of
from yunlu.planning.layouts import Layout
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.world import form_world

if TYPE_CHECKING:
    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed


def _train(
    world: World, kind: str, steps: int, micros: int, bucket_bytes: int
) -> tuple[list[float], float, float]:
    model = build(kind).to(world.device)
    optimizer = adam(list(model.parameters()))
    gradients = GradientAllReduce(
        list(model.parameters()), summation_of(world), bucket_bytes=bucket_bytes
    )
    losses: list[float] = []
    first: list[torch.Tensor | None] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = accumulate(
            model,
            kind,
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
    expected, grads, _ = alone(kind, steps=steps, micros=micros)
    drift = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return losses, drift, furthest(first, grads)


@pytest.mark.parametrize(
    ("kind", "replicas", "micros", "bucket_bytes"),
    [
        ("transformer", 2, 2, 25 << 20),
        ("transformer", 3, 3, 2000),
        ("mlp", 4, 1, 200),
        ("branching", 3, 2, 300),
        ("branching", 3, 1, 1),
    ],
)
def test_many_replicas_learn_as_one_process(
    kind: str, replicas: int, micros: int, bucket_bytes: int
) -> None:
    # Eight samples for three replicas, some without a sample in a micro-batch; in "branching" one
    # weight is never used and one by a single replica in every second step.
    found = run_world(_train, Layout(dp=replicas), kind, 20, micros, bucket_bytes)
    assert len({tuple(losses) for losses, _, _ in found}) == 1
    for _, drift, distance in found:
        assert drift < 1e-5
        assert distance < 1e-6


def _sum_once(world: World) -> list[list[float] | None]:
    """Rank 0 runs two backward passes, rank 1 none at all."""
    weights = [nn.Parameter(torch.ones(2, device=world.device)) for _ in range(3)]
    gradients = GradientAllReduce(weights, summation_of(world), bucket_bytes=1)
    if world.rank == 0:
        (2 * weights[0]).sum().backward()
        gradients.arm()
        (3 * weights[0] + weights[2]).sum().backward()
    gradients.finish()
    found = [None if weight.grad is None else weight.grad.tolist() for weight in weights]
    gradients.close()
    (5 * weights[0]).sum().backward()
    assert weights[0].grad is not None
    found.append(weights[0].grad.tolist())
    return found


def test_a_replica_without_backward_passes_takes_part() -> None:
    expected = [[5.0, 5.0], None, [1.0, 1.0], [10.0, 10.0]]
    assert run_world(_sum_once, Layout(dp=2)) == [expected, expected]


def _break_and_go_on(rank: int, directory: str) -> tuple[bool, list[float]]:
    """Rank 1 leaves in the middle of a step that rank 0 is waiting in, and both are told to."""
    weights = [nn.Parameter(torch.ones(2, device=device_of(rank))) for _ in range(4)]
    world = _meet(rank, f"{directory}/first")
    world.sum_over_all(torch.ones(1))  # both have formed it: only then is there something to break
    told = Path(directory, "cut")
    gradients = _sum_of(weights, world)
    gradients.arm()
    has_failed = False
    if rank == 0:
        Thread(target=_cut_when_told, args=[world, told], daemon=True).start()
    try:
        if rank == 0:
            torch.stack([*weights]).sum().backward()
            gradients.finish()
            # As the engine does next: an aborted collective of a device is no error of the host.
            world.sum_over_all(torch.ones(1))
        else:
            weights[3].sum().backward()  # the first bucket is on its way, the others never come
            world.disconnect()
            told.touch()
    except RuntimeError:
        has_failed = True
    gradients.close()
    world.close()
    for weight in weights:
        weight.grad = None
    world = _meet(rank, f"{directory}/second")
    gradients = _sum_of(weights, world)
    gradients.arm()
    torch.stack([*weights]).sum().backward()
    gradients.finish()
    world.close()
    return has_failed, [weight.grad.sum().item() for weight in weights if weight.grad is not None]


def _cut_when_told(world: World, told: Path) -> None:
    while not told.exists():
        time.sleep(0.01)
    world.disconnect()


def _sum_of(weights: list[nn.Parameter], world: World) -> GradientAllReduce:
    return GradientAllReduce(weights, summation_of(world), bucket_bytes=1)


def _meet(rank: int, path: str) -> World:
    store = dist.FileStore(path, 2)
    return form_world(Layout(dp=2), rank, store, secret=b"test", device=device_of(rank))


def test_after_a_lost_member_the_same_weights_go_on_with_another_group(tmp_path: Path) -> None:
    waiting, leaving = run_ranks(_break_and_go_on, 2, str(tmp_path))
    assert waiting == (True, [4.0] * 4)
    assert leaving[1] == [4.0] * 4


def _twice(world: World) -> str:
    weight, other = (nn.Parameter(torch.ones(2, device=world.device)) for _ in range(2))
    gradients = GradientAllReduce([weight, other], summation_of(world))
    gradients.arm()
    weight.sum().backward()
    try:
        weight.sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        gradients.finish()
    return "nothing said"


def test_a_backward_pass_after_the_last_is_refused() -> None:
    assert all("arm()" in said for said in run_world(_twice, Layout(dp=2)))


def _split_weights(world: World) -> float:
    """A matrix split over two workers, and a scale that both hold, on two replicas."""
    mesh = world.axis("tp")
    assert mesh is not None
    torch.manual_seed(0)
    matrix, scale, values = torch.randn(6, 5), torch.randn(5), torch.randn(8, 5)
    weights = [
        nn.Parameter(distribute_tensor(matrix.clone(), mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(scale.clone(), mesh, [Replicate()])),
    ]
    gradients = GradientAllReduce(weights, summation_of(world))
    shares = values.tensor_split([3])[world.replica].split(2)
    for number, share in enumerate(shares):
        if number == len(shares) - 1:
            gradients.arm()
        inputs = distribute_tensor(share, mesh, [Replicate()])
        ((inputs * weights[1]) @ weights[0].t()).square().sum().backward()
    gradients.finish()
    matrix.requires_grad_()
    scale.requires_grad_()
    ((values * scale) @ matrix.t()).square().sum().backward()
    found: list[torch.Tensor] = []
    for weight in weights:
        assert isinstance(weight.grad, DTensor)
        assert isinstance(weight.data, DTensor)
        assert weight.grad.placements == weight.data.placements
        found.append(weight.grad.full_tensor())
    largest = max(grad.abs().max().item() for grad in found)
    return furthest(found, [matrix.grad, scale.grad]) / largest


def test_gradients_of_split_weights_are_added_over_replicas() -> None:
    assert max(run_world(_split_weights, Layout(dp=2, tp=2))) < 1e-6


def _layouts(world: World) -> bool:
    """Gradients lie in memory as their weights do, which fused optimisers rely on."""
    weight = nn.Parameter(
        torch.randn(4, 3, 2, 2).to(world.device, memory_format=torch.channels_last)
    )
    half = nn.Parameter(torch.randn(3, dtype=torch.bfloat16, device=world.device))
    gradients = GradientAllReduce([half, weight], summation_of(world))
    gradients.arm()
    (weight.sum() + half.float().sum()).backward()
    gradients.finish()
    assert weight.grad is not None
    assert half.grad is not None
    return weight.grad.stride() == weight.stride() and half.grad.dtype == torch.bfloat16


def test_layouts_and_types_of_weights_are_kept() -> None:
    assert run_world(_layouts, Layout(dp=2)) == [True, True]
