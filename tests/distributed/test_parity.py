"""Parity is the law: every layout trains as one process does."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.parity import STEPS, train
from tests.distributed.ranks import run_world
from yunlu.planning.layouts import Layout
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
def _alone(make: str, settings: str) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    world = World(layout=Layout(), rank=0, device=torch.device("cpu"))
    return train(world, make, json.loads(settings))


def alone(make: str, **settings: Any) -> tuple[list[float], list[float]]:
    """Of one process; the same for every layout."""
    return _alone(make, json.dumps(settings))


def check_parity(layout: Layout, make: str, **settings: Any) -> None:
    losses, norms = alone(make, **settings)
    assert len(losses) == STEPS
    for rank_losses, rank_norms in run_world(train, layout, make, settings):
        assert rank_losses == pytest.approx(losses, abs=1e-5)
        # The norm of all gradients, before clipping: they are those of one process.
        assert rank_norms == pytest.approx(norms, rel=1e-3, abs=1e-5)


FIRST = (
    "dp3", "dp2-zero1", "fsdp2", "hsdp2x2", "tp2-sp-vocabulary", "pp2-1f1b", "pp2-interleaved",
    "fsdp2xtp2", "pp2xdp2", "pp2xfsdp2xtp2",
)  # fmt: skip
"""Between them they have every part; ``make test-long`` tries the others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.long]) for n in LAYOUTS],
)
def test_every_layout_trains_as_one_process_does(name: str) -> None:
    check_parity(LAYOUTS[name], "tied")


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        ("uneven", Layout(pp=2)),  # three layers over two stages
        pytest.param("uneven", Layout(pp=2, fsdp=2), marks=pytest.mark.long),
        ("untied", Layout(tp=2, sequence=True, vocabulary=True)),
        pytest.param("detached", Layout(pp=2, fsdp=2), marks=pytest.mark.long),
        pytest.param("llama", Layout(tp=2), marks=pytest.mark.long),
        pytest.param("llama", Layout(pp=2), marks=pytest.mark.long),
        pytest.param("llama", Layout(fsdp=3), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_models_train_as_one_process_does(make: str, layout: Layout) -> None:
    check_parity(layout, make)


@pytest.mark.parametrize("dp", [2, 3])
def test_batch_norm_sees_the_samples_of_all_replicas(dp: int) -> None:
    # In one piece, since statistics are those of a micro-batch.
    check_parity(Layout(dp=dp), "normed", micro_batch=32)


def test_a_replica_without_samples_changes_nothing() -> None:
    # The last step of each epoch has 2 samples for 3 replicas.
    check_parity(Layout(dp=3), "normed", micro_batch=39, batch=39)
    check_parity(Layout(fsdp=3), "tied", batch=39)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(fsdp=2), Layout(pp=2)], ids=str)
def test_plain_optimisers_penalties_and_bounds_agree_too(layout: Layout) -> None:
    check_parity(
        layout,
        "tied",
        kernel="foreach",
        optimizer={"name": "momentum", "lr": 0.01},
        clip={"norm": 0.5, "value": 0.02},
        l1=1e-4,
    )
