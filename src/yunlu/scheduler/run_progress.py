"""Progress of a run, read incrementally from its logs: steps, step times, gradient noise."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from yunlu.jobs.run_log import step_s
from yunlu.runs.events import AttemptStarted, BatchChanged, PlanMade, WorkerGroupFormed
from yunlu.runs.fold import RunView, apply
from yunlu.scheduler.allocation_record import RecordedTiming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore

_RECENT = 50
_WARM_UP = 2
"""First steps of a generation, left out as warm-up."""
_PENDING = 2000
"""Steps that may wait for the event with the number of workers."""


@dataclass(slots=True)
class _Group:
    """Steps made by one number of workers."""

    steps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT))
    waits_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT))


class RunProgress:
    """Progress of one run."""

    def __init__(self, run: RunStore) -> None:
        self.run = run
        self.base_batch: int | None = None
        """Batch that its learning rate is set for: the unit of useful samples."""
        self.batch: int | None = None
        self.micro_batch: int | None = None
        self.steps: int | None = None
        self.step = 0
        self.noise: tuple[float, float] | None = None
        """Square of the gradient, and its variance at the base batch."""
        self.moved_at = time.monotonic()
        """When it last wrote a log record, on the monotonic clock."""
        self.resizes_s: list[float] = []
        self.startup_s: float | None = None
        self._view = RunView()
        self._attempt_at = 0.0
        self._events = self._metrics = 0
        self._workers: dict[tuple[int, int], tuple[int, int]] = {}
        self._made: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._groups: defaultdict[tuple[int, int], _Group] = defaultdict(_Group)
        self._unknown: list[Mapping[str, Any]] = []

    def take(self) -> bool:
        """Read new log records; returns whether there were any."""
        before = (self._events, self._metrics)
        for event, after in self.run.read_events(offset=self._events):
            self._events = after
            self._take_event(event)
        for record, after in self.run.read_metrics(offset=self._metrics):
            self._metrics = after
            self._take_metric(record)
        if self._unknown:
            waiting, self._unknown = self._unknown, []
            for record in waiting[-_PENDING:]:
                self._sort(record)
        has_moved = before != (self._events, self._metrics)
        if has_moved:
            self.moved_at = time.monotonic()
        return has_moved

    def seen(self, device_type: str) -> tuple[RecordedTiming, ...]:
        """Step times for each number of workers."""
        matches: list[RecordedTiming] = []
        for (nodes, devices), group in sorted(self._groups.items()):
            if len(group.steps_s) < 2 or self.batch is None:
                continue
            whole_s, wait_s = median(group.steps_s), median(group.waits_s)
            share = max(1, -(-self.batch // devices))
            local = min(self.micro_batch or share, share)
            passes = -(-share // local)
            pass_s = max(whole_s - wait_s, 1e-9) / passes
            matches.append(
                RecordedTiming(
                    device_type=device_type,
                    nodes=nodes,
                    devices=devices,
                    local_batch=local,
                    accumulate_s=pass_s,
                    step_s=max(whole_s - (passes - 1) * pass_s, 1e-9),
                )
            )
        return tuple(matches)

    def pace_s(self, devices: int) -> float | None:
        """Typical step time on so many devices."""
        result = [g.steps_s for (_, count), g in self._groups.items() if count == devices]
        return median(steps_s) if result and (steps_s := result[-1]) else None

    @property
    def usual_step_s(self) -> float:
        """Typical step time on any number of devices; 0 before the first step."""
        steps_s = [item for group in self._groups.values() for item in group.steps_s]
        return median(steps_s) if steps_s else 0.0

    def _take_event(self, event: Event) -> None:
        self._view = apply(self._view, event)
        match event:
            case AttemptStarted():
                self._attempt_at = event.began_at
            case PlanMade():
                self.batch, self.micro_batch = event.plan.batch, event.plan.micro_batch
                self.base_batch, self.steps = self.batch, event.plan.steps
            case BatchChanged():
                self.batch, self.steps = event.batch, event.steps
            case WorkerGroupFormed():
                hosts = {rank.host for rank in event.ranks}
                key = (self._attempt, event.generation)
                self._workers[key] = (max(len(hosts), 1), max(len(event.ranks), 1))
                if event.lost_s is not None:
                    self.resizes_s = [*self.resizes_s[-9:], event.lost_s]
            case _:
                pass

    @property
    def _attempt(self) -> int:
        return max(len(self._view.attempts), 1)

    def _take_metric(self, record: Mapping[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        if self.startup_s is None and self._attempt_at:
            self.startup_s = max(0.0, float(record.get("at") or 0.0) - self._attempt_at)
        self.step = step
        sqr, var = record.get("noise_sqr"), record.get("noise_var")
        if isinstance(sqr, float | int) and isinstance(var, float | int) and self.base_batch:
            self.noise = (float(sqr), float(var) / self.base_batch)
        self._sort(record)

    def _sort(self, record: Mapping[str, Any]) -> None:
        """Assign a step to the number of workers that made it."""
        generation = record.get("generation")
        key = (int(record.get("attempt") or self._attempt), int(generation or 0))
        workers = (1, 1) if generation is None else self._workers.get(key)
        if workers is None:
            self._unknown.append(record)
            return
        self._made[key] += 1
        if self._made[key] <= _WARM_UP:
            return
        group = self._groups[workers]
        group.steps_s.append(step_s(record))
        group.waits_s.append(float(record.get("communication_s") or 0.0))
