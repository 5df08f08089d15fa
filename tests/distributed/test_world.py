"""Groups and places of a layout, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.ranks import run_ranks, run_world
from tests.training_device import device_of
from yunlu.planning.layouts import Layout
from yunlu.training.parallel.world import World, form_world

pytestmark = pytest.mark.distributed


def _members(world: World) -> dict[str, list[int]]:
    axes = {"pp": ("pp",), "tp": ("tp",), "replicas": ("dp", "fsdp")}
    groups = {name: world.group(*names) for name, names in axes.items()}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group}


def test_neighbours_on_each_axis_are_those_of_the_layout() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    places = [layout.place_of(rank) for rank in range(layout.world)]
    found = run_world(_members, layout)
    for place, groups in zip(places, found, strict=True):
        assert groups["tp"] == [places.index(place._replace(tp=tp)) for tp in range(2)]
        assert groups["pp"] == [places.index(place._replace(pp=pp)) for pp in range(2)]
        assert groups["replicas"] == [places.index(place._replace(dp=dp)) for dp in range(2)]


def _sum(world: World) -> float:
    return world.sum_over_all(torch.tensor(float(world.rank + 1))).item()


def test_sums_run_over_everyone() -> None:
    assert run_world(_sum, Layout(fsdp=3)) == [6.0, 6.0, 6.0]


def _meet_twice(rank: int, stores: list[str]) -> list[float]:
    """The same places in two generations, whose groups have other names."""
    found: list[float] = []
    for number, store in enumerate(stores):
        layout = Layout(dp=2, tp=2)
        world = form_world(
            layout, rank, dist.FileStore(store, 4), secret=b"test", device=device_of(rank)
        )
        axis = world.axis("tp")
        assert axis is not None
        cut = DTensor.from_local(torch.full((2,), float(world.rank)), axis, [Shard(0)])
        found.append((cut * 2).sum().full_tensor().item())
        world.close()
        if number == 0:
            # As if this process had been in more groups than the others: names count up.
            dist.distributed_c10d._world.group_count += 3
    return found


def test_nothing_is_sent_through_the_groups_of_an_earlier_generation(tmp_path: Path) -> None:
    found = run_ranks(_meet_twice, 4, [str(tmp_path / "first"), str(tmp_path / "second")])
    # Twice two numbers of each of the two ranks that cut a tensor between them.
    assert found == [[4.0, 4.0], [4.0, 4.0], [20.0, 20.0], [20.0, 20.0]]
