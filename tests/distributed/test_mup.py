"""A model with a base width trains the same on any layout: its gains need nothing of the optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import parity
from tests.distributed.ranks import run_world
from yunlu.planning.layouts import Layout
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, Any] = {
    "cut in every way": Layout(tp=2, sequence=True, vocabulary=True),
    "sharded": Layout(fsdp=2),
    "in stages": Layout(pp=2, schedule="1f1b"),
}


def wide() -> CausalTransformer:
    return CausalTransformer(
        vocabulary=parity.VOCABULARY, max_length=16, width=32, layers=4, heads=4, mup_base=8
    )


def train(world: World) -> tuple[list[float], list[float]]:
    parity.MODELS["wide"] = wide
    return parity.train(world, "wide", {})


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    return train(World(layout=Layout(), rank=0, device=torch.device("cpu")))


@pytest.mark.parametrize(
    "name",
    ["cut in every way", *(pytest.param(n, marks=pytest.mark.long) for n in list(LAYOUTS)[1:])],
)
def test_a_model_with_a_base_trains_as_one_process_does(
    name: str, alone: tuple[list[float], list[float]]
) -> None:
    losses, norms = alone
    for rank_losses, rank_norms in run_world(train, LAYOUTS[name]):
        assert rank_losses == pytest.approx(losses, abs=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-3, abs=1e-5)
