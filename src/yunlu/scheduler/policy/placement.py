"""From numbers of devices to machines: who is unchanged stays, the rest is packed around them.

Whole machines first, then the largest first into the fullest machine that takes them, so that
free devices stay together. Where the free ones are in pieces, the smallest neighbours make room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import NOTHING, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.hardware.fleet import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """So many devices for a job."""

    id: str
    devices: int
    held: Placement = NOTHING
    stays: bool = False
    """Has as many as it wants: best left where it is."""
    is_pinned: bool = False
    """Must be left where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJobs:
    """Where everybody is."""

    placements: dict[str, Placement]
    moved: frozenset[str]
    """Jobs that made room: as many devices as before, elsewhere."""
    unplaced: frozenset[str]
    """Jobs for whom the pool has not enough devices, or only on machines that are leaving."""


def place(nodes: Sequence[Node], wants: Iterable[PlacementRequest]) -> PlacedJobs:
    """Find machines for all; devices are never promised twice."""
    floor = _NodeSpace(nodes)
    first = sorted(wants, key=lambda want: not want.is_pinned)
    out = [want for want in first if not (_may_stay(want) and floor.keep(want))]
    unplaced: set[str] = set()
    moved: set[str] = set()
    # The largest first; of equals in the order given, those who made room last.
    waiting = [(-want.devices, number, want) for number, want in enumerate(out)]
    heapify(waiting)
    number = len(waiting)
    while waiting:
        want = heappop(waiting)[2]
        evicted = floor.find_room(want)
        if evicted is None:
            unplaced.add(want.id)
            continue
        for one in evicted:
            number += 1
            moved.add(one.id)
            heappush(waiting, (-one.devices, number, one))
    staying = {want.id for want in out if want.stays}
    back = {one for one in moved if floor.is_home(one)}
    return PlacedJobs(
        placements=floor.placements,
        moved=frozenset((moved - back) | (staying - unplaced)),
        unplaced=frozenset(unplaced),
    )


def _may_stay(want: PlacementRequest) -> bool:
    return want.stays or want.is_pinned


