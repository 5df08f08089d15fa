"""Placement for baseline policies: the emptiest node first; running jobs stay."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.scheduler.policy.values import Decision, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.policy.values import Demand, PoolState


class Free:
    """Devices that no job holds."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._left = {node.name: node.devices for node in nodes if not node.is_leaving}
        self._types = {node.name: node.type for node in nodes}

    def count(self, device_type: str) -> int:
        """How many of one type."""
        return sum(left for name, left in self._left.items() if self._types[name] == device_type)

    def can_keep(self, placement: Placement) -> bool:
        """Whether all its nodes are still there, stay, and have room for it."""
        return all(self._left.get(name, 0) >= count for name, count in placement.shares)

    def type_of(self, placement: Placement) -> str:
        """The type of devices it holds."""
        return self._types.get(placement.shares[0][0], "") if placement else ""

    def remove(self, placement: Placement) -> None:
        """Somebody holds it."""
        for name, count in placement.shares:
            if name in self._left:
                self._left[name] -= count

    def take(self, count: int, device_type: str) -> Placement | None:
        """So many devices, from the emptiest node on; of equals the first. None if too few."""
        if self.count(device_type) < count:
            return None
        left = {name: room for name, room in self._left.items() if self._types[name] == device_type}
        shares: list[tuple[str, int]] = []
        while count > 0:
            name = max(left, key=left.__getitem__)
            share = min(left[name], count)
            shares.append((name, share))
            left[name] -= share
            count -= share
        placement = Placement(tuple(shares))
        self.remove(placement)
        return placement


def device_types(state: PoolState) -> list[str]:
    """Types of devices in the pool, in the order of its nodes."""
    return list(dict.fromkeys(node.type for node in state.nodes if not node.is_leaving))


def usable_types(job: Demand, types: Sequence[str]) -> list[str]:
    """Those the job can run on."""
    return [kind for kind in types if job.types is None or kind in job.types]


def nodes_by_devices(state: PoolState, device_type: str) -> Sequence[int]:
    """On how many nodes 0, 1, 2, ... devices of a type fit, were they all free."""
    return _count_nodes(tuple(node.devices for node in state.nodes if node.type == device_type))


@lru_cache(maxsize=64)
def _count_nodes(sizes: tuple[int, ...]) -> Sequence[int]:
    counts = [0]
    for count, size in enumerate(sorted(sizes, reverse=True), start=1):
        counts += [count] * size
    return counts


def place_sizes(
    state: PoolState, sizes: Mapping[str, tuple[str, int]], order: Sequence[Demand]
) -> dict[str, Placement]:
    """Place jobs of given type and size; a job that holds just that keeps it, others follow in order."""
    free = Free(state.nodes)
    placements: dict[str, Placement] = {}
    for job in state.jobs:
        kind, size = sizes.get(job.id, ("", 0))
        is_same = bool(size) and job.held.devices == size and free.type_of(job.held) == kind
        if job.is_pinned and job.held:
            is_same = True
        if is_same and free.can_keep(job.held):
            placements[job.id] = job.held
            free.remove(job.held)
    for job in order:
        kind, size = sizes.get(job.id, ("", 0))
        if job.id in placements or not size:
            continue
        result = free.take(size, kind)
        if result is not None:
            placements[job.id] = result
    return placements


class SizeLedger:
    """Type and number of devices of each job, given one after the other."""

    def __init__(self, state: PoolState) -> None:
        free = Free(state.nodes)
        self._room = {kind: free.count(kind) for kind in device_types(state)}
        self._left = dict(self._room)
        self._type_of = free.type_of
        self.given: dict[str, tuple[str, int]] = {}

    def left(self, device_type: str) -> int:
        """Devices of a type that nobody was given yet."""
        return self._left[device_type]

    def fit(self, job: Demand) -> tuple[str, int] | None:
        """What it asks for, where it fits now: where it runs already, or on the first type."""
        held = self._type_of(job.held)
        count = job.held.devices if job.is_pinned and job.held else job.asked_devices
        kinds = usable_types(job, list(self._left))
        if held in kinds:
            kinds = [held, *(kind for kind in kinds if kind != held)]
        kind = next((kind for kind in kinds if self._left[kind] >= count), None)
        return None if kind is None else (kind, count)

    def give(self, job: Demand) -> bool:
        """Give it what it asks for; whether there was enough."""
        result = self.fit(job)
        if result is None:
            return False
        self.given[job.id] = result
        self._left[result[0]] -= result[1]
        return True

    def is_possible(self, job: Demand) -> bool:
        """Whether the empty pool could hold what it asks for."""
        kinds = usable_types(job, list(self._room))
        return any(self._room[kind] >= job.asked_devices for kind in kinds)


def serve(state: PoolState, order: Sequence[Demand]) -> Decision:
    """Give each job in turn what it asks for, if it fits; a running job that is served stays."""
    sizes = SizeLedger(state)
    for job in order:
        sizes.give(job)
    return explain(state, place_sizes(state, sizes.given, order))


def assign_types(state: PoolState) -> dict[str, list[Demand]]:
    """Jobs to types of devices: where they run, else where there are fewest jobs for devices."""
    types = device_types(state)
    free = Free(state.nodes)
    room = {kind: free.count(kind) for kind in types}
    assigned: dict[str, list[Demand]] = {kind: [] for kind in types}
    for job in state.jobs:
        kinds = usable_types(job, types)
        if not kinds:
            continue
        held = free.type_of(job.held)
        best = min(kinds, key=lambda kind: (len(assigned[kind]) + 1) / max(room[kind], 1))
        assigned[held if held in kinds else best].append(job)
    return assigned


def explain(state: PoolState, placements: Mapping[str, Placement]) -> Decision:
    """A decision with a reason for each job."""
    sizes = SizeLedger(state)
    reasons = {job.id: _reason(sizes, job, placements.get(job.id, NOTHING)) for job in state.jobs}
    return Decision(placements=placements, reasons=reasons)


def _reason(sizes: SizeLedger, job: Demand, given: Placement) -> Reason:
    if given:
        if given == job.held:
            return _KEPT
        if not job.held:
            return _STARTED
        return _GROWN if given.devices > job.held.devices else _MOVED
    if not sizes.is_possible(job):
        return _TOO_LARGE
    return _PREEMPTED if job.held else _WAITS


_KEPT = Reason(code="kept", text="It keeps the devices it holds.")
_STARTED = Reason(
    code="started", text="It is first in the queue, and the devices it asks for are free."
)
_GROWN = Reason(code="grown", text="It gets devices that no other job takes.")
_MOVED = Reason(code="moved", text="It moves to other devices: its share has changed.")
_PREEMPTED = Reason(
    code="preempted",
    text="It is stopped: other jobs go first now. It continues when it is first in the queue.",
)
_WAITS = Reason(code="waits_for_devices", text="It waits until the devices it asks for are free.")
_TOO_LARGE = Reason(code="too_large", text="It asks for more devices than the pool has.")
