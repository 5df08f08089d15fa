"""The crew on the page: pictures of its layouts, what happened to it, what each worker did."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from yunlu.core.units import show_duration
from yunlu.jobs.worker_groups import gist_of
from yunlu.planning.layout import AXES
from yunlu.render.figures.run import COLOURS, course_figure, layout_colours, workers_figure
from yunlu.render.i18n.texts import known_text, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.report_model import WorkerGroupHistory, WorkerGroupChange, WorkerFault, RankPosition

_MOST_PICTURES = 8
_MOST_ROWS = 200
_LONGEST = 160
_LONG_ROW = 4


def picture_crew(worker_group: WorkerGroupHistory) -> dict[str, Any]:
    """Everything that the page's section about the workers shows."""
    figures = (course_figure(worker_group), workers_figure(worker_group))
    earlier = worker_group.changes[:-1]
    rows = list(_rows(worker_group))
    return {
        "cards": list(_cards(worker_group)),
        "figures": [figure for figure in figures if figure is not None],
        "newest": picture_layout(worker_group, worker_group.newest),
        "earlier": [picture_layout(worker_group, change) for change in earlier[-_MOST_PICTURES:]],
        "left_out": max(0, len(earlier) - _MOST_PICTURES),
        "rows": rows[-_MOST_ROWS:],
        "rows_total": len(rows),
        "members": list(_members(worker_group)),
    }


def picture_layout(worker_group: WorkerGroupHistory, change: WorkerGroupChange) -> dict[str, Any]:
    """Stages from left to right, replicas from top to bottom, shards and cuts inside each cell."""
    sizes = {
        axis: max((getattr(each, axis) for each in change.ranks), default=0) + 1 for axis in AXES
    }
    lost = {fault.rank: fault.what for fault in worker_group.faults if fault.struck == change.key}
    at_place = {(each.dp, each.pp, each.fsdp, each.tp): each for each in change.ranks}
    rows = [
        [
            [
                _tile(at_place.get((dp, pp, fsdp, tp)), sizes, lost)
                for fsdp in range(sizes["fsdp"])
                for tp in range(sizes["tp"])
            ]
            for pp in range(sizes["pp"])
        ]
        for dp in range(sizes["dp"])
    ]
    # A long row of replicas or shards is folded: nobody scrolls through thirty tiles.
    folded = sizes["pp"] == 1 and sizes["dp"] > _LONG_ROW
    shards, cuts = sizes["fsdp"], sizes["tp"]
    across = math.ceil(math.sqrt(shards / cuts)) if shards > _LONG_ROW else 1
    following = next((each for each in worker_group.changes if each.key > change.key), None)
    return {
        "change": change,
        "sizes": sizes,
        "colour": layout_colours(worker_group)[change.layout],
        "until": following.from_step if following else None,
        "stages": [change.stages[pp :: sizes["pp"]] for pp in range(sizes["pp"])],
        "rows": rows,
        "columns": min(math.ceil(math.sqrt(sizes["dp"])), 8) if folded else sizes["pp"],
        "in_rows": sizes["dp"] > 1 and not folded,
        "cuts": cuts * across,
        "colours": _meaning_of_colours(stages=sizes["pp"], parts=shards * cuts),
        "meanings": [
            text(f"layout.{axis}", count=sizes[axis])
            for axis in ("dp", "fsdp", "tp", "pp")
            if sizes[axis] > 1
        ],
    }


def _meaning_of_colours(*, stages: int, parts: int) -> str:
    if stages * parts <= COLOURS:
        return "layout.colours"
    return "layout.colours_in_stage" if parts <= COLOURS else "layout.colours_repeat"


def _tile(
    each: RankPosition | None, sizes: dict[str, int], lost: dict[int | None, str]
) -> dict[str, Any] | None:
    if each is None:
        return None
    # The same colour wherever the same part of the weights lies.
    part = (each.pp * sizes["fsdp"] + each.fsdp) * sizes["tp"] + each.tp
    replicas = sizes["dp"] * sizes["fsdp"]
    holds: list[Markup] = []
    if sizes["fsdp"] > 1:
        holds.append(text("layout.shard", this=each.fsdp + 1, all=sizes["fsdp"]))
    if sizes["tp"] > 1:
        holds.append(text("layout.cut", this=each.tp + 1, all=sizes["tp"]))
    if replicas > 1:
        share = each.dp * sizes["fsdp"] + each.fsdp + 1
        holds.append(text("layout.samples", this=share, all=replicas))
    return {
        "rank": each,
        "colour": part % COLOURS + 1,
        "holds": holds,
        "lost": known_text("fault", lost[each.rank]) if each.rank in lost else None,
    }


