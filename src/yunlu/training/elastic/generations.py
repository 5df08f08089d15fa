"""The next generation: who is in it, at which rank, and where the state comes from. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from yunlu.training.elastic.messages import HeldState, Restore, StateSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from yunlu.planning.layout import Layout, RankCoordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker that can be reckoned with, and what it holds."""

    worker: int
    rank: int | None = None
    """Where it worked in the last generation; none for one that stood by."""
    live: HeldState | None = None
    replicas: tuple[HeldState, ...] = ()
    is_leaving: bool = False
    """It may give its state, but not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The next generation."""

    layout: Layout
    workers: tuple[int, ...]
    """Members by rank."""
    departing: tuple[int, ...] = ()
    """Members that only give."""
    before: Layout | None = None
    """How the state is cut where it comes from."""
    restore: Restore


class StatePart(NamedTuple):
    """What a worker holds of the state; equal for workers that hold the same."""

    pp: int
    fsdp: int
    tp: int
    dp: int
    """0 unless replicas share out the optimiser's state."""


class StateSplit(NamedTuple):
    """Into which parts a layout cuts the state; equal for layouts between which nothing moves."""

    pp: int
    fsdp: int
    tp: int
    dp: int
    stages_per_rank: int
    vocabulary: bool

    def parts(self) -> frozenset[StatePart]:
        """All of them."""
        return frozenset(
            StatePart(pp, fsdp, tp, dp)
            for pp in range(self.pp)
            for fsdp in range(self.fsdp)
            for tp in range(self.tp)
            for dp in range(self.dp)
        )


def cut_of(layout: Layout) -> StateSplit:
    """How a layout cuts the state."""
    return StateSplit(
        pp=layout.pp,
        fsdp=layout.fsdp,
        tp=layout.tp,
        dp=layout.dp if layout.zero1 else 1,
        stages_per_rank=layout.stages_per_rank,
        vocabulary=layout.vocabulary,
    )


def part_at(layout: Layout, place: RankCoordinates) -> StatePart:
    """What stands at a place."""
    return StatePart(place.pp, place.fsdp, place.tp, place.dp if layout.zero1 else 0)


