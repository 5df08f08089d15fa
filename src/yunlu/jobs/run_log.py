"""Events and metrics of a run: followed as written, or without the steps that later attempts repeated."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from yunlu.core.value import Value
from yunlu.jobs.run import advance_record, detect_lost, new_record
from yunlu.runs.events import Event
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import Log, log_end, not_a_run

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from yunlu.runs.fold import GroupGeneration, RunView
    from yunlu.runs.run_store import RunStore

Record = dict[str, float]
"""The numbers of one step, by the names of ``StepMetrics``."""

PARTS = ("data", "compute", "communication", "checkpoint", "evaluation", "other")
"""Where time goes; ``other`` is start-up, the final scoring and whatever no part claims."""
_IN_STEP = ("data_s", "compute_s", "communication_s")
_AFTER_STEP = ("checkpoint_s", "evaluate_s")
_CLAIMED = (*_IN_STEP, *_AFTER_STEP)
_STRETCHES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt, from the start of its worker to the last event or step."""

    number: int
    """1 for the first."""
    started_at: float
    """When it began; for a worker of its own, when its process started."""
    ended_at: float
    resumed_from: int | None
    """Step it continued from; None for the first attempt, or where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Both logs of a run. Steps that a crash undid and no attempt has reached again are left out."""

    view: RunView
    records: Sequence[Record]
    """One per step, in order."""
    attempts: Sequence[AttemptSpan]

    @property
    def wall_s(self) -> float:
        """Seconds that workers were alive: the time between two attempts costs nothing."""
        return sum(attempt.ended_at - attempt.started_at for attempt in self.attempts)


def read_run_log(run: RunStore) -> RunLog:
    """Read both logs."""
    view = read_view(run)
    read = (numbers(record) for record, _ in run.read_log(Log.METRICS))
    records = [record for record in read if "step" in record]
    attempts = _spans(view, records)
    latest = _latest(records, attempts)
    return RunLog(
        view=view,
        records=[record for record in latest if not _is_left_behind(record, view.worker_groups)],
        attempts=attempts,
    )


def number(value: object) -> float | None:
    """A number, finite or not, also from its name in JSON (``"NaN"``); else None."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def numbers(data: Any) -> dict[str, float]:
    """The named numbers of a mapping; what is not a number is left out."""
    named = data.items() if isinstance(data, dict) else ()
    return {str(name): result for name, value in named if (result := number(value)) is not None}


def points(records: Iterable[Record], key: str) -> list[Point]:
    """One key of the records over the step."""
    return [(int(record["step"]), record[key]) for record in records if key in record]


def step_s(record: Mapping[str, Any]) -> float:
    """The seconds of a step itself."""
    return sum(record.get(key, 0.0) for key in _IN_STEP)


def held_up_s(record: Record) -> float:
    """The seconds that a step held up the next one: its evaluation, its checkpoint."""
    return sum(record.get(key, 0.0) for key in _AFTER_STEP)


def samples_of_steps(records: Sequence[Record]) -> dict[int, float]:
    """Samples that each step consumed, from the running count."""
    counts: dict[int, float] = {}
    before_step, before = 0, 0.0
    for step, count in points(records, "samples"):
        counts[step] = (count - before) / (step - before_step)
        before_step, before = step, count
    return counts


def rates(records: Sequence[Record], counts: dict[int, float]) -> list[Point]:
    """A count of each step over the seconds of that step."""
    seconds = {int(record["step"]): step_s(record) for record in records}
    return [(step, count / seconds[step]) for step, count in counts.items() if seconds[step] > 0]


def parts_over_time(log: RunLog) -> tuple[list[int], dict[str, list[float]]]:
    """Shares of the parts in up to 60 stretches of steps, with the last step of each."""
    seconds = [
        [*(record.get(key, 0.0) for key in _CLAIMED), other]
        for record, other in zip(log.records, _unclaimed(log), strict=True)
    ]
    stretches = min(_STRETCHES, len(seconds))
    edges = [round(i * len(seconds) / stretches) for i in range(stretches + 1)]
    steps: list[int] = []
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for start, end in pairwise(edges):
        sums = [sum(column) for column in zip(*seconds[start:end], strict=True)]
        if (whole := sum(sums)) > 0:
            steps.append(int(log.records[end - 1]["step"]))
            for part, spent in zip(PARTS, sums, strict=True):
                shares[part].append(spent / whole)
    return steps, shares


def part_totals(log: RunLog) -> dict[str, float]:
    """Seconds by part; with ``other`` they add up to the time that workers were alive."""
    totals = {
        part: sum(record.get(key, 0.0) for record in log.records)
        for part, key in zip(PARTS, _CLAIMED, strict=False)
    }
    rest = log.wall_s - sum(totals.values()) if log.attempts else 0.0
    return totals | {"other": max(rest, 0.0)}


def _latest(records: Iterable[Record], attempts: Sequence[AttemptSpan]) -> list[Record]:
    """One record per step. The log's order decides, not its clock, which may have been set back."""
    latest: dict[int, Record] = {}
    for record in records:
        step = int(record["step"])
        if latest and step <= next(reversed(latest)):
            # Back at an earlier step: what had been done from there on no longer counts.
            latest = {before: retained for before, retained in latest.items() if before < step}
        latest[step] = record
    return [record for record in latest.values() if not _is_undone(record, attempts)]


def _is_undone(record: Record, attempts: Sequence[AttemptSpan]) -> bool:
    """Whether a later attempt, which may not have made a step yet, went back to before this one."""
    return any(
        attempt.resumed_from is not None
        and record["step"] > attempt.resumed_from
        and record.get("attempt", 1) < attempt.number
        for attempt in attempts
    )


