"""Progress of runs, read incrementally from their logs, and the speeds estimated from it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from yunlu.hardware.catalog import load_catalog
from yunlu.jobs.run_log import step_s
from yunlu.planning.splitting import predict_by_count
from yunlu.runs.events import AttemptStarted, BatchChanged, PlanMade, WorkerGroupFormed
from yunlu.runs.fold import RunView, apply
from yunlu.runs.run_store import read_submitted_plan
from yunlu.scheduler.allocation_record import RecordedTiming
from yunlu.scheduler.policy.goodput import BatchLimits, GradientNoise, Observations, StepTiming
from yunlu.scheduler.policy.speed_by_type import NoDeviceTypePrior

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yunlu.planning.plan import Plan
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.policy.goodput import Estimator, SpeedModel
    from yunlu.scheduler.run_status import ScheduledRun

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
        self.plan: Plan | None = None
        """The newest: the submitted one until the worker has refined it."""
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
        self._predicted: dict[str, tuple[StepTiming, ...]] = {}

    def take(self) -> bool:
        """Read new log records; returns whether there were any."""
        before = (self._events, self._metrics)
        if not self._events and (submitted := read_submitted_plan(self.run)) is not None:
            self._take_plan(submitted)  # until the worker has refined it
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
            shape = device_type, nodes, devices
            timing = _as_timing(shape, self.batch, self.micro_batch, whole_s, wait_s)
            matches.append(RecordedTiming(**timing._asdict()))
        return tuple(matches)

    def predicted(self, device_type: str) -> tuple[StepTiming, ...]:
        """Step times that its plan expects; the same object as long as the plan is."""
        if device_type not in self._predicted:
            self._predicted[device_type] = tuple(self._predict(device_type))
        return self._predicted[device_type]

    def _predict(self, device_type: str) -> Iterator[StepTiming]:
        if (plan := self.plan) is None:
            return
        for devices, step in predict_by_count(plan).items():
            nodes = -(-devices // plan.hardware.devices_per_node)
            shape, wait_s = (device_type, nodes, devices), step.dp_s + step.tp_s
            yield _as_timing(shape, plan.batch, plan.micro_batch, step.total_s, wait_s)

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
                self._take_plan(event.plan)
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

    def _take_plan(self, plan: Plan) -> None:
        self.batch, self.micro_batch = plan.batch, plan.micro_batch
        self.base_batch, self.steps = plan.batch, plan.steps
        if plan != self.plan:
            self.plan, self._predicted = plan, {}

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


def _as_timing(
    shape: tuple[str, int, int],
    batch: int,
    micro_batch: int | None,
    whole_s: float,
    wait_s: float,
) -> StepTiming:
    """A step of a type, nodes and devices as passes: all but the last do not wait for others."""
    share = max(1, -(-batch // shape[2]))
    local = min(micro_batch or share, share)
    passes = -(-share // local)
    pass_s = max(whole_s - wait_s, 1e-9) / passes
    return StepTiming(*shape, local, pass_s, max(whole_s - (passes - 1) * pass_s, 1e-9))


_SAME = 0.1
"""Step times that differ by less count as equal."""
_GUESSED_BATCH = 32
_TRAINED_IN = ("bf16", "fp16", "tf32", "fp32")


class MakeEstimator(Protocol):
    """Makes an estimator of speeds."""

    def __call__(self, least: int, types: tuple[str, ...], /) -> Estimator:
        """For runs that start on so many devices or more, in a pool of these types."""
        ...


class SpeedEstimates:
    """Speed models of runs, from their own step times and those of similar runs."""

    def __init__(self, make_estimator: MakeEstimator) -> None:
        self._make_estimator = make_estimator
        self._own: dict[str, tuple[StepTiming, ...]] = {}
        self._alike: dict[str, tuple[StepTiming, ...]] = {}
        self._models: dict[str, SpeedModel] = {}

    def learn(self, scheduled: ScheduledRun) -> None:
        """Add the observed step times of a run."""
        timings = tuple(_timing(seen) for seen in scheduled.allocation.seen)
        self._own[scheduled.id] = _merge(self._own.get(scheduled.id, ()), timings)
        if signature := scheduled.entry.signature:
            self._alike[signature] = _merge(self._alike.get(signature, ()), timings)

    def is_known(self, scheduled: ScheduledRun) -> bool:
        """Whether a step of it, or of a similar run, was observed."""
        return bool(self._own.get(scheduled.id) or self._alike.get(scheduled.entry.signature))

    def model_for(self, scheduled: ScheduledRun, types: tuple[str, ...]) -> SpeedModel:
        """Speed model of one run, in a pool with devices of these types."""
        progress = scheduled.progress
        base = progress.base_batch or _GUESSED_BATCH
        noise = None if progress.noise is None else GradientNoise(*progress.noise)
        seen = Observations(
            signature=scheduled.entry.signature or scheduled.id,
            limits=_limits(scheduled.entry.most_batch, base, progress.micro_batch),
            timings=self._own.get(scheduled.id, ()),
            noise=noise,
            shared_timings=self._alike.get(scheduled.entry.signature, ()),
            predicted_timings=progress.predicted(_planned_type(progress.plan, types)),
        )
        # Never observed: it starts with the devices that its owner or its plan requested, at most.
        request = scheduled.entry.request
        estimate = self._make_estimator(max(request.requested, request.least), types)
        model = estimate(seen, self._models.get(scheduled.id))
        self._models[scheduled.id] = model
        return model

    def forget(self, run_id: str) -> None:
        """Remove a run that is over; its step times stay with similar runs."""
        self._own.pop(run_id, None)
        self._models.pop(run_id, None)


@cache
def catalog_speeds() -> CatalogSpeeds:
    """Cached: devices are looked up for every run at every decision."""
    return CatalogSpeeds()


class CatalogSpeeds(NoDeviceTypePrior):
    """Relative speed of device types by their peak FLOPS, where a run has not tried them."""

    def samples_per_s(self, seen: Observations, device_type: str) -> float | None:
        """In arbitrary units: only ratios between types are meaningful."""
        if not (seen.timings or seen.shared_timings or seen.predicted_timings):
            return None
        return _peak_flops(device_type)


@cache
def _peak_flops(device_type: str) -> float | None:
    catalog = load_catalog()
    if not catalog.has_device(device_type):
        return None
    peaks = catalog.device(device_type).peak_flops
    return next((peaks[item] for item in _TRAINED_IN if item in peaks), None)


def _planned_type(plan: Plan | None, types: tuple[str, ...]) -> str:
    """The type that its plan's speeds are taken for: the only one of a pool, whatever its name."""
    if len(types) == 1:
        return types[0]
    return plan.hardware.device if plan is not None else ""


def _limits(most: int | None, base: int, local_most: int | None) -> BatchLimits:
    """The batch is the job's own, unless it may follow its workers up to a largest one."""
    if most is None or most <= base:
        return BatchLimits(base=base, most=base, local_most=local_most or base, fixed=base)
    return BatchLimits(base=base, most=most, local_most=local_most or most)


def _timing(seen: RecordedTiming) -> StepTiming:
    return StepTiming(
        device_type=seen.device_type,
        nodes=seen.nodes,
        devices=seen.devices,
        local_batch=seen.local_batch,
        accumulate_s=seen.accumulate_s,
        step_s=seen.step_s,
    )


def _merge(known: tuple[StepTiming, ...], new: tuple[StepTiming, ...]) -> tuple[StepTiming, ...]:
    """The same object if nothing changed: estimators use identity to avoid a new fit."""
    by_shape = {timing[:4]: timing for timing in known}
    has_changed = False
    for timing in new:
        before = by_shape.get(timing[:4])
        if before is None or abs(timing.step_s - before.step_s) > _SAME * before.step_s:
            by_shape[timing[:4]] = timing
            has_changed = True
    return tuple(by_shape.values()) if has_changed else known
