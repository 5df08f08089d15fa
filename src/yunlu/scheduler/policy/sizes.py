"""The numbers of devices that are worth considering in a pool, and on how many nodes each lies.

Within a node powers of two, beyond it whole nodes (as Sia, SOSP 2023): whatever is chosen can be
placed without splitting small jobs. What a job asks for by name is added for that job alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.goodput import ShapeList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import Demand

_ALL_WHOLE = 16
"""Up to so many nodes every number of them is considered; beyond, steps of an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Columns of all tables of one decision."""

    shapes: ShapeList
    devices: NDArray[np.int64]
    is_common: NDArray[np.bool_]
    """Whether any job may take it; others are for those who asked for just that."""
    node_sizes: tuple[int, ...]
    """Of the nodes that stay, the largest first."""

    @property
    def capacity(self) -> int:
        """Devices in all."""
        return sum(self.node_sizes)

    def nodes_for(self, devices: int) -> int:
        """On how few nodes so many devices lie at least."""
        return _count_nodes(self.node_sizes, devices)


def find_sizes(nodes: Sequence[Node], jobs: Sequence[Demand]) -> Sizes:
    """The columns for a pool and the jobs in it."""
    node_sizes = tuple(sorted((n.devices for n in nodes if not n.is_leaving), reverse=True))
    common = _common(node_sizes)
    asked: set[int] = set()
    for job in jobs:
        asked.update((job.min_devices, job.max_devices, job.held.devices))
        if job.multiple > 1:
            asked.update(_stretch(job.multiple, size) for size in common)
    most = min(sum(node_sizes), max((job.max_devices for job in jobs), default=0))
    devices = sorted(size for size in common | asked if 0 < size <= most) or [1]
    counts = tuple(_count_nodes(node_sizes, size) for size in devices)
    return Sizes(
        shapes=ShapeList(counts, tuple(devices)),
        devices=np.array(devices, dtype=np.int64),
        is_common=np.array([size in common for size in devices], dtype=bool),
        node_sizes=node_sizes,
    )


def may_take(sizes: Sizes, jobs: Sequence[Demand]) -> NDArray[np.bool_]:
    """Which job (row) may have which size (column)."""
    lowest = np.array([job.min_devices for job in jobs])[:, None]
    highest = np.array([job.max_devices for job in jobs])[:, None]
    multiple = np.array([job.multiple for job in jobs])[:, None]
    held = np.array([job.held.devices for job in jobs])[:, None]
    devices = sizes.devices[None, :]
    within = (devices >= lowest) & (devices <= highest) & (devices % multiple == 0)
    named = (devices == lowest) | (devices == highest) | (devices == held) | (multiple > 1)
    return within & (sizes.is_common[None, :] | named)


@lru_cache(maxsize=64)
def _common(node_sizes: tuple[int, ...]) -> frozenset[int]:
    if not node_sizes:
        return frozenset()
    most = node_sizes[0]
    found = {1 << power for power in range(most.bit_length()) if 1 << power <= most}
    whole, taken = 0, 0
    for number, size in enumerate(node_sizes, start=1):
        whole += size
        if number <= _ALL_WHOLE or number >= taken + max(taken // 8, 1):
            found.add(whole)
            taken = number
    return frozenset(found)


def _stretch(multiple: int, size: int) -> int:
    """The largest multiple within a size."""
    return size // multiple * multiple


def _count_nodes(node_sizes: tuple[int, ...], devices: int) -> int:
    for number, size in enumerate(node_sizes, start=1):
        devices -= size
        if devices <= 0:
            return number
    return max(len(node_sizes), 1)