def _is_left_behind(record: Record, groups: Sequence[GroupGeneration]) -> bool:
    """Whether a later generation, which may not have made a step yet, went back to before this one."""
    if "generation" not in record:
        return False
    own = (record.get("attempt", 1.0), record["generation"])
    return any(own < group.key and record["step"] > group.from_step for group in groups)


def _spans(view: RunView, records: Iterable[Record]) -> list[AttemptSpan]:
    last_at: dict[int, float] = {}
    for record in records:
        if "at" in record:
            number = int(record.get("attempt", 1))
            last_at[number] = max(last_at.get(number, 0.0), record["at"])
    return [
        AttemptSpan(
            number=attempt.number,
            started_at=attempt.started_at,
            ended_at=max(attempt.last_event_at, last_at.get(attempt.number, 0.0)),
            resumed_from=attempt.resumed_from,
        )
        for attempt in view.attempts
    ]


def _unclaimed(log: RunLog) -> list[float]:
    """Seconds since the step before that no part claims; the first step of an attempt has none."""
    unclaimed = [0.0] * min(len(log.records), 1)
    for before, after in pairwise(log.records):
        since, until = number(before.get("at")), number(after.get("at"))
        is_new = before.get("attempt") != after.get("attempt")
        if since is None or until is None or is_new:
            unclaimed.append(0.0)
        else:
            # A record is stamped when its step ends; what came after that step lies before this one.
            unclaimed.append(max(until - since - held_up_s(before) - step_s(after), 0.0))
    return unclaimed


POLL_S = 0.15
_CHECK_S = 1.0


class LogCursor(Value):
    """Offsets up to which events and metrics were read."""

    events: int = 0
    metrics: int = 0


class MetricRecord(Value):
    """Metrics of one step."""

    record: dict[str, Any]

    @property
    def at(self) -> float:
        """When it was measured."""
        return float(self.record.get("at") or 0.0)


FollowedItem = Event | MetricRecord


class RunUpdate(Value):
    """New events and metrics of a run, in order; empty where nothing happened."""

    items: tuple[FollowedItem, ...] = ()
    cursor: LogCursor
    """Where the next update begins."""


def end_of(run: RunStore) -> LogCursor:
    """The position after everything written so far."""
    return LogCursor(events=log_end(run, Log.EVENTS), metrics=log_end(run, Log.METRICS))


def follow(
    run: RunStore, *, since: LogCursor | None = None, poll_s: float = POLL_S
) -> Generator[RunUpdate]:
    """Yield updates until the run is no longer active.

    An update without items gives the caller its turn several times a second. A worker that vanished is
    noticed, and recorded in the run's events.
    """
    since = since or LogCursor()
    record = new_record(run)
    if record is None:
        raise not_a_run(run)
    events_at, metrics_at, checked_at = 0, since.metrics, time.monotonic()
    while True:
        batch: list[FollowedItem] = []
        for event, after in run.read_events(offset=events_at):
            record, events_at = advance_record(record, event, after), after
            if after > since.events:
                batch.append(event)
        for metric, after in run.read_metrics(offset=metrics_at):
            batch.append(MetricRecord(record={**metric}))
            metrics_at = after
        items = tuple(sorted(batch, key=lambda item: item.at))
        yield RunUpdate(items=items, cursor=LogCursor(events=events_at, metrics=metrics_at))
        if not record.state.is_active and not batch:
            return
        if not batch and time.monotonic() - checked_at > _CHECK_S:
            detect_lost(run, record)
            checked_at = time.monotonic()
        if record.state.is_active:
            time.sleep(poll_s)


Point = tuple[int, float]
"""Step and value."""


def thin(points: Sequence[Point], limit: int = 1000) -> list[Point]:
    """At most ``limit`` points: of each bucket the lowest, the highest and any that is not finite.

    Averaging would hide exactly what people look for: a spike, or the step that broke.
    """
    if len(points) <= limit:
        return list(points)
    broken = any(not math.isfinite(value) for _, value in points)
    buckets = (limit - 2) // (3 if broken else 2)
    inner = points[1:-1]
    edges = [round(i * len(inner) / buckets) for i in range(buckets + 1)]
    retained = [points[0]]
    for start, end in pairwise(edges):
        retained += _extremes(inner[start:end])
    return [*retained, points[-1]]


def smooth(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a sixtieth of the curve, looking back and ahead alike.

    A mean that only looks back would trail a falling loss. Values that are not finite are left
    out: one NaN would swallow all that follow.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    keep = 1 - 2 / (max(5.0, len(finite) / 60) + 1)
    values = [value for _, value in finite]
    behind, ahead = _trailing_mean(values, keep), _trailing_mean(values[::-1], keep)[::-1]
    return [
        (step, back / 2 + forth / 2)
        for (step, _), back, forth in zip(finite, behind, ahead, strict=True)
    ]


def _trailing_mean(values: Sequence[float], keep: float) -> list[float]:
    mean = weight = 0.0
    means: list[float] = []
    for value in values:
        weight = keep * weight + 1
        # The weights so far add up to ``weight``: no pull towards the zero it started from.
        mean += (value - mean) / weight
        means.append(mean)
    return means


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(bucket) if math.isfinite(value)]
    retained = {next((i for i, (_, value) in enumerate(bucket) if not math.isfinite(value)), None)}
    if finite:
        retained |= {
            min(finite, key=lambda i: bucket[i][1]),
            max(finite, key=lambda i: bucket[i][1]),
        }
    return [bucket[i] for i in sorted(i for i in retained if i is not None)]
