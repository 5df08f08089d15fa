"""Worker groups of a run: layouts, lost workers, time lost, figures of each worker."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from yunlu.jobs.curve_buckets import CurveBuckets, thin
from yunlu.jobs.report_model import WorkerGroupHistory, WorkerStats
from yunlu.jobs.step_summary import held_up_seconds, step_seconds
from yunlu.runs.run_store import Log
from yunlu.runs.step_batches import find_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from yunlu.jobs.curve_buckets import Point
    from yunlu.jobs.logged_steps import RunLog
    from yunlu.runs.events import ErrorRaised, StragglerSeen, WorkerLost
    from yunlu.runs.fold import GroupGeneration, LostWorker, RunView
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.step_batches import StepBatch

FloatArray = NDArray[np.float64]

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
    pauses = _pauses(log)
    course = _Course(changes, pauses)
    with np.errstate(all="ignore"):  # damaged records have any numbers
        for batch in log.batches():
            course.add(batch.take(batch.has("at")))
    wall_s, lost, lost_s = course.wall_s, course.lost, sum(course.lost.values())
    points = course.done.points() if course.done.count else []
    return WorkerGroupHistory(
        effective=1 - lost_s / wall_s if wall_s > 0 else None,
        wall_s=wall_s,
        lost_s=lost_s,
        redone_steps=sum(change.redone_steps for change in changes),
        communication_share=course.waited_s / course.busy_s if course.busy_s else None,
        changes=tuple(
            change.model_copy(update={"lost_s": lost.get(change.key, change.lost_s)})
            for change in changes
        ),
        faults=faults,
        stragglers=tuple(seen for seen in log.view.stragglers if not seen.recovered),
        workers=tuple(_members(changes, faults, samples)),
        began_at=changes[0].at if course.began_at is None else course.began_at,
        pauses=pauses,
        elapsed_s=tuple(ms / 1000 for ms, _ in points),
        done_steps=tuple(int(step) for _, step in points),
    )


def read_samples(run: RunStore) -> Iterator[dict[str, Any]]:
    """Samples that the workers report, about once a second."""
    for record, _ in run.read_log(Log.RANK_METRICS):
        if isinstance(record, dict):
            yield record


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


class _Course:
    """Time and steps of a group, from its records in order.

    Within a generation all time counts as used: an evaluation or a checkpoint is work too. Between
    two steps of different generations only the later step itself does, so that steps which had
    to be done again are lost as a whole.
    """

    def __init__(
        self, changes: Sequence[GroupGeneration], pauses: Sequence[tuple[float, float]]
    ) -> None:
        self._changes, self._pauses = changes, pauses
        self._before: _Instant | None = None
        self.began_at: float | None = None
        """When the first step began."""
        self.wall_s = self.busy_s = self.waited_s = 0.0
        """Of the wall, the seconds since the first step began."""
        self.lost: dict[_Key, float] = {}
        """Seconds by the change that caused it."""
        self.done = CurveBuckets()
        """Steps done over milliseconds; flat while nothing new was done."""

    def add(self, batch: StepBatch) -> None:
        if not batch.size:
            return
        at, seconds, held_up = batch.get("at"), step_seconds(batch), held_up_seconds(batch)
        attempts, generations = batch.get("attempt", 1.0), batch.get("generation")
        self.busy_s += float(seconds.sum())
        self.waited_s += float(batch.get("communication_s").sum())
        before = self._before
        if before is None:
            self.began_at = float(at[0] - seconds[0])
            self.wall_s = float(seconds[0])
            self.done.add(np.zeros(1), batch.step[:1] - 1)
            key = _key(attempts[0], generations[0])
            before = _Instant(at=float(at[0]), step=float(batch.step[0]), held_up_s=0.0, key=key)
        began_at = self.began_at or 0.0
        since = np.concatenate(([before.at], at[:-1]))
        gaps = self._spans_s(since, at)
        self.wall_s += float(gaps.sum())
        milliseconds = np.rint(self._spans_s(np.full(batch.size, began_at), at) * 1000)
        is_new = np.concatenate(
            (
                [_key(attempts[0], generations[0]) != before.key],
                (np.diff(attempts) != 0) | (np.diff(generations) != 0),
            )
        )
        changed = np.flatnonzero(is_new)
        steps_before = np.concatenate(([before.step], batch.step[:-1]))
        held_before = np.concatenate(([before.held_up_s], held_up[:-1]))
        for index in changed:
            old = before.key if index == 0 else _key(attempts[index - 1], generations[index - 1])
            self._lose(
                old,
                _key(attempts[index], generations[index]),
                float(gaps[index] - held_before[index] - seconds[index]),
            )
        resumed_at = at[changed] - seconds[changed]
        resumed = np.rint(self._spans_s(np.full(len(changed), began_at), resumed_at) * 1000)
        self.done.add(
            np.insert(milliseconds, changed, resumed),
            np.insert(batch.step, changed, steps_before[changed]),
        )
        self._before = _Instant(
            at=float(at[-1]),
            step=float(batch.step[-1]),
            held_up_s=float(held_up[-1]),
            key=_key(attempts[-1], generations[-1]),
        )

    def _lose(self, before: _Key, after: _Key, seconds: float) -> None:
        between = [change for change in self._changes if before < change.key <= after]
        self.lost[between[0].key if between else after] = max(seconds, 0.0)

    def _spans_s(self, since: FloatArray, until: FloatArray) -> FloatArray:
        """Seconds from one instant to another, without the pauses."""
        spans = until - since
        for start, end in self._pauses:
            overlap = np.minimum(until, end) - np.maximum(since, start)
            spans = spans - np.maximum(overlap, 0.0)
        return np.maximum(spans, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """The end of a step."""

    at: float
    step: float
    held_up_s: float
    key: _Key


def _pauses(log: RunLog) -> tuple[tuple[float, float], ...]:
    """Time between two attempts, without workers."""
    return tuple(
        (before.ended_at, after.started_at)
        for before, after in pairwise(log.attempts)
        if after.started_at > before.ended_at
    )


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
    memory = find_number(sample.get("memory_bytes"))
    if memory is not None and math.isfinite(memory):
        own.memory_bytes = max(own.memory_bytes or 0.0, memory)
    took, waited = find_number(sample.get("step_s")), find_number(sample.get("wait_s")) or 0.0
    if not took or not math.isfinite(took + waited):
        return  # it has not done a step yet
    own.step_s, own.wait_s, own.count = own.step_s + took, own.wait_s + waited, own.count + 1
    if step is not None:
        while own.compute and step <= own.compute[-1][0]:  # repeated, or not yet the next one
            own.compute.pop()
        own.compute.append((step, max(took - waited, 0.0)))


def _key(attempt: float, generation: float) -> _Key:
    return int(attempt), int(generation)


def _whole(value: object) -> int | None:
    result = find_number(value)
    return int(result) if result is not None and math.isfinite(result) else None


def _text(value: object) -> str:
    return "?" if value is None else str(value)
