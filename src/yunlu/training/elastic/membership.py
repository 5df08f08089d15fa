"""Workers and nodes of a run, as its supervisor knows them, and how the next generation follows from them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from yunlu.core.processes import ProcessHandle
from yunlu.runs.worker_group import LOCAL
from yunlu.training.elastic.messages import HeldState, Restore, StateSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from yunlu.planning.layouts import Layout, RankCoordinates
    from yunlu.training.elastic.control_channel import ControlConnection
    from yunlu.training.elastic.messages import Ending, Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """An available worker and the state it holds."""

    worker: int
    rank: int | None = None
    """Rank in the last generation; None for a spare."""
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    is_leaving: bool = False
    """It may hand off its state, but not train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """Layout, ranks and state source of the next generation."""

    layout: Layout
    workers: tuple[int, ...]
    """Worker numbers by rank."""
    departing: tuple[int, ...] = ()
    """Workers that only hand off their state."""
    source_layout: Layout | None = None
    """Layout in which the sources hold the state."""
    restore: Restore


class StatePart(NamedTuple):
    """The part of the training state a worker holds; equal for workers with the same part."""

    pp: int
    fsdp: int
    tp: int
    dp: int
    """0 unless ZeRO-1 shards the optimizer state over replicas."""


class StateSplit(NamedTuple):
    """How a layout splits the state; equal for layouts between which no state moves."""

    pp: int
    fsdp: int
    tp: int
    dp: int
    stages_per_rank: int
    vocabulary: bool

    def parts(self) -> frozenset[StatePart]:
        """All parts of the split."""
        return frozenset(
            StatePart(pp, fsdp, tp, dp)
            for pp in range(self.pp)
            for fsdp in range(self.fsdp)
            for tp in range(self.tp)
            for dp in range(self.dp)
        )


def split_of(layout: Layout) -> StateSplit:
    """How a layout splits the state."""
    return StateSplit(
        pp=layout.pp,
        fsdp=layout.fsdp,
        tp=layout.tp,
        dp=layout.dp if layout.zero1 else 1,
        stages_per_rank=layout.stages_per_rank,
        vocabulary=layout.vocabulary,
    )


def part_at(layout: Layout, coordinates: RankCoordinates) -> StatePart:
    """The part held at these coordinates."""
    return StatePart(
        coordinates.pp, coordinates.fsdp, coordinates.tp, coordinates.dp if layout.zero1 else 0
    )


