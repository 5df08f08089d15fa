"""Health of a run for the report: incidents, gradient noise, padding, traced steps."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from yunlu.core.units import show_count, show_duration
from yunlu.jobs.report_model import Finding, PaddingCost
from yunlu.jobs.run_log import points, samples_of_steps
from yunlu.runs.events import MemoryExhausted, PrecisionChanged, RolledBack, StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.curves import Point
    from yunlu.jobs.report_model import WorkerGroupHistory
    from yunlu.jobs.run_log import Record, RunLog
    from yunlu.planning.plan import Plan
    from yunlu.runs.fold import Incident

_MUCH_PADDING = 0.2
_MUCH_WAITING = 0.4
_LITTLE_EFFECTIVE = 0.95
_FAR = 2.0
"""A batch this many times above or below the noise scale is reported."""


def read_padding(records: Sequence[Record]) -> PaddingCost | None:
    """Tokens and padding of the whole run, where samples have lengths."""
    tokens = sum(record["tokens"] for record in records if "tokens" in record)
    if not tokens:
        return None
    return PaddingCost(tokens=tokens, padding=sum(record.get("padding", 0.0) for record in records))


def padding_shares(records: Sequence[Record]) -> list[Point]:
    """Share of padding in each step's tokens."""
    return [
        (int(record["step"]), record.get("padding", 0.0) / record["tokens"])
        for record in records
        if record.get("tokens")
    ]


def true_tokens(records: Sequence[Record]) -> dict[int, float]:
    """Tokens of each step that are not padding."""
    return {
        int(record["step"]): record["tokens"] - record.get("padding", 0.0)
        for record in records
        if "tokens" in record
    }


def find_issues(
    log: RunLog,
    *,
    plan: Plan | None,
    incidents: Sequence[Incident],
    padding: PaddingCost | None,
    worker_group: WorkerGroupHistory | None = None,
) -> tuple[Finding, ...]:
    """Issues, the most serious first."""
    result = [
        *_worker_group_issues(worker_group),
        *_about_memory(incidents),
        *_about_rollbacks(incidents),
        *_about_skips(incidents),
        *_about_precision(incidents),
        *_about_noise(log.records),
        *_about_padding(padding, plan),
    ]
    return tuple(Finding(key=key, fields=fields) for key, fields in result)


_Said = tuple[str, dict[str, str]]


def _worker_group_issues(worker_group: WorkerGroupHistory | None) -> Iterator[_Said]:
    if worker_group is None:
        return
    if (
        worker_group.effective is not None
        and worker_group.effective < _LITTLE_EFFECTIVE
        and len(worker_group.changes) > 1
    ):
        before, worst = max(pairwise(worker_group.changes), key=lambda pair: pair[1].lost_s or 0.0)
        yield (
            "effective",
            {
                "share": f"{worker_group.effective * 100:.1f} %",
                "lost": show_duration(worker_group.lost_s),
                "step": f"{worst.from_step:,}",
                "move": f"{before.layout} → {worst.layout}",
                "most": show_duration(worst.lost_s or 0.0),
            },
        )
    if worker_group.redone_steps:
        yield "redone", {"count": f"{worker_group.redone_steps:,}"}
    if worker_group.stragglers:
        worst = max(worker_group.stragglers, key=lambda item: item.ratio)
        yield (
            "straggler",
            {
                "worker": worst.worker,
                "rank": "–" if worst.rank is None else str(worst.rank),
                "host": worst.host or "–",
                "ratio": f"{worst.ratio:.1f}",
                "step": "–" if worst.step is None else f"{worst.step:,}",
            },
        )
    if (
        worker_group.communication_share is not None
        and worker_group.communication_share > _MUCH_WAITING
    ):
        yield "communication", {"share": f"{worker_group.communication_share * 100:.0f} %"}


def _about_memory(incidents: Sequence[Incident]) -> Iterator[_Said]:
    exhausted = [event for event in incidents if isinstance(event, MemoryExhausted)]
    if exhausted:
        last = exhausted[-1]
        yield (
            "out_of_memory",
            {
                "count": str(len(exhausted)),
                "step": f"{last.step:,}",
                "micro_batch": str(last.micro_batch),
            },
        )


def _about_rollbacks(incidents: Sequence[Incident]) -> Iterator[_Said]:
    rollbacks = [event for event in incidents if isinstance(event, RolledBack)]
    if rollbacks:
        moves = [f"{event.step:,} → {event.to_step:,}" for event in rollbacks[:5]]
        more = ", …" if len(rollbacks) > len(moves) else ""
        yield "rollback", {"count": str(len(rollbacks)), "moves": ", ".join(moves) + more}


def _about_skips(incidents: Sequence[Incident]) -> Iterator[_Said]:
    skipped = [event for event in incidents if isinstance(event, StepSkipped)]
    why = Counter[str](event.reason for event in skipped)
    # A loss scale that is too large is normal while the right one is searched: reported apart.
    overflows = why.pop("overflow", 0)
    if why:
        first = next(event for event in skipped if event.reason != "overflow")
        fields = {"count": why.total(), "not_finite": why["not finite"], "spikes": why["spike"]}
        yield (
            "skip",
            {key: str(count) for key, count in fields.items()} | {"step": f"{first.step:,}"},
        )
    if overflows:
        yield "overflow", {"count": str(overflows)}


def _about_precision(incidents: Sequence[Incident]) -> Iterator[_Said]:
    moves = [event for event in incidents if isinstance(event, PrecisionChanged)]
    if not moves:
        return
    newest = {event.module: event.to for event in moves}
    fields = {"full": str(sum(to == "full" for to in newest.values())), "moves": str(len(moves))}
    yield "precision", fields | {"share": f"{moves[-1].low_share * 100:.0f} %"}


def _about_noise(records: Sequence[Record]) -> Iterator[_Said]:
    """McCandlish et al. (2018), section 2.2: B samples teach 1 / (1 + scale / B) of the most."""
    scales = [(step, scale) for step, scale in points(records, "noise_scale") if scale > 0]
    late = [scale for _, scale in scales[len(scales) * 3 // 4 :] if math.isfinite(scale)]
    sizes = list(samples_of_steps(records).values())
    if not late or not sizes:
        return
    scale, batch = median(late), median(sizes[len(sizes) * 3 // 4 :])
    index = "below" if batch * _FAR < scale else "above" if batch > scale * _FAR else "near"
    yield f"noise_{index}", {"batch": show_count(round(batch)), "scale": show_count(round(scale))}


def _about_padding(padding: PaddingCost | None, plan: Plan | None) -> Iterator[_Said]:
    if padding is not None and padding.share > _MUCH_PADDING and plan and plan.padding == "pad":
        yield "padding", {"share": f"{padding.share * 100:.0f} %"}
