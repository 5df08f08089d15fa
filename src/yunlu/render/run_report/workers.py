"""The crew on the page: pictures of its layouts, what happened to it, what each worker did."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from yunlu.core.units import show_duration
from yunlu.jobs.crew import gist_of
from yunlu.planning.layout import AXES
from yunlu.render.figures.run import COLOURS, course_figure, layout_colours, workers_figure
from yunlu.render.i18n.texts import known_text, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.report_model import Crew, CrewChange, CrewFault, CrewRank

_MOST_PICTURES = 8
_MOST_ROWS = 200
_LONGEST = 160
_LONG_ROW = 4


def picture_crew(crew: Crew) -> dict[str, Any]:
    """Everything that the page's section about the workers shows."""
    figures = (course_figure(crew), workers_figure(crew))
    earlier = crew.changes[:-1]
    rows = list(_rows(crew))
    return {
        "cards": list(_cards(crew)),
        "figures": [figure for figure in figures if figure is not None],
        "newest": picture_layout(crew, crew.newest),
        "earlier": [picture_layout(crew, change) for change in earlier[-_MOST_PICTURES:]],
        "left_out": max(0, len(earlier) - _MOST_PICTURES),
        "rows": rows[-_MOST_ROWS:],
        "rows_total": len(rows),
        "members": list(_members(crew)),
    }


def picture_layout(crew: Crew, change: CrewChange) -> dict[str, Any]:
    """Stages from left to right, replicas from top to bottom, shards and cuts inside each cell."""
    sizes = {
        axis: max((getattr(each, axis) for each in change.ranks), default=0) + 1 for axis in AXES
    }
    lost = {fault.rank: fault.what for fault in crew.faults if fault.struck == change.key}
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
    following = next((each for each in crew.changes if each.key > change.key), None)
    return {
        "change": change,
        "sizes": sizes,
        "colour": layout_colours(crew)[change.layout],
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
    each: CrewRank | None, sizes: dict[str, int], lost: dict[int | None, str]
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


def _cards(crew: Crew) -> Iterator[tuple[Markup, str, Markup]]:
    if crew.effective is not None:
        remark = text("crew.lost", lost=show_duration(crew.lost_s), wall=show_duration(crew.wall_s))
        yield text("crew.effective"), f"{crew.effective * 100:.1f} %", remark
    hosts = len({each.host for each in crew.newest.ranks})
    remark = text("crew.on_hosts", count=hosts)
    yield (
        text("crew.now"),
        crew.newest.layout,
        text("crew.count", workers=len(crew.newest.ranks)) + " · " + remark,
    )
    yield (
        text("crew.changes"),
        str(len(crew.changes) - 1),
        text("crew.redone", steps=f"{crew.redone_steps:,}"),
    )
    kinds = Counter(fault.what for fault in crew.faults)
    remark = Markup(" · ").join(known_text("fault", what) + f" {n}" for what, n in kinds.items())
    yield text("crew.faults"), str(kinds.total() - kinds["left"]), remark
    if crew.communication_share is not None:
        share = f"{crew.communication_share * 100:.1f} %"
        yield text("crew.communication"), share, text("crew.of_step")


def _rows(crew: Crew) -> Iterator[dict[str, Any]]:
    """Faults, changes and stragglers in the order they happened."""
    found = [(fault.at, 0, _fault_row(fault)) for fault in crew.faults]
    for before, change in pairwise([None, *crew.changes]):
        if change is not None:
            found.append((change.at, 1, _change_row(before, change)))
    for each in crew.stragglers:
        slow = text("crew.slow", ratio=f"{each.ratio:.1f}")
        found.append(
            (
                each.at,
                2,
                {
                    "kind": "straggler",
                    "step": each.step,
                    "what": _worker(each.member, each.rank, each.host, slow),
                    "why": "",
                },
            )
        )
    for at, _, row in sorted(found, key=lambda each: each[:2]):
        elapsed_s = crew.elapsed_at(at)
        yield {
            "elapsed": show_duration(elapsed_s) if elapsed_s > 0 else "–",
            "lost": None,
            "redone": 0,
            **row,
        }


def _fault_row(fault: CrewFault) -> dict[str, Any]:
    why = gist_of(fault.detail)
    return {
        "kind": "fault",
        "step": fault.step,
        "what": _worker(fault.member, fault.rank, fault.host, known_text("fault", fault.what)),
        "why": why if len(why) <= _LONGEST else why[: _LONGEST - 1] + "…",
    }


def _change_row(before: CrewChange | None, change: CrewChange) -> dict[str, Any]:
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


def _worker(member: str, rank: int | None, host: str, what: Markup) -> Markup:
    where = "–" if rank is None else rank
    return text("crew.who", member=member, rank=where, host=host or "–", what=what)


def _members(crew: Crew) -> Iterator[dict[str, Any]]:
    """Bars as shares of the longest step."""
    longest = max((each.step_s or 0.0 for each in crew.members), default=0.0)
    slow = {each.member: each.ratio for each in crew.stragglers}
    for each in crew.members:
        wait_s = min(each.wait_s or 0.0, each.step_s or 0.0)
        yield {
            "row": each,
            "compute": ((each.step_s or 0.0) - wait_s) / longest if longest else 0.0,
            "wait": wait_s / longest if longest else 0.0,
            "lost": known_text("fault", each.lost) if each.lost else None,
            "idle": each.rank is None and not each.lost,
            "slow": slow.get(each.member),
        }
