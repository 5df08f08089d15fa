"""Events and metrics of a run, followed as they are written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.core.value import Value
from yunlu.jobs.run import advance_record, detect_lost, new_record
from yunlu.runs.events import Event
from yunlu.runs.run_store import Log, log_end, not_a_run

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from yunlu.runs.run_store import RunStore

IN_STEP = ("data_s", "compute_s", "communication_s")
"""Of a record, the seconds of its step."""


def step_s(record: Mapping[str, Any]) -> float:
    """The seconds of a step itself."""
    return sum(record.get(key, 0.0) for key in IN_STEP)


POLL_S = 0.15
_CHECK_S = 1.0


class LogCursor(Value):
    """How far the events and metrics were read: an offset, and a number of records."""

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
    return LogCursor(events=log_end(run, Log.EVENTS), metrics=run.metric_end())


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
