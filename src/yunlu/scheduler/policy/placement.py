"""Bin packing of jobs onto nodes: unchanged jobs stay, and equal nodes are relabelled so that few move.

Whole nodes first, then the largest job first into the fullest node that takes it (best fit
decreasing), so that free devices stay together. Where free devices are fragmented, the smallest
neighbours are moved.

Relabel equal nodes of a decision so that few runs have to move. Pure.
A policy decides how many devices of which node each job gets, but equal nodes are interchangeable:
exchanging them costs nothing, and a run that keeps the node of its coordinator is resized without a stop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import NOTHING, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Devices that a job is to be placed on."""

    id: str
    devices: int
    held: Placement = NOTHING
    stays: bool = False
    """Holds as many as it is to get: left where it is, if possible."""
    is_pinned: bool = False
    """Must stay where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJobs:
    """Placements of all jobs."""

    placements: dict[str, Placement]
    moved: frozenset[str]
    """Jobs that made room: as many devices as before, on other nodes."""
    unplaced: frozenset[str]
    """Jobs for which the pool has too few devices on nodes that stay."""


def place(nodes: Sequence[Node], wants: Iterable[PlacementRequest]) -> PlacedJobs:
    """Place all jobs; no device is given twice."""
    floor = _NodeSpace(nodes)
    first = sorted(wants, key=lambda want: not want.is_pinned)
    out = [want for want in first if not (_may_stay(want) and floor.keep(want))]
    unplaced: set[str] = set()
    moved: set[str] = set()
    # The largest first; of equals in the order given, jobs that made room last.
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
    """Free devices of all nodes while jobs are placed."""

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
        """Leave a job where it is, if its nodes are present and do not leave."""
        for name, count in want.held.shares:
            is_gone = name in self.leaving and not want.is_pinned
            if is_gone or count > self.free.get(name, 0):
                return False
        self._assign(want, want.held)
        return True

    def is_home(self, job: str) -> bool:
        """Whether a job that was evicted was placed where it was before."""
        return self.homes.get(job) == self.placements.get(job)

    def find_room(self, want: PlacementRequest) -> list[PlacementRequest] | None:
        """Place a job; the jobs that were evicted for it, or None if it does not fit."""
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
        """The fullest node that still takes so many; one the job holds among equals."""
        for free in sorted(self.by_free):
            names = self.by_free[free]
            if free < devices or not names:
                continue
            own = [name for name, _ in held.shares if name in names]
            return own[0] if own else next(iter(names))
        return None

    def _span(self, want: PlacementRequest) -> Placement:
        """Whole nodes, near each other; the rest on the fullest node that takes it."""
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
        """Empty nodes: those of the smallest network domain that suffices first, the largest first."""
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
        """Make room on the node where the fewest devices have to move."""
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
        """The smallest jobs on this node alone that free as many devices as needed."""
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
        """Empty the least used nodes until there are enough whole ones."""
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


_LEAD = 1000
"""Weight of keeping the coordinator's node: more than any number of other devices."""


def minimise_moves(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], nodes: Sequence[Node]
) -> dict[str, Placement]:
    """Exchange equal nodes so that as many devices as possible stay with their jobs.

    Args:
        placements: The decision.
        jobs: What they hold; the first node of each is that of its coordinator.
        nodes: All nodes.
    """
    fixed = {name for job in jobs if job.is_pinned for name, _ in job.held.shares}
    roles: dict[str, str] = {}
    for alike in _group(nodes, fixed):
        roles |= _match(alike, _weigh(placements, jobs, {*alike}))
    return {
        job: Placement(tuple((roles.get(name, name), count) for name, count in placed.shares))
        for job, placed in placements.items()
    }


def _group(nodes: Sequence[Node], fixed: set[str]) -> Iterator[list[str]]:
    """Names of nodes that differ in nothing but their names."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for node in nodes:
        if node.name not in fixed:
            kind = (node.type, node.devices, node.domain, node.dollars_per_hour)
            groups[*kind, node.is_spot, node.is_leaving].append(node.name)
    yield from (names for names in groups.values() if len(names) > 1)


def _weigh(
    placements: Mapping[str, Placement], jobs: Sequence[Demand], alike: set[str]
) -> dict[tuple[str, str], int]:
    """By decided node and actual node: devices that would stay if one replaced the other."""
    worth: defaultdict[tuple[str, str], int] = defaultdict(int)
    for job in jobs:
        placed = placements.get(job.id)
        if placed is None:
            continue
        for index, (name, has) in enumerate(job.held.shares):
            if name not in alike:
                continue
            for role, gets in placed.shares:
                if role in alike:
                    worth[role, name] += min(has, gets) + _LEAD * (index == 0 and gets >= has)
    return worth


def _match(alike: Sequence[str], worth: Mapping[tuple[str, str], int]) -> dict[str, str]:
    """An actual node for each decided node: best pairs first; the others keep their own, if possible."""
    roles: dict[str, str] = {}
    taken: set[str] = set()
    pairs = sorted(worth.items(), key=lambda one: (-one[1], one[0][0] != one[0][1], one[0]))
    own = [((name, name), 0) for name in alike]
    for (role, name), _ in (*pairs, *own):
        if role not in roles and name not in taken:
            roles[role] = name
            taken.add(name)
    left = [name for name in alike if name not in taken]
    roles |= dict(zip((role for role in alike if role not in roles), left, strict=True))
    # The best pairs are not always the best matching: never worse than the decision itself.
    gained = sum(worth.get(pair, 0) for pair in roles.items())
    return roles if gained > sum(worth.get((name, name), 0) for name in alike) else {}
