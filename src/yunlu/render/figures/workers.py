"""Figures of a run with several workers: progress by layout, step times, who holds what."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from yunlu.core.units import show_duration
from yunlu.planning.layout import AXES
from yunlu.render.figures.axes import fit_axis, step_axis
from yunlu.render.figures.values import (
    NUM_COLOURS,
    Band,
    Bar,
    BarFigure,
    BarSegment,
    EventMarks,
    LayoutFigure,
    LineFigure,
    RankTile,
    Series,
)
from yunlu.render.i18n.texts import known_text, same, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.report_model import WorkerGroupHistory
    from yunlu.render.i18n.texts import BilingualText
    from yunlu.runs.events import WorkerRank
    from yunlu.runs.fold import GroupGeneration

_MOST_MARKS = 200
_MOST_WORKERS = 8
_LONG_ROW = 4
_PADDING = 0.06


def progress_figure(group: WorkerGroupHistory) -> LineFigure | None:
    """Completed steps over time, on the background of the layouts."""
    if len(group.elapsed_s) < 2:
        return None
    colours, end = _layout_colours(group), group.elapsed_s[-1]
    starts = [max(0.0, group.elapsed_at(change.at)) for change in group.changes]
    starts[0] = 0.0
    line = Series(
        key="progress",
        name=text("workers.progress"),
        x=tuple(round(at, 3) for at in group.elapsed_s),
        y=group.done_steps,
    )
    return LineFigure(
        id="progress",
        title=text("workers.progress_title"),
        x=fit_axis(line.x, unit="duration", ticks=5, name=text("workers.time")),
        y=fit_axis(line.y, unit="count", from_zero=True, padding=_PADDING, ticks=5),
        series=(line,),
        marks=tuple(_moments(group)),
        bands=tuple(
            Band(start=start, end=stop, label=change.layout, colour=colours[change.layout])
            for change, start, stop in zip(group.changes, starts, [*starts[1:], end], strict=True)
        ),
        bands_name=text("workers.layout"),
        wide=True,
    )


def step_time_figure(group: WorkerGroupHistory) -> LineFigure | None:
    """Step time of each worker without waiting: a slow one stands out."""
    timed = [worker for worker in group.workers if len(worker.steps) > 1]
    # The slowest are what people look for.
    slowest = sorted(timed, key=lambda worker: -median(worker.compute_s))[:_MOST_WORKERS]
    shown = [worker for worker in timed if worker in slowest]
    if not shown:
        return None
    return LineFigure(
        id="workers",
        title=text("workers.step_time"),
        x=step_axis([step for worker in shown for step in worker.steps], text("step")),
        y=fit_axis(
            [value for worker in shown for value in worker.compute_s],
            unit="duration",
            padding=_PADDING,
        ),
        series=tuple(
            Series(
                key=f"worker-{worker.worker}",
                name=text("workers.worker", worker=worker.worker),
                x=worker.steps,
                y=worker.compute_s,
                colour=colour,
            )
            for colour, worker in enumerate(shown, 1)
        ),
        palette="workers",
        wide=True,
    )


def worker_bars(group: WorkerGroupHistory) -> BarFigure:
    """Step time of each worker, split into computing and waiting."""
    return BarFigure(
        id="worker-bars",
        title=text("workers.each"),
        unit="duration",
        bars=tuple(
            Bar(
                key=worker.worker,
                name=same(worker.worker),
                segments=(
                    BarSegment(
                        key="compute",
                        name=text("workers.compute"),
                        value=(worker.step_s or 0.0) - wait_s,
                    ),
                    BarSegment(key="wait", name=text("workers.waiting"), value=wait_s),
                ),
                label="–" if worker.step_s is None else show_duration(worker.step_s),
            )
            for worker in group.workers
            for wait_s in (min(worker.wait_s or 0.0, worker.step_s or 0.0),)
        ),
    )


def layout_figure(group: WorkerGroupHistory, change: GroupGeneration) -> LayoutFigure:
    """The ranks of one generation at their positions in the layout."""
    sizes = {
        axis: max((getattr(rank, axis) for rank in change.ranks), default=0) + 1 for axis in AXES
    }
    lost = {fault.rank: fault.cause for fault in group.faults if fault.struck == change.key}
    at_position = {(rank.dp, rank.pp, rank.fsdp, rank.tp): rank for rank in change.ranks}
    cells = tuple(
        tuple(
            tuple(
                _tile(at_position.get((dp, pp, fsdp, tp)), sizes, lost)
                for fsdp in range(sizes["fsdp"])
                for tp in range(sizes["tp"])
            )
            for pp in range(sizes["pp"])
        )
        for dp in range(sizes["dp"])
    )
    # A long row of replicas or shards is folded: nobody scrolls through thirty tiles.
    is_folded = sizes["pp"] == 1 and sizes["dp"] > _LONG_ROW
    shards, slices = sizes["fsdp"], sizes["tp"]
    across = math.ceil(math.sqrt(shards / slices)) if shards > _LONG_ROW else 1
    following = next((later for later in group.changes if later.key > change.key), None)
    return LayoutFigure(
        id=f"layout-{change.attempt}-{change.generation}",
        layout=change.layout,
        colour=_layout_colours(group)[change.layout],
        first_step=change.from_step + 1,
        last_step=following.from_step if following else None,
        sizes=sizes,
        stages=tuple(change.stages[pp :: sizes["pp"]] for pp in range(sizes["pp"])),
        cells=cells,
        columns=min(math.ceil(math.sqrt(sizes["dp"])), 8) if is_folded else sizes["pp"],
        tile_columns=slices * across,
        has_replica_rows=sizes["dp"] > 1 and not is_folded,
        colour_meaning=_colour_meaning(stages=sizes["pp"], parts=shards * slices),
        notes=tuple(
            text(f"layout.split.{axis}", count=sizes[axis])
            for axis in ("dp", "fsdp", "tp", "pp")
            if sizes[axis] > 1
        ),
    )


def _layout_colours(group: WorkerGroupHistory) -> dict[str, int]:
    """The same colour for the same layout, however often the run came back to it."""
    layouts = dict.fromkeys(change.layout for change in group.changes)
    return {layout: index % NUM_COLOURS + 1 for index, layout in enumerate(layouts)}


def _colour_meaning(*, stages: int, parts: int) -> BilingualText:
    if stages * parts <= NUM_COLOURS:
        return text("layout.colours")
    is_distinct = parts <= NUM_COLOURS
    return text("layout.colours_in_stage" if is_distinct else "layout.colours_repeat")


def _tile(
    rank: WorkerRank | None, sizes: dict[str, int], lost: dict[int | None, str]
) -> RankTile | None:
    if rank is None:
        return None
    # The same colour wherever the same part of the weights lies.
    part = (rank.pp * sizes["fsdp"] + rank.fsdp) * sizes["tp"] + rank.tp
    replicas = sizes["dp"] * sizes["fsdp"]
    holds: list[BilingualText] = []
    if sizes["fsdp"] > 1:
        holds.append(text("layout.shard", this=rank.fsdp + 1, all=sizes["fsdp"]))
    if sizes["tp"] > 1:
        holds.append(text("layout.slice", this=rank.tp + 1, all=sizes["tp"]))
    if replicas > 1:
        share = rank.dp * sizes["fsdp"] + rank.fsdp + 1
        holds.append(text("layout.samples", this=share, all=replicas))
    return RankTile(
        rank=rank.rank,
        worker=rank.worker,
        host=rank.host,
        pid=rank.pid,
        colour=part % NUM_COLOURS + 1,
        holds=tuple(holds),
        lost=known_text("fault", lost[rank.rank]) if rank.rank in lost else None,
    )


def _moments(group: WorkerGroupHistory) -> Iterator[EventMarks]:
    """Faults, stragglers, and changes of the layout that no fault forced."""
    instants = {
        "fault": [fault.at for fault in group.faults],
        "straggler": [straggler.at for straggler in group.stragglers],
        "regroup": [change.at for change in _unforced(group)],
    }
    for kind, ats in instants.items():
        if ats:
            elapsed = sorted(round(group.elapsed_at(at), 3) for at in ats)
            yield EventMarks(kind=kind, name=text(f"mark.{kind}"), x=tuple(elapsed[:_MOST_MARKS]))


def _unforced(group: WorkerGroupHistory) -> Iterator[GroupGeneration]:
    for before, change in pairwise(group.changes):
        if not any(before.at <= fault.at <= change.at for fault in group.faults):
            yield change