class _NodeSpace:
    """The machines while places are given out."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.size = {node.name: node.devices for node in nodes}
        self.rank = {node.name: number for number, node in enumerate(nodes)}
        self.domain = {node.name: node.domain for node in nodes}
        self.leaving = {node.name for node in nodes if node.is_leaving}
        self.free = dict(self.size)
        self.most = max((node.devices for node in nodes if not node.is_leaving), default=0)
        self.by_free: dict[int, dict[str, None]] = {}
        for node in nodes:
            if not node.is_leaving:
                self.by_free.setdefault(node.devices, {})[node.name] = None
        self.room = sum(node.devices for node in nodes if not node.is_leaving)
        self.tenants: dict[str, dict[str, PlacementRequest]] = {}
        self.placements: dict[str, Placement] = {}
        self.homes: dict[str, Placement] = {}

    def keep(self, want: PlacementRequest) -> bool:
        """Leave a job where it is, if its machines are still there and stay."""
        for name, count in want.held.shares:
            is_gone = name in self.leaving and not want.is_pinned
            if is_gone or count > self.free.get(name, 0):
                return False
        self._assign(want, want.held)
        return True

    def is_home(self, job: str) -> bool:
        """Whether a job that had to move found its old place again."""
        return self.homes.get(job) == self.placements.get(job)

    def find_room(self, want: PlacementRequest) -> list[PlacementRequest] | None:
        """Settle a job; those who had to leave for it, or None if it cannot be done."""
        if self.room < want.devices:
            return None
        if want.devices <= self.most:
            name = self._best_fit(want.devices, want.held)
            if name is not None:
                self._assign(want, Placement(((name, want.devices),)))
                return []
            evicted = self._clear_part(want.devices)
            if evicted is not None:
                return [*evicted, *(self.find_room(want) or ())]
            self._assign(want, self._spread(want.devices))
            return []
        evicted = self._clear_whole(want.devices // self.most)
        self._assign(want, self._span(want))
        return evicted

    def _best_fit(self, devices: int, held: Placement = NOTHING) -> str | None:
        """The fullest machine that still takes so many; the job's own among equals."""
        for free in sorted(self.by_free):
            names = self.by_free[free]
            if free < devices or not names:
                continue
            own = [name for name, _ in held.shares if name in names]
            return own[0] if own else next(iter(names))
        return None

    def _span(self, want: PlacementRequest) -> Placement:
        """Whole machines, near each other; the rest on the fullest that takes it."""
        left = want.devices
        shares: dict[str, int] = {}
        own = {name for name, _ in want.held.shares}
        for name in self._near(left, own):
            if left < self.free[name]:
                break
            shares[name] = self.free[name]
            left -= self.free[name]
        if left:
            rest = [(free, name) for free in sorted(self.by_free) for name in self.by_free[free]]
            fits = [name for free, name in rest if free >= left and name not in shares]
            lone = [name for name in fits if not self._has_wide(name)]
            if fits:
                shares[(lone or fits)[0]] = left
            else:
                return self._spread(want.devices)
        return self._order(shares)

    def _near(self, devices: int, own: set[str]) -> list[str]:
        """Empty machines: those of one network that has just enough first, the largest first."""
        empty = [
            name
            for free, names in self.by_free.items()
            for name in names
            if free and free == self.size[name]
        ]
        room: Counter[str] = Counter()
        for name in empty:
            room[self.domain[name]] += self.size[name]
        return sorted(
            empty,
            key=lambda name: (
                room[self.domain[name]] < devices,
                room[self.domain[name]],
                self.domain[name],
                -self.size[name],
                name not in own,
                self.rank[name],
            ),
        )

    def _spread(self, devices: int) -> Placement:
        shares: dict[str, int] = {}
        for free in sorted(self.by_free, reverse=True):
            for name in self.by_free[free]:
                taken = min(free, devices)
                if taken:
                    shares[name] = taken
                    devices -= taken
        return self._order(shares)

    def _clear_part(self, devices: int) -> list[PlacementRequest] | None:
        """Make room on the machine where the fewest devices have to move, if they fit elsewhere."""
        best: tuple[int, int, str] | None = None
        for free, names in self.by_free.items():
            for name in names:
                leaving = self._leavers(name, devices - free, devices)
                if leaving is None or self.size[name] < devices:
                    continue
                cost = sum(want.devices for want in leaving)
                best = min(best or (cost, self.rank[name], name), (cost, self.rank[name], name))
        if best is None:
            return None
        gone = self._leavers(best[2], devices - self.free[best[2]], devices) or []
        for want in gone:
            self._evict(want)
        return gone

    def _leavers(self, name: str, needed: int, below: int) -> list[PlacementRequest] | None:
        """The smallest jobs that live on this machine alone and give back as many as needed."""
        matches: list[PlacementRequest] = []
        for want in sorted(self.tenants.get(name, {}).values(), key=lambda want: want.devices):
            if needed <= 0:
                break
            is_movable = not want.is_pinned and want.stays and want.devices < below
            if is_movable and self.placements[want.id].nodes == 1:
                matches.append(want)
                needed -= want.devices
        return matches if needed <= 0 else None

    def _clear_whole(self, count: int) -> list[PlacementRequest]:
        """Empty the least used machines until there are enough whole ones."""
        whole = [name for name, free in self.free.items() if free == self.most]
        missing = count - len([name for name in whole if name not in self.leaving])
        gone: list[PlacementRequest] = []
        if missing <= 0:
            return gone
        choices: list[tuple[int, int, str]] = []
        for free, names in self.by_free.items():
            for name in names:
                used = self.size[name] - free
                if self.size[name] == self.most and used > 0:
                    leaving = self._leavers(name, used, self.most)
                    if leaving is not None:
                        choices.append((used, self.rank[name], name))
        for used, _, name in sorted(choices)[:missing]:
            for want in self._leavers(name, used, self.most) or ():
                self._evict(want)
                gone.append(want)
        return gone

    def _has_wide(self, name: str) -> bool:
        tenants = self.tenants.get(name, {})
        return any(self.placements[job].nodes > 1 for job in tenants)

    def _order(self, shares: dict[str, int]) -> Placement:
        return Placement(tuple(sorted(shares.items(), key=lambda item: self.rank[item[0]])))

    def _assign(self, want: PlacementRequest, placement: Placement) -> None:
        self.placements[want.id] = placement
        for name, count in placement.shares:
            self._set_free(name, self.free[name] - count)
            self.tenants.setdefault(name, {})[want.id] = want

    def _evict(self, want: PlacementRequest) -> None:
        placement = self.placements.pop(want.id)
        self.homes[want.id] = placement
        for name, count in placement.shares:
            self._set_free(name, self.free[name] + count)
            del self.tenants[name][want.id]

    def _set_free(self, name: str, free: int) -> None:
        if name not in self.leaving:
            del self.by_free[self.free[name]][name]
            self.by_free.setdefault(free, {})[name] = None
            self.room += free - self.free[name]
        self.free[name] = free
