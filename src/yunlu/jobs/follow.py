"""Watching a run: what it writes, as it writes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.jobs.run import fold, new_record, settle
from yunlu.runs.run_dir import Event

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

POLL_S = 0.15
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the two logs have been read, in bytes."""

    events: int = 0
    metrics: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One record of ``metrics.jsonl``."""

    record: dict[str, Any]

    @property
    def at(self) -> float:
        """When it was measured."""
        return float(self.record.get("at") or 0.0)


Happening = Event | Metric


def end_of(run: RunStore) -> Position:
    """The position after everything written so far."""
    return Position(events=_size(run.events), metrics=_size(run.metrics))


def follow(
    run: RunStore, *, since: Position | None = None, poll_s: float = POLL_S
) -> Generator[list[Happening]]:
    """Yield what happened since the last look, in order, until the run rests.

    An empty list says that nothing happened: the caller gets its turn several times a second.
    A worker that vanished is noticed, and said so in the run's events.
    """
    since = since or Position()
    record = new_record(run)
    if record is None:
        raise StoreError(f"{run.path} is not a run: its job.json is missing or torn")
    events_at, metrics_at, checked_at = 0, since.metrics, time.monotonic()
    while True:
        batch: list[Happening] = []
        for event, after in run.read_events(offset=events_at):
            record, events_at = fold(record, event, after), after
            if after > since.events:
                batch.append(event)
        for metric, after in run.read_metrics(offset=metrics_at):
            batch.append(Metric(metric))
            metrics_at = after
        yield sorted(batch, key=lambda happening: happening.at)
        if not record.state.is_active and not batch:
            return
        if not batch and time.monotonic() - checked_at > _CHECK_S:
            settle(run, record)
            checked_at = time.monotonic()
        if record.state.is_active:
            time.sleep(poll_s)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
