"""Section of the run report about several workers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from yunlu.core.units import show_duration
from yunlu.jobs.worker_groups import gist_of
from yunlu.render.figures.workers import (
    layout_figure,
    progress_figure,
    step_time_figure,
    worker_bars,
)
from yunlu.render.format import show_fault
from yunlu.render.i18n.texts import known_text, same, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.report_model import WorkerGroupHistory
    from yunlu.render.i18n.texts import BilingualText
    from yunlu.runs.fold import GroupGeneration, LostWorker

_MOST_LAYOUTS = 8
_MOST_ROWS = 200
_LONGEST = 160


def present_workers(group: WorkerGroupHistory) -> dict[str, Any]:
    """Everything that the section shows."""
    earlier = group.changes[:-1]
    rows = list(_rows(group))
    return {
        "cards": list(_cards(group)),
        "progress": progress_figure(group),
        "step_time": step_time_figure(group),
        "newest": layout_figure(group, group.newest),
        "earlier": [layout_figure(group, change) for change in earlier[-_MOST_LAYOUTS:]],
        "left_out": max(0, len(earlier) - _MOST_LAYOUTS),
        "rows": rows[-_MOST_ROWS:],
        "rows_total": len(rows),
        "bars": worker_bars(group),
        "stats": list(_stats(group)),
    }


def _cards(group: WorkerGroupHistory) -> Iterator[tuple[BilingualText, str, BilingualText]]:
    if group.effective is not None:
        lost, wall = show_duration(group.lost_s), show_duration(group.wall_s)
        effective = f"{group.effective * 100:.1f} %"
        yield text("workers.effective"), effective, text("workers.lost", lost=lost, wall=wall)
    ranks = group.newest.ranks
    hosts = text("workers.on_hosts", count=len({rank.host for rank in ranks}))
    count = text("workers.count", workers=len(ranks))
    yield text("workers.now"), group.newest.layout, count + " · " + hosts
    redone = text("workers.redone", steps=f"{group.redone_steps:,}")
    yield text("workers.changes"), str(len(group.changes) - 1), redone
    kinds = Counter(fault.cause for fault in group.faults)
    remark = same("")
    for index, (kind, count) in enumerate(kinds.items()):
        remark = remark + (" · " if index else "") + known_text("fault", kind) + f" {count}"
    yield text("workers.faults"), str(kinds.total() - kinds["left"]), remark
    if group.communication_share is not None:
        share = f"{group.communication_share * 100:.1f} %"
        yield text("workers.communication"), share, text("workers.of_step")


def _rows(group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """Faults, changes and stragglers in the order they happened."""
    rows = [(fault.at, 0, _fault_row(fault)) for fault in group.faults]
    for before, change in pairwise([None, *group.changes]):
        if change is not None:
            rows.append((change.at, 1, _change_row(before, change)))
    for slow in group.stragglers:
        ratio = text("workers.slow", ratio=f"{slow.ratio:.1f}")
        name = _describe(slow.worker, slow.rank, slow.host, ratio)
        row = {"kind": "straggler", "step": slow.step, "name": name, "reason": ""}
        rows.append((slow.at, 2, row))
    for at, _, row in sorted(rows, key=lambda entry: entry[:2]):
        elapsed_s = group.elapsed_at(at)
        yield {
            "elapsed": show_duration(elapsed_s) if elapsed_s > 0 else "–",
            "lost": None,
            "redone": 0,
            **row,
        }


def _fault_row(fault: LostWorker) -> dict[str, Any]:
    reason = gist_of(fault.detail)
    return {
        "kind": "fault",
        "step": fault.step,
        "name": _describe(fault.worker, fault.rank, fault.host, show_fault(fault)),
        "reason": reason if len(reason) <= _LONGEST else reason[: _LONGEST - 1] + "…",
    }


def _change_row(before: GroupGeneration | None, change: GroupGeneration) -> dict[str, Any]:
    workers = len(change.ranks)
    if before is None:
        name = text("workers.began", workers=workers, layout=change.layout)
    elif before.layout == change.layout:
        name = text("workers.same", workers=workers, layout=change.layout)
    else:
        name = text("workers.became", workers=workers, before=before.layout, layout=change.layout)
    return {
        "kind": "regroup",
        "step": change.from_step,
        "name": name,
        "reason": change.reason,
        "lost": show_duration(change.lost_s) if change.lost_s is not None and before else None,
        "redone": change.redone_steps,
    }


def _describe(worker: str, rank: int | None, host: str, what: BilingualText) -> BilingualText:
    shown_rank = "–" if rank is None else rank
    return text("workers.who", worker=worker, rank=shown_rank, host=host or "–", what=what)


def _stats(group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """A row for each worker, beside its bar."""
    slow = {straggler.worker: straggler.ratio for straggler in group.stragglers}
    for worker in group.workers:
        yield {
            "row": worker,
            "lost": known_text("fault", worker.lost) if worker.lost else None,
            "idle": worker.rank is None and not worker.lost,
            "slow": slow.get(worker.worker),
        }