def plan_generation(
    worker_reports: Sequence[WorkerReport],
    *,
    layouts: Mapping[int, Layout],
    current: int,
    target: int,
    replan: Callable[[int], Layout],
) -> GenerationPlan | None:
    """The next generation; none where nobody is left to form one.

    Args:
        reports: Every worker that is alive and waits.
        layouts: By generation, of every one in which somebody may hold something.
        current: The last generation; 0 before the first.
        target: Workers wanted.
        replan: The layout for at most so many workers; it may use fewer.
    """
    able = [report for report in worker_reports if not report.is_leaving]
    if not able:
        return None
    layout = replan(min(target, len(able)))
    source = _find_source(worker_reports, layouts)
    workers = _seat(able, layout, source, layouts, current=current)
    if source is None:
        kind = "start" if current == 0 else "checkpoint"
        return GenerationPlan(layout=layout, workers=workers, restore=Restore(kind=kind))
    departing = _needed_guests(workers, source)
    sources = source.sources(workers, departing)
    return GenerationPlan(
        layout=layout,
        workers=workers,
        departing=departing,
        before=source.layout,
        restore=Restore(
            kind="copies" if any(giver.is_replica for giver in sources) else "live",
            step=source.step,
            sources=sources,
            needs_transfer=not _everyone_has(layout, workers, source),
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Source:
    """One step at which everything is held by somebody."""

    step: int
    layout: Layout
    live: dict[int, HeldState] = field(default_factory=dict[int, HeldState])
    replicas: dict[int, list[HeldState]] = field(
        default_factory=lambda: defaultdict[int, list[HeldState]](list)
    )

    def part(self, held_state: HeldState) -> StatePart:
        return part_at(self.layout, held_state.place)

    def parts_of(self, worker: int) -> set[StatePart]:
        held = [self.live[worker]] if worker in self.live else []
        return {self.part(held_state) for held_state in [*held, *self.replicas.get(worker, ())]}

    def covers_by(self, workers: Iterable[int]) -> set[StatePart]:
        return {part for worker in workers for part in self.parts_of(worker)}

    def is_whole(self) -> bool:
        return self.covers_by({*self.live, *self.replicas}) >= cut_of(self.layout).parts()

    def sources(self, workers: Sequence[int], departing: Sequence[int]) -> tuple[StateSource, ...]:
        found: list[StateSource] = []
        have: set[StatePart] = set()
        ranked = list(enumerate([*workers, *departing]))
        for rank, worker in ranked:
            if worker in self.live:
                found.append(StateSource(handoff_rank=rank, held_state=self.live[worker]))
                have.add(self.part(self.live[worker]))
        for rank, worker in ranked:  # a copy only where nobody has the part live
            for held_state in self.replicas.get(worker, ()):
                if self.part(held_state) not in have:
                    have.add(self.part(held_state))
                    found.append(
                        StateSource(handoff_rank=rank, held_state=held_state, is_replica=True)
                    )
        return tuple(found)


def _find_source(
    worker_reports: Sequence[WorkerReport], layouts: Mapping[int, Layout]
) -> _Source | None:
    """The newest step at which everything is there, live or as a copy."""
    sources: dict[tuple[int, StateSplit], _Source] = {}

    def source_of(held_state: HeldState, layout: Layout) -> _Source:
        empty = _Source(step=held_state.step, layout=layout)
        return sources.setdefault((held_state.step, cut_of(layout)), empty)

    for report in worker_reports:
        for copy in report.replicas:
            if (layout := layouts.get(copy.generation)) is not None:
                source_of(copy, layout).replicas[report.worker].append(copy)
        live = report.live
        if live is not None and (layout := layouts.get(live.generation)) is not None:
            source_of(live, layout).live[report.worker] = live
    whole = [source for source in sources.values() if source.is_whole()]
    # Of equals the one with more live state: copies are read back, live state may just stay.
    return max(whole, key=lambda source: (source.step, len(source.live)), default=None)


def _seat(
    able: Sequence[WorkerReport],
    layout: Layout,
    source: _Source | None,
    layouts: Mapping[int, Layout],
    *,
    current: int,
) -> tuple[int, ...]:
    """Survivors keep their rank, else the part they hold; those who stood by fill the gaps."""
    ranks = range(layout.world)
    workers: dict[int, int] = {}
    free = sorted(able, key=_standing)
    before = layouts.get(current)
    if source is not None and cut_of(layout) == cut_of(source.layout):
        wanted = {rank: part_at(layout, layout.place_of(rank)) for rank in ranks}
        if before is not None and before.world == layout.world and cut_of(before) == cut_of(layout):
            workers = {r.rank: r.worker for r in free if r.rank is not None}
        for rank in ranks:
            taken = set(workers.values())
            fits = (r.worker for r in free if wanted[rank] in source.parts_of(r.worker))
            worker = next((each for each in fits if each not in taken), None)
            if rank not in workers and worker is not None:
                workers[rank] = worker
    elif before is not None:
        for report in free:
            if report.rank is not None and report.rank < layout.world:
                workers.setdefault(report.rank, report.worker)
    rest = iter([r.worker for r in free if r.worker not in set(workers.values())])
    return tuple(workers[rank] if rank in workers else next(rest) for rank in ranks)


def _standing(report: WorkerReport) -> tuple[bool, int, int]:
    return (report.rank is None, report.rank or 0, report.worker)


def _needed_guests(workers: Sequence[int], source: _Source) -> tuple[int, ...]:
    """As few as can be of those without a seat, so that everything is there."""
    missing = set(cut_of(source.layout).parts()) - source.covers_by(workers)
    departing: list[int] = []
    others = sorted(
        {*source.live, *source.replicas} - set(workers), key=lambda m: m not in source.live
    )
    for worker in others:
        if missing & source.parts_of(worker):
            departing.append(worker)
            missing -= source.parts_of(worker)
    return tuple(departing)


def _everyone_has(layout: Layout, workers: Sequence[int], source: _Source) -> bool:
    """Whether each holds live what its new place needs: then nothing moves."""
    if cut_of(layout) != cut_of(source.layout):
        return False
    return all(
        worker in source.live
        and source.part(source.live[worker]) == part_at(layout, layout.place_of(rank))
        for rank, worker in enumerate(workers)
    )