def _cards(worker_group: WorkerGroupHistory) -> Iterator[tuple[Markup, str, Markup]]:
    if worker_group.effective is not None:
        remark = text("crew.lost", lost=show_duration(worker_group.lost_s), wall=show_duration(worker_group.wall_s))
        yield text("crew.effective"), f"{worker_group.effective * 100:.1f} %", remark
    hosts = len({each.host for each in worker_group.newest.ranks})
    remark = text("crew.on_hosts", count=hosts)
    yield (
        text("crew.now"),
        worker_group.newest.layout,
        text("crew.count", workers=len(worker_group.newest.ranks)) + " · " + remark,
    )
    yield (
        text("crew.changes"),
        str(len(worker_group.changes) - 1),
        text("crew.redone", steps=f"{worker_group.redone_steps:,}"),
    )
    kinds = Counter(fault.what for fault in worker_group.faults)
    remark = Markup(" · ").join(known_text("fault", what) + f" {n}" for what, n in kinds.items())
    yield text("crew.faults"), str(kinds.total() - kinds["left"]), remark
    if worker_group.communication_share is not None:
        share = f"{worker_group.communication_share * 100:.1f} %"
        yield text("crew.communication"), share, text("crew.of_step")


def _rows(worker_group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """Faults, changes and stragglers in the order they happened."""
    found = [(fault.at, 0, _fault_row(fault)) for fault in worker_group.faults]
    for before, change in pairwise([None, *worker_group.changes]):
        if change is not None:
            found.append((change.at, 1, _change_row(before, change)))
    for each in worker_group.stragglers:
        slow = text("crew.slow", ratio=f"{each.ratio:.1f}")
        found.append(
            (
                each.at,
                2,
                {
                    "kind": "straggler",
                    "step": each.step,
                    "what": _worker(each.worker, each.rank, each.host, slow),
                    "why": "",
                },
            )
        )
    for at, _, row in sorted(found, key=lambda each: each[:2]):
        elapsed_s = worker_group.elapsed_at(at)
        yield {
            "elapsed": show_duration(elapsed_s) if elapsed_s > 0 else "–",
            "lost": None,
            "redone": 0,
            **row,
        }


def _fault_row(fault: WorkerFault) -> dict[str, Any]:
    why = gist_of(fault.detail)
    return {
        "kind": "fault",
        "step": fault.step,
        "what": _worker(fault.worker, fault.rank, fault.host, known_text("fault", fault.what)),
        "why": why if len(why) <= _LONGEST else why[: _LONGEST - 1] + "…",
    }


def _change_row(before: WorkerGroupChange | None, change: WorkerGroupChange) -> dict[str, Any]:
    workers = len(change.ranks)
    if before is None:
        what = text("crew.began", workers=workers, layout=change.layout)
    elif before.layout == change.layout:
        what = text("crew.same", workers=workers, layout=change.layout)
    else:
        what = text("crew.became", workers=workers, before=before.layout, layout=change.layout)
    return {
        "kind": "crew",
        "step": change.from_step,
        "what": what,
        "why": known_text("crew.reason", change.reason),
        "lost": show_duration(change.lost_s) if change.lost_s is not None and before else None,
        "redone": change.redone_steps,
    }


def _worker(worker: str, rank: int | None, host: str, what: Markup) -> Markup:
    where = "–" if rank is None else rank
    return text("crew.who", worker=worker, rank=where, host=host or "–", what=what)


def _members(worker_group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """Bars as shares of the longest step."""
    longest = max((each.step_s or 0.0 for each in worker_group.workers), default=0.0)
    slow = {each.worker: each.ratio for each in worker_group.stragglers}
    for each in worker_group.workers:
        wait_s = min(each.wait_s or 0.0, each.step_s or 0.0)
        yield {
            "row": each,
            "compute": ((each.step_s or 0.0) - wait_s) / longest if longest else 0.0,
            "wait": wait_s / longest if longest else 0.0,
            "lost": known_text("fault", each.lost) if each.lost else None,
            "idle": each.rank is None and not each.lost,
            "slow": slow.get(each.worker),
        }
