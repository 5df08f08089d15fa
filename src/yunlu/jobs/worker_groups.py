"""Worker groups of a run: layouts, lost workers, time lost, figures of each worker."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from yunlu.jobs.report_model import WorkerGroupHistory, WorkerStats
from yunlu.jobs.run_log import held_up_s, number, step_s, thin
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import Area, Document, Log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from yunlu.jobs.run_log import Point, Record, RunLog
    from yunlu.runs.events import ErrorRaised, StragglerSeen, WorkerLost
    from yunlu.runs.fold import GroupGeneration, LostWorker, RunView
    from yunlu.runs.run_store import RunStore

_Key = tuple[int, int]
"""Attempt and generation."""
_MOST_POINTS = 300


def read_worker_groups(
    log: RunLog, samples: Iterable[dict[str, Any]] = ()
) -> WorkerGroupHistory | None:
    """History of the worker group; None where one worker trained alone."""
    changes, faults = log.view.worker_groups, log.view.lost_workers
    if not changes:
        return None
    records = [record for record in log.records if "at" in record]
    pauses = _pauses(log)
    wall_s, lost = _time_lost(records, changes, pauses)
    lost_s = sum(lost.values())
    busy_s = sum(step_s(record) for record in records)
    waited_s = sum(record.get("communication_s", 0.0) for record in records)
    elapsed_s, done_steps = _course(records, pauses)
    return WorkerGroupHistory(
        effective=1 - lost_s / wall_s if wall_s > 0 else None,
        wall_s=wall_s,
        lost_s=lost_s,
        redone_steps=sum(change.redone_steps for change in changes),
        communication_share=waited_s / busy_s if busy_s else None,
        changes=tuple(
            change.model_copy(update={"lost_s": lost.get(change.key, change.lost_s)})
            for change in changes
        ),
        faults=faults,
        stragglers=tuple(seen for seen in log.view.stragglers if not seen.recovered),
        workers=tuple(_members(changes, faults, samples)),
        began_at=records[0]["at"] - step_s(records[0]) if records else changes[0].at,
        pauses=pauses,
        elapsed_s=elapsed_s,
        done_steps=done_steps,
    )


def read_samples(run: RunStore) -> Iterator[dict[str, Any]]:
    """Samples that the workers report, about once a second."""
    for record, _ in run.read_log(Log.RANK_METRICS):
        if isinstance(record, dict):
            yield record


def newest_worker_group(run: RunStore) -> GroupGeneration | None:
    """The current layout of a run; None where it has a single worker."""
    if not any(map(run.has, (Document.WORKER_GROUP, Log.RANK_METRICS, Area.LOGS))):
        return None  # avoids reading every log when many runs are listed
    return read_view(run).worker_group


def name_worker(worker: LostWorker | WorkerLost | StragglerSeen | ErrorRaised) -> str:
    """``worker 3 (rank 2 on node-a)``."""
    known = [f"rank {worker.rank}"] if worker.rank is not None else []
    known += [f"on {worker.host}"] if worker.host else []
    return f"worker {worker.worker}" + (f" ({' '.join(known)})" if known else "")


def gist_of(detail: str | None) -> str:
    """One-line summary: the last line of a traceback, the first of other texts."""
    lines = (detail or "").strip().splitlines() or [""]
    return lines[-1 if lines[0].startswith("Traceback") else 0]


def first_failure(view: RunView) -> LostWorker | None:
    """The worker whose own error came first in the last attempt: the others failed because of it."""
    newest = max(len(view.attempts), 1)
    failed = (lost for lost in view.lost_workers if lost.cause == "failed")
    return next((lost for lost in failed if lost.attempt == newest), None)


def _time_lost(
    records: Sequence[Record],
    changes: Sequence[GroupGeneration],
    pauses: Sequence[tuple[float, float]],
) -> tuple[float, dict[_Key, float]]:
    """Seconds since the first step, and the time lost by each change.

    Within a generation all time counts as used: an evaluation or a checkpoint is work too. Between
    two steps of different generations only the later step itself does, so that steps which had
    to be done again are lost as a whole.
    """
    wall_s = step_s(records[0]) if records else 0.0
    lost: dict[_Key, float] = {}
    for before, after in pairwise(records):
        gap_s = _span_s(before["at"], after["at"], pauses)
        wall_s += gap_s
        if _key(before) == _key(after):
            continue
        between = [change for change in changes if _key(before) < change.key <= _key(after)]
        cause = between[0].key if between else _key(after)
        lost[cause] = max(gap_s - held_up_s(before) - step_s(after), 0.0)
    return wall_s, lost


def _pauses(log: RunLog) -> tuple[tuple[float, float], ...]:
    """Time between two attempts, without workers."""
    return tuple(
        (before.ended_at, after.started_at)
        for before, after in pairwise(log.attempts)
        if after.started_at > before.ended_at
    )


def _span_s(since: float, until: float, pauses: Sequence[tuple[float, float]]) -> float:
    paused = sum(max(min(until, end) - max(since, start), 0.0) for start, end in pauses)
    return max(until - since - paused, 0.0)


def _course(
    records: Sequence[Record], pauses: Sequence[tuple[float, float]]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Steps done over time; flat while nothing new was done."""
    if not records:
        return (), ()
    began_at = records[0]["at"] - step_s(records[0])
    # Milliseconds: whole numbers, as points have them on their first axis.
    points: list[Point] = [(0, records[0]["step"] - 1)]
    before = records[0]
    for after in records:
        if _key(before) != _key(after):
            resumed_at = after["at"] - step_s(after)
            points.append((_ms(_span_s(began_at, resumed_at, pauses)), before["step"]))
        points.append((_ms(_span_s(began_at, after["at"], pauses)), after["step"]))
        before = after
    retained = thin(points)
    return tuple(ms / 1000 for ms, _ in retained), tuple(int(step) for _, step in retained)


