"""Shapes a job can hold: a number of devices of one group of nodes, on as few nodes as possible.

As in Sia (SOSP'23, section 3.2): powers of two within a node, whole nodes beyond it. Such shapes can
always be packed without splitting small jobs. A size that a job names (its minimum, what it holds) is
added for that job alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.hardware.fleet import Node, Placement
    from yunlu.scheduler.policy.values import Demand

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

_ALL_NODE_COUNTS = 16
"""Up to this many nodes every number of nodes is a shape; beyond it, numbers grow by an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Nodes whose devices are interchangeable: the allocator gives each group a capacity."""

    type: str
    nodes: tuple[Node, ...]
    """Nodes that jobs are placed on."""
    node_sizes: tuple[int, ...]
    """Devices of each node that does not leave, the largest first."""

    @property
    def devices(self) -> int:
        """Devices that jobs can be given."""
        return sum(self.node_sizes)

    @property
    def node_devices(self) -> int:
        """Devices of the largest node."""
        return self.node_sizes[0]

    @property
    def dollars_per_device_hour(self) -> float:
        """Price of the most expensive node."""
        prices = [node.dollars_per_hour / node.devices for node in self.nodes if node.devices]
        return max(prices, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTable:
    """All shapes of a pool: the columns of every table of one decision."""

    groups: tuple[DeviceGroup, ...]
    group: Ints
    """Index of the group of each shape."""
    nodes: Ints
    devices: Ints
    is_common: Bools
    """Whether any job may take it; other shapes are for jobs that name just that size."""
    is_max_named: bool = False
    """Whether a job's maximum is a size it names."""
    group_by_node: Mapping[str, int] | None = field(default=None, repr=False)
    """Group of each node; None where all nodes are of one group, including nodes that are gone."""

    def __len__(self) -> int:
        """Number of shapes."""
        return len(self.devices)

    def find_group(self, node: str) -> int | None:
        """Group of a node; None if the node is gone or leaves."""
        return 0 if self.group_by_node is None else self.group_by_node.get(node)

    def find_held(self, jobs: Sequence[Demand]) -> Ints:
        """Column of what each job holds; -1 if it holds nothing, or no shape of this table."""
        columns = {
            (group, devices): column
            for column, (group, devices) in enumerate(
                zip(self.group.tolist(), self.devices.tolist(), strict=True)
            )
        }
        held = np.full(len(jobs), -1)
        for row, job in enumerate(jobs):
            groups = {self.find_group(name) for name, _ in job.held.shares}
            if len(groups) == 1 and (group := groups.pop()) is not None:
                held[row] = columns.get((group, job.held.devices), -1)
        return held

    def find_packed(self, placement: Placement) -> int | None:
        """Column of a placement that lies as a shape of this table does; None if it does not."""
        if not placement:
            return None
        groups = {self.find_group(name) for name, _ in placement.shares}
        if len(groups) != 1 or (group := groups.pop()) is None:
            return None
        counts = sorted((count for _, count in placement.shares), reverse=True)
        if any(count != self.groups[group].node_devices for count in counts[:-1]):
            return None
        is_same = (self.group == group) & (self.devices == placement.devices)
        columns = np.flatnonzero(is_same & (self.nodes == placement.nodes))
        return int(columns[0]) if len(columns) else None


