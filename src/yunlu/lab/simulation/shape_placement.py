"""Places shapes onto the nodes of their group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.placement import PlacementRequest, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.hardware.fleet import Placement
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand


def place_shapes(
    jobs: Sequence[Demand], picks: Sequence[int | None], shapes: ShapeTable
) -> dict[str, Placement]:
    """Placement of each job with a shape. The shapes fit their groups by number."""
    placements: dict[str, Placement] = {}
    for index, group in enumerate(shapes.groups):
        own = {node.name for node in group.nodes}
        wants: list[PlacementRequest] = []
        for job, pick in zip(jobs, picks, strict=True):
            if pick is None or shapes.group[pick] != index:
                continue
            devices, nodes = int(shapes.devices[pick]), int(shapes.nodes[pick])
            is_same = job.held.devices == devices and job.held.nodes == nodes
            is_here = all(name in own for name, _ in job.held.shares)
            wants.append(
                PlacementRequest(
                    id=job.id,
                    devices=devices,
                    held=job.held,
                    stays=is_same and is_here,
                    is_pinned=job.is_pinned and is_same and is_here,
                )
            )
        placements.update(place(group.nodes, wants).placements)
    return placements