def plan_generation(
    reports: Sequence[WorkerReport],
    *,
    layouts: Mapping[int, Layout],
    current: int,
    target: int,
    replan: Callable[[int], Layout],
) -> GenerationPlan | None:
    """Plan the next generation; None if no worker is available.

    Args:
        reports: All workers that are alive and wait.
        layouts: Layout of each generation of which a worker may still hold state.
        current: Last generation; 0 before the first.
        target: Number of workers wanted.
        replan: Layout for at most so many workers; it may use fewer.
    """
    available = [report for report in reports if not report.is_leaving]
    if not available:
        return None
    layout = replan(min(target, len(available)))
    source = _find_source(reports, layouts)
    workers = _assign_ranks(available, layout, source, layouts, current=current)
    if source is None:
        kind = "start" if current == 0 else "checkpoint"
        return GenerationPlan(layout=layout, workers=workers, restore=Restore(kind=kind))
    departing = _needed_departing(workers, source)
    sources = source.sources(workers, departing)
    return GenerationPlan(
        layout=layout,
        workers=workers,
        departing=departing,
        source_layout=source.layout,
        restore=Restore(
            kind="replicas" if any(origin.is_replica for origin in sources) else "live",
            step=source.step,
            sources=sources,
            needs_transfer=not _all_in_place(layout, workers, source),
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Source:
    """One step whose complete state is held in memory."""

    step: int
    layout: Layout
    live: dict[int, HeldState] = field(default_factory=dict[int, HeldState])
    replicas: dict[int, list[HeldState]] = field(
        default_factory=lambda: defaultdict[int, list[HeldState]](list)
    )

    def part(self, held_state: HeldState) -> StatePart:
        return part_at(self.layout, held_state.coordinates)

    def parts_of(self, worker: int) -> set[StatePart]:
        held = [self.live[worker]] if worker in self.live else []
        return {self.part(held_state) for held_state in [*held, *self.replicas.get(worker, ())]}

    def parts_of_all(self, workers: Iterable[int]) -> set[StatePart]:
        return {part for worker in workers for part in self.parts_of(worker)}

    def is_whole(self) -> bool:
        return self.parts_of_all({*self.live, *self.replicas}) >= split_of(self.layout).parts()

    def sources(self, workers: Sequence[int], departing: Sequence[int]) -> tuple[StateSource, ...]:
        selected: list[StateSource] = []
        have: set[StatePart] = set()
        ranked = list(enumerate([*workers, *departing]))
        for rank, worker in ranked:
            if worker in self.live:
                selected.append(StateSource(handoff_rank=rank, held_state=self.live[worker]))
                have.add(self.part(self.live[worker]))
        for rank, worker in ranked:  # a replica only if no worker has the part live
            for held_state in self.replicas.get(worker, ()):
                if self.part(held_state) not in have:
                    have.add(self.part(held_state))
                    selected.append(
                        StateSource(handoff_rank=rank, held_state=held_state, is_replica=True)
                    )
        return tuple(selected)


def _find_source(reports: Sequence[WorkerReport], layouts: Mapping[int, Layout]) -> _Source | None:
    """The newest step whose state is complete, live or as replicas."""
    sources: dict[tuple[int, StateSplit], _Source] = {}

    def source_of(held_state: HeldState, layout: Layout) -> _Source:
        empty = _Source(step=held_state.step, layout=layout)
        return sources.setdefault((held_state.step, split_of(layout)), empty)

    for report in reports:
        for replica in report.replicas:
            if (layout := layouts.get(replica.generation)) is not None:
                source_of(replica, layout).replicas[report.worker].append(replica)
        live = report.live
        if live is not None and (layout := layouts.get(live.generation)) is not None:
            source_of(live, layout).live[report.worker] = live
    whole = [source for source in sources.values() if source.is_whole()]
    # On a tie prefer live state: it may stay where it is, replicas are copied back.
    return max(whole, key=lambda source: (source.step, len(source.live)), default=None)


def _assign_ranks(
    available: Sequence[WorkerReport],
    layout: Layout,
    source: _Source | None,
    layouts: Mapping[int, Layout],
    *,
    current: int,
) -> tuple[int, ...]:
    """Survivors keep their rank, or else the part they hold; spares fill the gaps."""
    ranks = range(layout.world)
    workers: dict[int, int] = {}
    free = sorted(available, key=_rank_order)
    before = layouts.get(current)
    if source is not None and split_of(layout) == split_of(source.layout):
        wanted = {rank: part_at(layout, layout.place_of(rank)) for rank in ranks}
        if (
            before is not None
            and before.world == layout.world
            and split_of(before) == split_of(layout)
        ):
            workers = {r.rank: r.worker for r in free if r.rank is not None}
        for rank in ranks:
            taken = set(workers.values())
            fits = (r.worker for r in free if wanted[rank] in source.parts_of(r.worker))
            worker = next((candidate for candidate in fits if candidate not in taken), None)
            if rank not in workers and worker is not None:
                workers[rank] = worker
    elif before is not None:
        for report in free:
            if report.rank is not None and report.rank < layout.world:
                workers.setdefault(report.rank, report.worker)
    rest = iter([r.worker for r in free if r.worker not in set(workers.values())])
    return tuple(workers[rank] if rank in workers else next(rest) for rank in ranks)


def _rank_order(report: WorkerReport) -> tuple[bool, int, int]:
    return (report.rank is None, report.rank or 0, report.worker)


def _needed_departing(workers: Sequence[int], source: _Source) -> tuple[int, ...]:
    """The fewest workers without a rank that complete the state."""
    missing = set(split_of(source.layout).parts()) - source.parts_of_all(workers)
    departing: list[int] = []
    others = sorted(
        {*source.live, *source.replicas} - set(workers), key=lambda m: m not in source.live
    )
    for worker in others:
        if missing & source.parts_of(worker):
            departing.append(worker)
            missing -= source.parts_of(worker)
    return tuple(departing)


def _all_in_place(layout: Layout, workers: Sequence[int], source: _Source) -> bool:
    """Whether each worker already holds the live state of its new rank."""
    if split_of(layout) != split_of(source.layout):
        return False
    return all(
        worker in source.live
        and source.part(source.live[worker]) == part_at(layout, layout.place_of(rank))
        for rank, worker in enumerate(workers)
    )


FIRST_EXCLUSION_S = 300.0
"""Time before an excluded straggler is readmitted; doubled each time."""

Status = Literal["starting", "idle", "busy", "paused", "gone"]
"""``idle``: hot spare. ``paused``: has left its generation and waits for the next."""


@dataclass(eq=False, kw_only=True)
class WorkerRecord:
    """A worker process."""

    number: int
    node: str
    host: str = ""
    pid: int = 0
    process_started_at: float = 0.0
    status: Status = "starting"
    since: float = 0.0
    """Time of the last status change, on the monotonic clock."""
    rank: int | None = None
    slot: int = 0
    connection: ControlConnection | None = None
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    ending: Ending | None = None
    is_leaving: bool = False
    is_excluded: bool = False
    """It leaves as a straggler: the other workers are faster without it."""
    heartbeat: Heartbeat | None = None
    last_step: tuple[int, float, float] | None = None

    @property
    def process(self) -> ProcessHandle:
        """Its process, if it runs on this machine."""
        return ProcessHandle(self.pid, self.process_started_at)

    @property
    def is_present(self) -> bool:
        """Whether the worker has not been lost or dismissed."""
        return self.status != "gone"

    @property
    def step(self) -> int:
        """Completed steps in the last heartbeat."""
        return self.heartbeat.step if self.heartbeat else 0

    def move(self, status: Status, *, at: float) -> None:
        """Change the status."""
        self.status, self.since = status, at

    def report(self, *, may_stay: bool) -> WorkerReport:
        """Report for ``plan_generation``."""
        return WorkerReport(
            worker=self.number,
            rank=self.rank,
            live=self.live,
            replicas=self.replicas,
            is_leaving=self.is_leaving or not may_stay,
        )


@dataclass(eq=False, kw_only=True)
class NodeRecord:
    """A machine."""

    name: str
    wanted: int
    """Number of workers requested on this node."""
    excluded: int = 0
    """Stragglers among them that are excluded for now."""
    excluded_until: float = 0.0
    """On the monotonic clock."""
    exclusion_s: float = FIRST_EXCLUSION_S
    """Exclusion time; doubles with each exclusion."""
    host: str = ""
    pid: int = 0
    connection: ControlConnection | None = None
    is_ready: bool = False
    is_leaving: bool = False
    """Its end is no fault (asynchronous groups)."""
    heard_at: float = 0.0
    """Its last message, on the monotonic clock (asynchronous groups; others have a watchdog)."""
    pids: dict[int, int] = field(default_factory=dict[int, int])
    """Of workers without a connection of their own, by number (asynchronous groups)."""

    @property
    def is_local(self) -> bool:
        """Whether it is the supervisor's machine."""
        return self.name == LOCAL

    @property
    def active_target(self) -> int:
        """Workers that train on this node now."""
        return max(0, self.wanted - self.excluded)

    def exclude_worker(self, *, at: float) -> None:
        """Exclude one worker for a while."""
        self.excluded += 1
        self.excluded_until = at + self.exclusion_s

    def readmit(self) -> None:
        """Readmit all excluded workers; the next exclusion lasts twice as long."""
        self.excluded = 0
        self.exclusion_s *= 2


@dataclass
class Membership:
    """All workers and nodes of a run."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict[int, WorkerRecord])
    nodes: dict[str, NodeRecord] = field(default_factory=dict[str, NodeRecord])
    next_worker: int = 0

    @property
    def target(self) -> int:
        """Number of workers requested."""
        return sum(node.wanted for node in self.nodes.values())

    @property
    def active_target(self) -> int:
        """Number of workers that train now: requested less excluded."""
        return sum(node.active_target for node in self.nodes.values())

    def add(self, node: str, *, at: float, number: int | None = None) -> WorkerRecord:
        """Add a worker that is being started."""
        number = self.next_worker if number is None else number
        worker = WorkerRecord(number=number, node=node, since=at)
        self.workers[number] = worker
        self.next_worker = max(self.next_worker, number + 1)
        return worker

    def with_status(self, *statuses: Status, node: str | None = None) -> list[WorkerRecord]:
        """Workers in one of these statuses, by number."""
        return [
            worker
            for worker in self.workers.values()
            if worker.status in statuses and node in {None, worker.node}
        ]

    def by_connection(self, connection: ControlConnection) -> WorkerRecord | NodeRecord | None:
        """The worker or node at the other end of a connection."""
        records = [*self.workers.values(), *self.nodes.values()]
        return next((record for record in records if record.connection is connection), None)

    def candidates(self) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Workers that may train next, and those that may only hand off state; honours each node's target."""
        staying: list[WorkerRecord] = []
        departing: list[WorkerRecord] = []
        for node in self.nodes.values():
            here = self.with_status("busy", "paused", "idle", node=node.name)
            here.sort(key=lambda m: (m.is_leaving, m.rank is None, m.rank or 0, m.number))
            available = [worker for worker in here if not worker.is_leaving]
            staying += available[: node.active_target]
            departing += [
                worker for worker in here if worker not in available[: node.active_target]
            ]
        departing += [
            m for m in self.with_status("busy", "paused", "idle") if m.node not in self.nodes
        ]
        return staying, departing


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
