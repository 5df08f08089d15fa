"""The shapes that a job can take on a pool of several kinds of nodes.

As in Sia (SOSP'23, section 3.2): a part of one node, halved again and again, or whole nodes. Such
shapes can always be packed: large before small, nothing is left that is too scattered to be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from yunlu.hardware.fleet import Node, Placement
    from yunlu.scheduler.policy.values import Demand

    Ints = NDArray[np.int64]

_EVERY_COUNT_TO = 16
"""Nodes: beyond these, counts grow by an eighth; who needs 97 is as well served with 96."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Nodes that are alike: one type and as many devices each."""

    type: str
    node_devices: int
    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        """How many there are in all."""
        return self.node_devices * len(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTable:
    """Every shape on every kind, as columns."""

    kinds: tuple[DeviceGroup, ...]
    kind: Ints
    nodes: Ints
    devices: Ints

    def __len__(self) -> int:
        """How many."""
        return len(self.kind)

    def find(self, placement: Placement, kind_of: dict[str, int]) -> int | None:
        """The column of what a job holds; None where it is none of ours."""
        if not placement:
            return None
        kinds = {kind_of.get(node) for node, _ in placement.shares}
        if len(kinds) != 1 or (kind := kinds.pop()) is None:
            return None
        counts = sorted((count for _, count in placement.shares), reverse=True)
        full = self.kinds[kind].node_devices
        if any(count != full for count in counts[:-1]):
            return None
        same = (self.kind == kind) & (self.devices == placement.devices)
        at = np.flatnonzero(same & (self.nodes == placement.nodes))
        return int(at[0]) if len(at) else None


def group_nodes(nodes: Iterable[Node]) -> tuple[DeviceGroup, ...]:
    """The kinds of a pool's nodes, those that stay, in a fixed order."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        if node.devices > 0 and not node.is_leaving:
            groups.setdefault((node.type, node.devices), []).append(node)
    return tuple(
        DeviceGroup(type=type_, node_devices=devices, nodes=tuple(groups[type_, devices]))
        for type_, devices in sorted(groups)
    )


def lay_out_groups(kinds: Sequence[DeviceGroup], extra: Iterable[int] = ()) -> ShapeTable:
    """Every shape on every kind; ``extra`` are sizes that jobs of fixed size insist on."""
    columns: list[tuple[int, int, int]] = []
    wanted = set(extra)
    for at, kind in enumerate(kinds):
        sizes = {1 << power for power in range((kind.node_devices - 1).bit_length())}
        sizes |= {kind.node_devices * count for count in _node_counts(len(kind.nodes))}
        sizes |= {size for size in wanted if size <= kind.devices}
        columns += [(at, -(-size // kind.node_devices), size) for size in sorted(sizes)]
    table = np.array(columns, dtype=np.int64).reshape(-1, 3)
    return ShapeTable(kinds=tuple(kinds), kind=table[:, 0], nodes=table[:, 1], devices=table[:, 2])


def allow_shapes(jobs: Sequence[Demand], shapes: ShapeTable) -> NDArray[np.bool_]:
    """Which shapes each job's own limits permit, jobs x shapes."""
    least = np.array([max(job.min_devices, 1) for job in jobs])[:, None]
    most = np.array([job.max_devices for job in jobs])[:, None]
    multiple = np.array([job.multiple for job in jobs])[:, None]
    held = np.array([job.held.devices for job in jobs])[:, None]
    devices = shapes.devices
    allowed = (devices >= least) & (devices <= most) & (devices % multiple == 0)
    # An odd size is there for those that insist on it; it would spoil the packing for others.
    node_devices = np.array([kind.node_devices for kind in shapes.kinds], dtype=np.int64)
    is_even = (devices & (devices - 1) == 0) | (devices % node_devices[shapes.kind] == 0)
    allowed &= is_even | (devices == least) | (devices == held) | (multiple > 1)
    on_types: dict[frozenset[str], NDArray[np.bool_]] = {}
    for row, job in enumerate(jobs):
        if job.types is None:
            continue
        if job.types not in on_types:
            names = [kind.type in job.types for kind in shapes.kinds]
            on_types[job.types] = np.array(names, dtype=bool)[shapes.kind]
        allowed[row] &= on_types[job.types]
    return allowed


def _node_counts(most: int) -> list[int]:
    """Numbers of whole nodes worth trying."""
    counts: list[int] = []
    count = 1
    while count < most:
        counts.append(count)
        count += 1 if count < _EVERY_COUNT_TO else max(count // 8, 1)
    return [*counts, most] if most else []
