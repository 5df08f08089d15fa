"""What a run went through: trouble and what was done about it, noise, padding, traced steps."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from yunlu.core.units import show_count, show_duration
from yunlu.jobs.run_log import number, points, samples_of_steps
from yunlu.jobs.report_model import Finding, Incident, PaddingCost, TracedSteps
from yunlu.runs.run_dir import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.curves import Point
    from yunlu.jobs.run_log import Record, RunLog
    from yunlu.jobs.report_model import WorkerGroupHistory
    from yunlu.planning.plan import Plan

_INCIDENTS = (
    EventKind.SKIP,
    EventKind.ROLLBACK,
    EventKind.OUT_OF_MEMORY,
    EventKind.PRECISION,
)
_MUCH_PADDING = 0.2
_MUCH_WAITING = 0.4
_LITTLE_EFFECTIVE = 0.95
_FAR = 2.0
"""A batch this many times above or below the noise scale is worth a word."""


def read_incidents(recorded: RunLog) -> tuple[Incident, ...]:
    """Skips, rollbacks, memory that ran out, modules that moved."""
    return tuple(
        Incident(kind=event.kind.value, step=int(step), data=event.data)  # pyright: ignore[reportArgumentType]
        for event in recorded.events
        if event.kind in _INCIDENTS
        and (step := number(event.data.get("step"))) is not None
        and math.isfinite(step)
    )


def read_padding(records: Sequence[Record]) -> PaddingCost | None:
    """Tokens and padding of the whole run, where samples have lengths."""
    tokens = sum(record["tokens"] for record in records if "tokens" in record)
    if not tokens:
        return None
    return PaddingCost(tokens=tokens, padding=sum(record.get("padding", 0.0) for record in records))


def read_trace(recorded: RunLog) -> TracedSteps | None:
    """The newest trace."""
    data = recorded.last(EventKind.TRACE)
    if data is None:
        return None
    known: dict[str, Any] = {"first_step": None, "wall_s": None, "phases": (), "table": ()}
    known |= {key: data[key] for key in TracedSteps.model_fields if key in data}
    try:
        return TracedSteps.model_validate(known)
    except ValidationError:  # of another version
        return None


def padding_shares(records: Sequence[Record]) -> list[Point]:
    """Padding in each step's tokens."""
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


def find(
    recorded: RunLog,
    *,
    plan: Plan | None,
    incidents: Sequence[Incident],
    padding: PaddingCost | None,
    worker_group: WorkerGroupHistory | None = None,
) -> tuple[Finding, ...]:
    """What stands out, the most serious first."""
    found = [
        *_about_crew(worker_group),
        *_about_memory(incidents),
        *_about_rollbacks(incidents),
        *_about_skips(incidents),
        *_about_precision(incidents),
        *_about_noise(recorded.records),
        *_about_padding(padding, plan),
    ]
    return tuple(Finding(key=key, fields=fields) for key, fields in found)


_Said = tuple[str, dict[str, str]]


def _about_crew(worker_group: WorkerGroupHistory | None) -> Iterator[_Said]:
    if worker_group is None:
        return
    if worker_group.effective is not None and worker_group.effective < _LITTLE_EFFECTIVE and len(worker_group.changes) > 1:
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
        worst = max(worker_group.stragglers, key=lambda each: each.ratio)
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
    if worker_group.communication_share is not None and worker_group.communication_share > _MUCH_WAITING:
        yield "communication", {"share": f"{worker_group.communication_share * 100:.0f} %"}


def _about_memory(incidents: Sequence[Incident]) -> Iterator[_Said]:
    ran_out = [each for each in incidents if each.kind == "out_of_memory"]
    if ran_out:
        last = ran_out[-1]
        yield (
            "out_of_memory",
            {
                "count": str(len(ran_out)),
                "step": f"{last.step:,}",
                "micro_batch": str(last.data.get("micro_batch", "–")),
            },
        )


def _about_rollbacks(incidents: Sequence[Incident]) -> Iterator[_Said]:
    went_back = [each for each in incidents if each.kind == "rollback"]
    if went_back:
        moves = [f"{each.step:,} → {_whole(each.data.get('to_step'))}" for each in went_back[:5]]
        more = ", …" if len(went_back) > len(moves) else ""
        yield "rollback", {"count": str(len(went_back)), "moves": ", ".join(moves) + more}


def _about_skips(incidents: Sequence[Incident]) -> Iterator[_Said]:
    skipped = [each for each in incidents if each.kind == "skip"]
    why = Counter(str(each.data.get("reason")) for each in skipped)
    # A scale that is too large is how the right one is found: no trouble, and so said apart.
    overflows = why.pop("overflow", 0)
    if why:
        first = next(each for each in skipped if each.data.get("reason") != "overflow")
        fields = {"count": why.total(), "not_finite": why["not finite"], "spikes": why["spike"]}
        yield (
            "skip",
            {key: str(count) for key, count in fields.items()} | {"step": f"{first.step:,}"},
        )
    if overflows:
        yield "overflow", {"count": str(overflows)}


def _about_precision(incidents: Sequence[Incident]) -> Iterator[_Said]:
    moves = [each for each in incidents if each.kind == "precision"]
    if not moves:
        return
    now = {str(each.data.get("module")): each.data.get("to") for each in moves}
    fields = {"full": str(sum(to == "full" for to in now.values())), "moves": str(len(moves))}
    low_share = number(moves[-1].data.get("low_share"))
    yield "precision", fields | {"share": "–" if low_share is None else f"{low_share * 100:.0f} %"}


def _about_noise(records: Sequence[Record]) -> Iterator[_Said]:
    """McCandlish et al. (2018), section 2.2: B samples teach 1 / (1 + scale / B) of the most."""
    scales = [(step, scale) for step, scale in points(records, "noise_scale") if scale > 0]
    late = [scale for _, scale in scales[len(scales) * 3 // 4 :] if math.isfinite(scale)]
    sizes = list(samples_of_steps(records).values())
    if not late or not sizes:
        return
    scale, batch = median(late), median(sizes[len(sizes) * 3 // 4 :])
    place = "below" if batch * _FAR < scale else "above" if batch > scale * _FAR else "near"
    yield f"noise_{place}", {"batch": show_count(round(batch)), "scale": show_count(round(scale))}


def _about_padding(padding: PaddingCost | None, plan: Plan | None) -> Iterator[_Said]:
    if padding is not None and padding.share > _MUCH_PADDING and plan and plan.padding == "pad":
        yield "padding", {"share": f"{padding.share * 100:.0f} %"}


def _whole(value: object) -> str:
    step = number(value)
    return "–" if step is None or not math.isfinite(step) else f"{int(step):,}"
