"""Nodes of a simulated pool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from yunlu.core.value import Value
from yunlu.hardware.fleet import Node
from yunlu.lab.simulation.tables import SimulationError

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