def lay_out_pool(nodes: Sequence[Node], jobs: Sequence[Demand]) -> ShapeTable:
    """Shapes of a pool with one device type: all nodes are one group, whatever their sizes."""
    node_sizes = tuple(sorted((n.devices for n in nodes if not n.is_leaving), reverse=True))
    common = _common_sizes(node_sizes)
    named: set[int] = set()
    for job in jobs:
        named.update((job.min_devices, job.max_devices, job.held.devices))
        if job.multiple > 1:
            named.update(size // job.multiple * job.multiple for size in common)
    largest = min(sum(node_sizes), max((job.max_devices for job in jobs), default=0))
    devices = sorted(size for size in common | named if 0 < size <= largest) or [1]
    group = DeviceGroup(
        type=nodes[0].type if nodes else "", nodes=tuple(nodes), node_sizes=node_sizes
    )
    return ShapeTable(
        groups=(group,),
        group=np.zeros(len(devices), dtype=np.int64),
        nodes=np.array([count_nodes(node_sizes, size) for size in devices], dtype=np.int64),
        devices=np.array(devices, dtype=np.int64),
        is_common=np.array([size in common for size in devices], dtype=bool),
        is_max_named=True,
    )


def group_nodes(nodes: Iterable[Node]) -> tuple[DeviceGroup, ...]:
    """Nodes that do not leave, grouped by device type and devices per node, in a fixed order."""
    groups: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        if node.devices > 0 and not node.is_leaving:
            groups.setdefault((node.type, node.devices), []).append(node)
    return tuple(
        DeviceGroup(
            type=type_,
            nodes=tuple(groups[type_, devices]),
            node_sizes=(devices,) * len(groups[type_, devices]),
        )
        for type_, devices in sorted(groups)
    )


def lay_out_groups(groups: Sequence[DeviceGroup], named: Iterable[int] = ()) -> ShapeTable:
    """Shapes of groups of equal nodes; ``named`` are sizes that some job insists on."""
    columns: list[tuple[int, int, int]] = []
    named_sizes = set(named)
    for index, group in enumerate(groups):
        full = group.node_devices
        sizes = {1 << power for power in range((full - 1).bit_length())}
        sizes |= {full * count for count in _node_counts(len(group.nodes))}
        sizes |= {size for size in named_sizes if size <= group.devices}
        columns += [(index, -(-size // full), size) for size in sorted(sizes)]
    table = np.array(columns, dtype=np.int64).reshape(-1, 3)
    node_devices = np.array([group.node_devices for group in groups], dtype=np.int64)
    group, devices = table[:, 0], table[:, 2]
    is_power = devices & (devices - 1) == 0
    return ShapeTable(
        groups=tuple(groups),
        group=group,
        nodes=table[:, 1],
        devices=devices,
        # Any other size would spoil the packing for the jobs that come after.
        is_common=is_power | (devices % node_devices[group] == 0),
        group_by_node={node.name: i for i, group in enumerate(groups) for node in group.nodes},
    )


def allow_shapes(jobs: Sequence[Demand], shapes: ShapeTable) -> Bools:
    """Which shapes each job's limits permit: jobs x shapes."""
    least = np.array([max(job.min_devices, 1) for job in jobs])[:, None]
    most = np.array([job.max_devices for job in jobs])[:, None]
    multiple = np.array([job.multiple for job in jobs])[:, None]
    held = np.array([job.held.devices for job in jobs])[:, None]
    devices = shapes.devices
    is_named = (devices == least) | (devices == held) | (multiple > 1)
    if shapes.is_max_named:
        is_named |= devices == most
    allowed = (devices >= least) & (devices <= most) & (devices % multiple == 0)
    allowed &= shapes.is_common | is_named
    of_types: dict[frozenset[str], Bools] = {}
    for row, job in enumerate(jobs):
        if job.types is None:
            continue
        if job.types not in of_types:
            is_usable = [group.type in job.types for group in shapes.groups]
            of_types[job.types] = np.array(is_usable, dtype=bool)[shapes.group]
        allowed[row] &= of_types[job.types]
    return allowed


def count_nodes(node_sizes: tuple[int, ...], devices: int) -> int:
    """Fewest nodes that hold so many devices; ``node_sizes`` has the largest first."""
    for count, size in enumerate(node_sizes, start=1):
        devices -= size
        if devices <= 0:
            return count
    return max(len(node_sizes), 1)


@lru_cache(maxsize=64)
def _common_sizes(node_sizes: tuple[int, ...]) -> frozenset[int]:
    """Powers of two within the largest node, and the largest nodes together."""
    if not node_sizes:
        return frozenset()
    largest = node_sizes[0]
    sizes = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    total, last_count = 0, 0
    for count, size in enumerate(node_sizes, start=1):
        total += size
        if count <= _ALL_NODE_COUNTS or count >= last_count + max(last_count // 8, 1):
            sizes.add(total)
            last_count = count
    return frozenset(sizes)


def _node_counts(nodes: int) -> list[int]:
    """Numbers of whole nodes that are shapes."""
    counts: list[int] = []
    count = 1
    while count < nodes:
        counts.append(count)
        count += 1 if count < _ALL_NODE_COUNTS else max(count // 8, 1)
    return [*counts, nodes] if nodes else []
