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

    member: int
    rank: int | None = None
    """Where it worked in the last generation; none for one that stood by."""
    live: HeldState | None = None
    copies: tuple[HeldState, ...] = ()
    is_leaving: bool = False
    """It may give its state, but not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The next generation."""

    layout: Layout
    seats: tuple[int, ...]
    """Members by rank."""
    guests: tuple[int, ...] = ()
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
    reports: Sequence[WorkerReport],
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
    able = [report for report in reports if not report.is_leaving]
    if not able:
        return None
    layout = replan(min(target, len(able)))
    source = _find_source(reports, layouts)
    seats = _seat(able, layout, source, layouts, current=current)
    if source is None:
        kind = "start" if current == 0 else "checkpoint"
        return GenerationPlan(layout=layout, seats=seats, restore=Restore(kind=kind))
    guests = _needed_guests(seats, source)
    givers = source.givers(seats, guests)
    return GenerationPlan(
        layout=layout,
        seats=seats,
        guests=guests,
        before=source.layout,
        restore=Restore(
            kind="copies" if any(giver.is_copy for giver in givers) else "live",
            step=source.step,
            givers=givers,
            is_moving=not _everyone_has(layout, seats, source),
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Source:
    """One step at which everything is held by somebody."""

    step: int
    layout: Layout
    live: dict[int, HeldState] = field(default_factory=dict[int, HeldState])
    copies: dict[int, list[HeldState]] = field(
        default_factory=lambda: defaultdict[int, list[HeldState]](list)
    )

    def part(self, holding: HeldState) -> StatePart:
        return part_at(self.layout, holding.place)

    def parts_of(self, member: int) -> set[StatePart]:
        held = [self.live[member]] if member in self.live else []
        return {self.part(holding) for holding in [*held, *self.copies.get(member, ())]}

    def covers_by(self, members: Iterable[int]) -> set[StatePart]:
        return {part for member in members for part in self.parts_of(member)}

    def is_whole(self) -> bool:
        return self.covers_by({*self.live, *self.copies}) >= cut_of(self.layout).parts()

    def givers(self, seats: Sequence[int], guests: Sequence[int]) -> tuple[StateSource, ...]:
        found: list[StateSource] = []
        have: set[StatePart] = set()
        ranked = list(enumerate([*seats, *guests]))
        for rank, member in ranked:
            if member in self.live:
                found.append(StateSource(meeting_rank=rank, holding=self.live[member]))
                have.add(self.part(self.live[member]))
        for rank, member in ranked:  # a copy only where nobody has the part live
            for holding in self.copies.get(member, ()):
                if self.part(holding) not in have:
                    have.add(self.part(holding))
                    found.append(StateSource(meeting_rank=rank, holding=holding, is_copy=True))
        return tuple(found)


def _find_source(reports: Sequence[WorkerReport], layouts: Mapping[int, Layout]) -> _Source | None:
    """The newest step at which everything is there, live or as a copy."""
    sources: dict[tuple[int, StateSplit], _Source] = {}

    def source_of(holding: HeldState, layout: Layout) -> _Source:
        empty = _Source(step=holding.step, layout=layout)
        return sources.setdefault((holding.step, cut_of(layout)), empty)

    for report in reports:
        for copy in report.copies:
            if (layout := layouts.get(copy.generation)) is not None:
                source_of(copy, layout).copies[report.member].append(copy)
        live = report.live
        if live is not None and (layout := layouts.get(live.generation)) is not None:
            source_of(live, layout).live[report.member] = live
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
    seats: dict[int, int] = {}
    free = sorted(able, key=_standing)
    before = layouts.get(current)
    if source is not None and cut_of(layout) == cut_of(source.layout):
        wanted = {rank: part_at(layout, layout.place_of(rank)) for rank in ranks}
        if before is not None and before.world == layout.world and cut_of(before) == cut_of(layout):
            seats = {r.rank: r.member for r in free if r.rank is not None}
        for rank in ranks:
            taken = set(seats.values())
            fits = (r.member for r in free if wanted[rank] in source.parts_of(r.member))
            member = next((each for each in fits if each not in taken), None)
            if rank not in seats and member is not None:
                seats[rank] = member
    elif before is not None:
        for report in free:
            if report.rank is not None and report.rank < layout.world:
                seats.setdefault(report.rank, report.member)
    rest = iter([r.member for r in free if r.member not in set(seats.values())])
    return tuple(seats[rank] if rank in seats else next(rest) for rank in ranks)


def _standing(report: WorkerReport) -> tuple[bool, int, int]:
    return (report.rank is None, report.rank or 0, report.member)


def _needed_guests(seats: Sequence[int], source: _Source) -> tuple[int, ...]:
    """As few as can be of those without a seat, so that everything is there."""
    missing = set(cut_of(source.layout).parts()) - source.covers_by(seats)
    guests: list[int] = []
    others = sorted({*source.live, *source.copies} - set(seats), key=lambda m: m not in source.live)
    for member in others:
        if missing & source.parts_of(member):
            guests.append(member)
            missing -= source.parts_of(member)
    return tuple(guests)


def _everyone_has(layout: Layout, seats: Sequence[int], source: _Source) -> bool:
    """Whether each holds live what its new place needs: then nothing moves."""
    if cut_of(layout) != cut_of(source.layout):
        return False
    return all(
        member in source.live
        and source.part(source.live[member]) == part_at(layout, layout.place_of(rank))
        for rank, member in enumerate(seats)
    )
