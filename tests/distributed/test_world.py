"""Groups and places of a layout, on real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_world
from yunlu.planning.layout import Layout

if TYPE_CHECKING:
    from yunlu.training.parallel.world import World


def _members(world: World) -> dict[str, list[int]]:
    axes = {"pp": ("pp",), "tp": ("tp",), "replicas": ("dp", "fsdp")}
    groups = {name: world.group(*names) for name, names in axes.items()}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group}


def test_neighbours_on_each_axis_are_those_of_the_layout() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    found = run_world(_members, layout)
    for rank, groups in enumerate(found):
        place = layout.place_of(rank)
        assert groups["tp"] == [layout.rank_of(place._replace(tp=tp)) for tp in range(2)]
        assert groups["pp"] == [layout.rank_of(place._replace(pp=pp)) for pp in range(2)]
        assert groups["replicas"] == [layout.rank_of(place._replace(dp=dp)) for dp in range(2)]


def _sum(world: World) -> float:
    return world.sum_over_all(torch.tensor(float(world.rank + 1))).item()


def test_sums_run_over_everyone() -> None:
    assert run_world(_sum, Layout(fsdp=3)) == [6.0, 6.0, 6.0]
