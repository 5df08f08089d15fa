"""Baseline policies that a pool can select: simple and well known; jobs keep the batch they ask for.

EASY backfill (Lifka, 1995): first come, first served, but short jobs fill the gaps.
The head of the queue gets a reservation for when enough devices will be free; others may start
before it if they end by then, or use only devices that the head will not need.

Optimus (Peng et al., EuroSys'18): one device more to whom it saves the most time.
Everybody gets one device; then each further device goes to the job whose remaining time shrinks
most by it. Batches stay as asked.

Tiresias (Gu et al., NSDI'19): two queues by attained service, discretised.
Jobs start in the first queue; those that have had sixteen device-hours move to the second. Within
a queue, first come, first served; sizes as asked, all or nothing, with interruption.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.scheduler.policy.values import Decision, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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


def least_devices(job: Demand) -> int:
    """The fewest devices that it can run on."""
    return -(-max(job.min_devices, 1) // job.multiple) * job.multiple


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


class Fifo:
    """Sizes as asked, strictly in the order of submission."""

    name = "fifo"

    def decide(self, state: PoolState) -> Decision:
        """Start jobs from the head of the queue until one does not fit."""
        running, queue = split_queue(state)
        sizes = SizeLedger(state)
        for job in running:
            sizes.give(job)
        for job in queue:
            # One that can never run must not stop all others.
            if sizes.is_possible(job) and not sizes.give(job):
                break
        return explain(state, place_sizes(state, sizes.given, [*running, *queue]))


def split_queue(state: PoolState) -> tuple[list[Demand], list[Demand]]:
    """Who runs, and who waits by priority and submission."""
    running = [job for job in state.jobs if job.held]
    waiting = [job for job in state.jobs if not job.held]
    return running, sorted(waiting, key=lambda job: -job.priority)


class Shortest:
    """Shortest remaining time first, with interruption; without lengths, least served first."""

    name = "shortest"

    def decide(self, state: PoolState) -> Decision:
        """Run jobs in the order of what is left of them, as many as fit."""
        left = {job.id: seconds_left(state, job) for job in state.jobs}

        def rank(job: Demand) -> tuple[bool, int, float, float]:
            stays = bool(job.held) and (job.is_pinned or not job.is_preemptible)
            return (not stays, -job.priority, left[job.id], job.served_device_s)

        order = sorted(state.jobs, key=rank)
        return serve(state, order)


def seconds_left(state: PoolState, job: Demand) -> float:
    """Until its end with the devices it asks for; infinite where nobody knows."""
    if job.remaining is None:
        return math.inf
    devices = job.held.devices or job.asked_devices
    best = 0.0
    for kind in usable_types(job, device_types(state)):
        nodes = nodes_by_devices(state, kind)
        if devices >= len(nodes):
            continue
        rate = job.speed.goodput(kind, np.array([nodes[devices]]), np.array([devices]))
        best = max(best, float(rate[0]))
    return job.remaining / best if best > 0 else math.inf


class Backfill:
    """Sizes as asked, one reservation."""

    name = "backfill"

    def decide(self, state: PoolState) -> Decision:
        """Start from the head of the queue; then whoever does not delay the first that waits."""
        running, queue = split_queue(state)
        order = [*running, *queue]
        sizes = SizeLedger(state)
        for job in running:
            sizes.give(job)
        queue = [job for job in queue if sizes.is_possible(job)]
        while queue and sizes.give(queue[0]):
            queue.pop(0)
        if queue:
            _fill(state, sizes, order, queue[0], queue[1:])
        return explain(state, place_sizes(state, sizes.given, order))


def _fill(
    state: PoolState, sizes: SizeLedger, order: list[Demand], head: Demand, others: list[Demand]
) -> None:
    """Start those that do not delay the head."""
    started = [job for job in order if job.id in sizes.given]
    reserved, starts_in_s, spare = _reserve(state, sizes, started, head)
    for job in others:
        result = sizes.fit(job)
        if result is None:
            continue
        kind, count = result
        if kind != reserved or seconds_left(state, job) + job.restart_s <= starts_in_s:
            sizes.give(job)
        elif count <= spare:
            spare -= count
            sizes.give(job)


def _reserve(
    state: PoolState, sizes: SizeLedger, started: list[Demand], head: Demand
) -> tuple[str, float, int]:
    """Where and in how many seconds the head can start, and how many devices it then leaves."""
    best = ("", math.inf, 0)
    for kind in usable_types(head, device_types(state)):
        here = [job for job in started if sizes.given[job.id][0] == kind]
        free = sizes.left(kind)
        for ends_in_s, count in sorted(
            (seconds_left(state, job), sizes.given[job.id][1]) for job in here
        ):
            free += count
            if free >= head.asked_devices:
                if ends_in_s < best[1] or not best[0]:
                    best = (kind, ends_in_s, free - head.asked_devices)
                break
    return best


class Fair:
    """Max-min fairness over devices; sizes change as jobs come and go."""

    name = "fair"

    def decide(self, state: PoolState) -> Decision:
        """Deal devices out one round after the other until nobody can take more."""
        sizes: dict[str, tuple[str, int]] = {}
        free = Free(state.nodes)
        for kind, jobs in assign_types(state).items():
            for name, count in _deal_equally(jobs, free.count(kind)).items():
                sizes[name] = (kind, count)
        order = sorted(state.jobs, key=lambda job: -sizes.get(job.id, ("", 0))[1])
        return explain(state, place_sizes(state, sizes, order))


def _deal_equally(jobs: list[Demand], left: int) -> dict[str, int]:
    """Devices of each job: equal but for their limits, the earliest get what does not divide."""
    given: dict[str, int] = {}
    # Who runs keeps running: a share that wanders with every round would only cost restarts.
    for job in sorted(jobs, key=lambda job: (not job.is_pinned, -job.priority, not job.held)):
        least = job.held.devices if job.is_pinned and job.held else least_devices(job)
        if least <= min(left, job.max_devices):
            given[job.id] = least
            left -= least
    growing = [job for job in jobs if job.id in given and not (job.is_pinned and job.held)]
    while growing:
        job = min(growing, key=lambda job: given[job.id])
        if given[job.id] + job.multiple > job.max_devices or job.multiple > left:
            growing.remove(job)
            continue
        given[job.id] += job.multiple
        left -= job.multiple
    return given


class Fixed:
    """First come, first served, but small jobs slip past one that does not fit yet."""

    name = "fixed"

    def decide(self, state: PoolState) -> Decision:
        """Start whoever fits, in the order of submission."""
        running, queue = split_queue(state)
        return serve(state, [*running, *queue])


@runtime_checkable
class Stepped(Protocol):
    """A speed that also knows its steps, as a job of a fixed batch does."""

    @property
    def steps_left(self) -> float:
        """To the end of the job."""
        ...

    def step_s(self, device_type: str, nodes: int, devices: int) -> float | None:
        """Seconds of one; None where it cannot run."""
        ...


class Optimus:
    """Greedy by marginal gain."""

    name = "optimus"

    def decide(self, state: PoolState) -> Decision:
        """Deal devices out by what each saves."""
        sizes: dict[str, tuple[str, int]] = {}
        free = Free(state.nodes)
        for kind, jobs in assign_types(state).items():
            for name, count in _deal_by_time_saved(state, kind, jobs, free.count(kind)).items():
                sizes[name] = (kind, count)
        order = sorted(state.jobs, key=lambda job: sizes.get(job.id, ("", 0))[1])
        return explain(state, place_sizes(state, sizes, order))


def _deal_by_time_saved(
    state: PoolState, kind: str, jobs: list[Demand], left: int
) -> dict[str, int]:
    given: dict[str, int] = {}
    gains: list[tuple[float, int]] = []
    savings = [_saving(state, kind, job) for job in jobs]
    for index, job in enumerate(jobs):
        least = job.held.devices if job.is_pinned and job.held else least_devices(job)
        if least > left:
            continue
        given[job.id] = least
        left -= least
        if left > 0 and not job.is_pinned:
            gains.append((-savings[index](least), index))
    heapq.heapify(gains)
    while left > 0 and gains and gains[0][0] < 0:
        _, index = gains[0]
        job = jobs[index]
        if job.multiple > left:
            heapq.heappop(gains)
            continue
        given[job.id] += job.multiple
        left -= job.multiple
        heapq.heapreplace(gains, (-savings[index](given[job.id]), index))
    return given


def _saving(state: PoolState, kind: str, job: Demand) -> Callable[[int], float]:
    """How much of its remaining time one more device saves; or as few more as it can use."""
    speed = job.speed
    nodes = nodes_by_devices(state, kind)
    most = min(job.max_devices, len(nodes) - 1)
    step = job.multiple
    if isinstance(speed, Stepped):
        left = speed.steps_left

        def save_steps(devices: int) -> float:
            if devices + step > most:
                return 0.0
            now = speed.step_s(kind, nodes[devices], devices)
            then = speed.step_s(kind, nodes[devices + step], devices + step)
            return 0.0 if now is None or then is None else (now - then) * left / step

        return save_steps

    def save(devices: int) -> float:
        if devices + step > most:
            return 0.0
        counts = np.array([devices, devices + step])
        spread = np.array([nodes[devices], nodes[devices + step]])
        now, then = (float(rate) for rate in speed.goodput(kind, spread, counts))
        if then <= 0:
            return 0.0
        # Where nobody knows how long it is, every job is as long as any other.
        left = 1.0 if job.remaining is None else job.remaining
        return (left / now - left / then) / step if now > 0 else math.inf

    return save


class Tiresias:
    """Least attained service with one threshold."""

    name = "tiresias"

    def __init__(self, threshold_device_s: float = 16 * 3600) -> None:
        self._threshold_device_s = threshold_device_s
        self._demoted: dict[str, None] = {}
        """In the order of their demotion; after a loss of these notes, in that of submission."""

    def decide(self, state: PoolState) -> Decision:
        """Serve the first queue, then the second, whoever fits."""
        present = {job.id: job for job in state.jobs}
        self._demoted = {name: None for name in self._demoted if name in present}
        for job in state.jobs:
            if job.served_device_s >= self._threshold_device_s:
                self._demoted.setdefault(job.id)
        first = [job for job in state.jobs if job.id not in self._demoted]
        order = [*first, *(present[name] for name in self._demoted)]
        order.sort(key=lambda job: not (job.held and (job.is_pinned or not job.is_preemptible)))
        return serve(state, order)