@dataclass(slots=True)
class _Sums:
    generation: int | None = None
    step_s: float = 0.0
    wait_s: float = 0.0
    count: int = 0
    memory_bytes: float | None = None
    compute: list[Point] = field(default_factory=list)


def _members(
    changes: Sequence[GroupGeneration],
    faults: Sequence[LostWorker],
    samples: Iterable[dict[str, Any]],
) -> Iterator[WorkerStats]:
    """Every worker that ever held a rank: current ones by rank, then those that left."""
    sums = _sum_up(samples)
    known = {rank.worker: rank for change in changes for rank in change.ranks}
    now = {rank.worker: rank.rank for rank in changes[-1].ranks}
    lost = {fault.worker: fault.cause for fault in faults if fault.worker not in now}
    order = sorted(known, key=lambda worker: (worker not in now, now.get(worker, 0)))
    for worker in order:
        own = sums.get(worker) or _Sums()
        retained = thin(own.compute, _MOST_POINTS)
        yield WorkerStats(
            worker=worker,
            rank=now.get(worker),
            host=known[worker].host,
            pid=known[worker].pid,
            step_s=own.step_s / own.count if own.count else None,
            wait_s=own.wait_s / own.count if own.count else None,
            memory_bytes=own.memory_bytes,
            lost=lost.get(worker),
            steps=tuple(step for step, _ in retained),
            compute_s=tuple(value for _, value in retained),
        )


def _sum_up(samples: Iterable[dict[str, Any]]) -> dict[str, _Sums]:
    sums: dict[str, _Sums] = defaultdict(_Sums)
    for sample in samples:
        step, given = _whole(sample.get("step")), sample.get("ranks")
        generation = _whole(sample.get("generation"))
        for item in given if isinstance(given, list) else ():
            if not isinstance(item, dict):
                continue
            own = sums[_text(item.get("worker"))]
            if own.generation != generation:  # steps of two layouts have no common mean
                own.generation, own.step_s, own.wait_s, own.count = generation, 0.0, 0.0, 0
            _add(own, item, step)
    return sums


def _add(own: _Sums, sample: dict[str, Any], step: int | None) -> None:
    memory = number(sample.get("memory_bytes"))
    if memory is not None and math.isfinite(memory):
        own.memory_bytes = max(own.memory_bytes or 0.0, memory)
    took, waited = number(sample.get("step_s")), number(sample.get("wait_s")) or 0.0
    if not took or not math.isfinite(took + waited):
        return  # it has not done a step yet
    own.step_s, own.wait_s, own.count = own.step_s + took, own.wait_s + waited, own.count + 1
    if step is not None:
        while own.compute and step <= own.compute[-1][0]:  # repeated, or not yet the next one
            own.compute.pop()
        own.compute.append((step, max(took - waited, 0.0)))


def _key(record: Record) -> _Key:
    return int(record.get("attempt", 1)), int(record.get("generation", 0))


def _whole(value: object) -> int | None:
    result = number(value)
    return int(result) if result is not None and math.isfinite(result) else None


def _text(value: object) -> str:
    return "?" if value is None else str(value)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
