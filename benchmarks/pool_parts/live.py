"""One live run of the queue: a pool on this machine, real workers, real training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pool_parts.queue import BATCH, make_job
from yunlu.core.files import read_lines
from yunlu.jobs import lifecycle
from yunlu.runs.events import AttemptStarted, DataOpened, WorkerGroupFormed
from yunlu.runs.run_store import Log
from yunlu.runs.states import RunState
from yunlu.scheduler import control
from yunlu.scheduler.allocation_record import RecordedTiming, read_allocation
from yunlu.scheduler.pool_store import PoolSettings
from yunlu.scheduler.queue import SubmitOptions, enqueue, read_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.pool_parts.queue import Arrival
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What became of one job."""

    name: str
    kind: str
    submitted_at: float
    started_at: float
    """When it first got devices."""
    ended_at: float
    state: str
    attempts: int
    resizes: int
    trained_s: float
    """In its steps."""
    samples_lost: int
    """Of those that its steps should have trained on: missing, or trained on twice."""
    sizes: tuple[tuple[float, int], ...]
    """When it went on with how many workers."""
    seen: tuple[RecordedTiming, ...]
    resize_s: tuple[float, ...]

    @property
    def jct_s(self) -> float:
        """From being submitted to its end."""
        return self.ended_at - self.submitted_at


def run_queue(
    queue: Sequence[Arrival],
    home: Path,
    *,
    policy: str,
    devices: int,
    round_s: float,
    watch: Callable[[int, int], None],
) -> list[JobRecord]:
    """Bring a pool up, submit the queue as it comes, and wait for all of it."""
    settings = PoolSettings(
        executor=f"local://?devices={devices}", policy=policy, round_s=round_s, look_s=0.5
    )
    control.bring_up(home, settings)
    runs: dict[str, RunStore] = {}
    try:
        began = time.monotonic()
        for arrival in queue:
            while time.monotonic() - began < arrival.at_s:
                watch(_count_over(runs), len(runs))
                time.sleep(_POLL_S)
            kind = arrival.kind
            asked = SubmitOptions(min_devices=kind.least, max_devices=kind.most)
            runs[arrival.name] = enqueue(make_job(arrival), asked)
        while (over := _count_over(runs)) < len(runs):
            watch(over, len(runs))
            time.sleep(_POLL_S)
    finally:
        control.bring_down(home, stop_jobs=True)
        for run in runs.values():
            lifecycle.stop(run)
    by_name = {arrival.name: arrival for arrival in queue}
    return [_read(run, by_name[name]) for name, run in runs.items()]


def _count_over(runs: dict[str, RunStore]) -> int:
    over = {RunState.FINISHED, RunState.FAILED}
    return sum(lifecycle.read_record(run).state in over for run in runs.values())


def _read(run: RunStore, arrival: Arrival) -> JobRecord:
    events = [event for event, _ in run.read_events()]
    groups = [event for event in events if isinstance(event, WorkerGroupFormed)]
    attempts = [event for event in events if isinstance(event, AttemptStarted)]
    entry, notes = read_entry(run), read_allocation(run)
    assert entry is not None
    times_s = [
        sum(float(record.get(key) or 0.0) for key in ("data_s", "compute_s", "communication_s"))
        for record, _ in run.read_metrics()
    ]
    return JobRecord(
        name=arrival.name,
        kind=arrival.kind.name,
        submitted_at=entry.submitted_at,
        started_at=attempts[0].at if attempts else entry.submitted_at,
        ended_at=events[-1].at,
        state=lifecycle.read_record(run).state.value,
        attempts=len(attempts),
        resizes=max(len(groups) - len(attempts), 0),
        trained_s=sum(times_s),
        samples_lost=_count_lost(run, events, arrival.kind.steps),
        sizes=tuple((event.at, len(event.ranks)) for event in groups),
        seen=notes.seen,
        resize_s=tuple(_lost_s(groups)),
    )


def _lost_s(groups: list[WorkerGroupFormed]) -> list[float]:
    return [float(event.lost_s) for event in groups if event.lost_s is not None]


def _count_lost(run: RunStore, events: list[Event], steps: int) -> int:
    """By the ledger, which says of each step how many samples it took."""
    count = next((e.train for e in events if isinstance(e, DataOpened)), BATCH)
    full, rest = divmod(int(count), BATCH)
    epoch = [BATCH] * full + [rest] * (rest > 0)
    taken: dict[int, int] = {}
    again = 0
    for line, _ in read_lines(run.path / Log.LEDGER):
        again += line["samples"] if line["step"] in taken else 0
        taken[line["step"]] = line["samples"]
    due = {step: epoch[(step - 1) % len(epoch)] for step in range(1, steps + 1)}
    return again + sum(abs(samples - taken.get(step, 0)) for step, samples in due.items())
