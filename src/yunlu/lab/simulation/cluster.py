"""Nodes of a simulated pool, and the devices that each job holds on them."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field, ValidationError

from yunlu.core.value import Value
from yunlu.hardware.fleet import Node
from yunlu.lab.simulation.profiles import SimulationError
from yunlu.scheduler.policy.placement import PlacementRequest, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.hardware.fleet import Placement
    from yunlu.lab.simulation.simulator import SimulationResult
    from yunlu.scheduler.policy.shapes import ShapeTable
    from yunlu.scheduler.policy.values import Demand

_GROUP = re.compile(r"(?P<count>\d+)x(?P<devices>\d+)(?::(?P<type>[\w.-]+))?")
_HINT = "write NODESxDEVICES, as in 16x4 or 6x4:t4+2x8:a100, or name a YAML file with nodes"
_MOST_NODES = 100_000


class NodeGroup(Value):
    """Identical nodes."""

    count: int = Field(gt=0)
    devices: int = Field(gt=0)
    """Devices per node."""
    type: str = "device"
    dollars_per_hour: float = Field(default=0.0, ge=0)
    """Price of one node."""
    domain: str = ""


class ClusterFile(Value):
    """A cluster as a YAML file: ``nodes`` is a list of groups."""

    nodes: list[NodeGroup] = Field(min_length=1)


def parse_cluster(text: str) -> tuple[Node, ...]:
    """Nodes of ``16x4``, ``6x4:t4+2x8:a100`` or a YAML file."""
    if text.endswith((".yaml", ".yml")):
        return build_cluster(_load(Path(text)).nodes)
    groups: list[NodeGroup] = []
    for part in text.split("+"):
        match = _GROUP.fullmatch(part.strip())
        if match is None or int(match["count"]) == 0 or int(match["devices"]) == 0:
            raise SimulationError(f"--cluster: {text!r} is not a cluster.", hint=_HINT)
        groups.append(
            NodeGroup(
                count=int(match["count"]),
                devices=int(match["devices"]),
                type=match["type"] or "device",
            )
        )
    return build_cluster(groups)


def build_cluster(groups: list[NodeGroup]) -> tuple[Node, ...]:
    """Named nodes, in order."""
    if sum(group.count for group in groups) > _MOST_NODES:
        raise SimulationError(
            f"--cluster: more than {_MOST_NODES:,} nodes cannot be simulated.", hint=_HINT
        )
    kinds = {group.type for group in groups}
    nodes: list[Node] = []
    for group in groups:
        prefix = group.type if len(kinds) > 1 else "node"
        for _ in range(group.count):
            nodes.append(
                Node(
                    name=f"{prefix}-{len(nodes)}",
                    devices=group.devices,
                    type=group.type,
                    domain=group.domain,
                    dollars_per_hour=group.dollars_per_hour,
                )
            )
    return tuple(nodes)


def _load(path: Path) -> ClusterFile:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SimulationError(f"--cluster: {path} cannot be read: {error}.", hint=_HINT) from error
    try:
        return ClusterFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        index = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SimulationError(f"--cluster: {path}: {index}: {first['msg']}.", hint=_HINT) from error


DeviceBlock = tuple[int, int, float, float]
"""Rows from and to (devices counted over all nodes), seconds from and to."""


def assign_device_rows(outcome: SimulationResult) -> list[list[DeviceBlock]]:
    """For each job, blocks of devices over time; no two jobs share a device."""
    rows = _DeviceRows(outcome)
    changes = sorted(
        (
            (at, job, placement)
            for job, item in enumerate(outcome.jobs)
            for at, placement in item.placements
        ),
        key=itemgetter(0),
    )
    for at, group in groupby(changes, key=itemgetter(0)):
        now = list(group)
        # Devices are released before any are taken.
        for _, job, _ in now:
            rows.release(job, at)
        for _, job, placement in now:
            rows.take(job, placement, at)
    return rows.blocks


class _DeviceRows:
    def __init__(self, outcome: SimulationResult) -> None:
        self.blocks: list[list[DeviceBlock]] = [[] for _ in outcome.jobs]
        self._start: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        row = 0
        for node in outcome.nodes:
            self._start[node.name] = row
            self._free[node.name] = list(range(node.devices))
            row += node.devices
        self._held: dict[int, list[tuple[str, list[int], float]]] = {}

    def release(self, job: int, at: float) -> None:
        for name, slots, since in self._held.pop(job, []):
            self._free[name] = sorted([*self._free[name], *slots])
            if at > since:
                start = self._start[name]
                self.blocks[job] += [
                    (start + low, start + high, since, at) for low, high in _join(slots)
                ]

    def take(self, job: int, placement: Placement, at: float) -> None:
        held = self._held.setdefault(job, [])
        for name, count in placement.shares:
            free = self._free[name]
            held.append((name, free[:count], at))
            self._free[name] = free[count:]


def _join(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbouring slots as one block: start and end."""
    blocks: list[tuple[int, int]] = []
    for slot in slots:
        if blocks and blocks[-1][1] == slot:
            blocks[-1] = (blocks[-1][0], slot + 1)
        else:
            blocks.append((slot, slot + 1))
    return blocks


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
