"""Parity is the law: every layout trains as one process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.parity import STEPS, train
from tests.distributed.ranks import run_world
from yunlu.planning.layout import Layout
from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, Layout] = {
    "dp2": Layout(dp=2),
    "dp3": Layout(dp=3),
    "dp4": Layout(dp=4),
    "dp2-zero1": Layout(dp=2, zero1=True),
    "fsdp2": Layout(fsdp=2),
    "fsdp3": Layout(fsdp=3),
    "hsdp2x2": Layout(dp=2, fsdp=2),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "tp2-sp": Layout(tp=2, sequence=True),
    "tp2-sp-vocabulary": Layout(tp=2, sequence=True, vocabulary=True),
    "pp2-gpipe": Layout(pp=2, schedule="gpipe"),
    "pp2-1f1b": Layout(pp=2, schedule="1f1b"),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", stages_per_rank=2),
    "pp4": Layout(pp=4),
    "dp2xtp2": Layout(dp=2, tp=2),
    "fsdp2xtp2": Layout(fsdp=2, tp=2),
    "pp2xdp2": Layout(pp=2, dp=2),
    "pp2xfsdp2": Layout(pp=2, fsdp=2),
    "pp2xtp2": Layout(pp=2, tp=2),
    "pp2xfsdp2xtp2": Layout(pp=2, fsdp=2, tp=2),
}


@cache
def alone(make: str, **settings: Any) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    world = World(layout=Layout(), rank=0, device=torch.device("cpu"))
    return train(world, make, **settings)


def agree(layout: Layout, make: str) -> None:
    losses, norms = alone(make)
    assert len(losses) == STEPS
    found = run_world(train, layout, make)
    for rank_losses, rank_norms in found:
        assert rank_losses == pytest.approx(losses, abs=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process_does(name: str) -> None:
    agree(LAYOUTS[name], "tied")
