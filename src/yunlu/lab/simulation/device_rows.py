"""Individual devices of each job: a placement says only how many on which node."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.hardware.fleet import Placement
    from yunlu.lab.simulation.result import SimulationResult

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
