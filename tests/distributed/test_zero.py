"""The optimiser's state shared out among replicas: the same weights, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.ranks import run_world
from tests.distributed.shared_steps import accumulate, adam, build, furthest, summation_of
from yunlu.planning.layouts import Layout
from yunlu.training.parallel.gradient_allreduce import GradientAllReduce
from yunlu.training.parallel.zero import OwnedWeights, choose_owners

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed


def _train(world: World, kind: str, *, is_shared: bool) -> tuple[nn.Module, int]:
    model = build(kind).to(world.device)
    weights = list(model.parameters())
    gradients = GradientAllReduce(weights, summation_of(world))
    shares = OwnedWeights(weights, world.group("dp"))
    optimizer = adam(shares.owned if is_shared else weights)
    for step in range(20):
        for weight in weights:
            weight.grad = None
        accumulate(
            model,
            kind,
            step,
            micros=2,
            replica=world.replica,
            replicas=world.layout.replicas,
            before=lambda last: gradients.arm() if last else None,
        )
        gradients.finish()
        optimizer.step()
        if is_shared:
            shares.publish()
    gradients.close()
    return model, len(optimizer.state)


def _compare(world: World, kind: str) -> tuple[float, int, int]:
    plain, whole = _train(world, kind, is_shared=False)
    shared, part = _train(world, kind, is_shared=True)
    return furthest(list(shared.parameters()), list(plain.parameters())), part, whole


@pytest.mark.parametrize(("kind", "replicas"), [("transformer", 3), ("branching", 2)])
def test_shared_state_gives_the_same_weights(kind: str, replicas: int) -> None:
    found = run_world(_compare, Layout(dp=replicas), kind)
    assert [distance for distance, _, _ in found] == [0.0] * replicas
    assert sum(part for _, part, _ in found) == found[0][2]


def _publish(world: World) -> bool:
    """Weights of all sizes, types and layouts in memory."""
    weights = [
        torch.full((300, 300), float(world.rank)),
        torch.full((3,), float(world.rank), dtype=torch.bfloat16),
        torch.full((500, 400), float(world.rank)).t(),
        torch.full((2, 2), float(world.rank)),
        torch.full((), float(world.rank)),
    ]
    weights = [weight.to(world.device) for weight in weights]
    shares = OwnedWeights(weights, world.group("dp"))
    shares.publish()
    return all(
        bool((weight == owner).all()) for weight, owner in zip(weights, shares.owners, strict=True)
    )


def test_everyone_gets_what_the_owner_has() -> None:
    assert run_world(_publish, Layout(dp=3)) == [True] * 3


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_no_replica_has_more_than_its_share_and_one_weight(sizes: list[int], replicas: int) -> None:
    owners = choose_owners(sizes, replicas)
    loads = [0] * replicas
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / replicas + max(sizes, default=0)
