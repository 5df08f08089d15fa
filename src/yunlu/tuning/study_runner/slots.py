"""Slots for trials: shares of this machine or of the pool, and their allocation, speeds, queue and cost.

A trial that may grow while it trains starts under a supervisor, even on one device: only then can
others join it. Any other starts as a single worker, the cheapest start: about three quarters of the CPU
time. Where such a trial is to grow all the same, it is stopped, which saves it, and the runner resumes it
on more devices, like any stopped trial. The same holds for GPUs: a process keeps those it started with.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import pairwise
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Literal, Protocol

from yunlu.core.errors import StoreError
from yunlu.executors import cpu_limits
from yunlu.executors.lease_executor import read_record as read_leases
from yunlu.executors.registry import open_executor
from yunlu.executors.worker_process import WORKER, count_gpus, recorded_worker
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.jobs.calibration import usual_start_s
from yunlu.runs.run_store import Document, read_job
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.control import find_service
from yunlu.scheduler.executor_adapter import ExecutorAdapter, NotNowError
from yunlu.scheduler.pool_store import PoolStore
from yunlu.scheduler.queue import QueueEntry, change_entry, job_signature, read_entry, requeue
from yunlu.scheduler.run_progress import RunProgress
from yunlu.scheduler.run_status import make_request
from yunlu.tuning.rungs import find_size
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.device_shares import (
    MANY,
    DeviceClaim,
    find_promises,
    fit_power,
    share_devices,
)
from yunlu.tuning.study_runner.trial_runs import write_verdict
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.device_shares import Aim
    from yunlu.tuning.study_runner.runner import WatchedTrial
    from yunlu.tuning.values import Method, Trial

PROMISING = 0.5
"""A trial better than half of those at its rung keeps the study's priority in the pool."""

_SHARES_PER_CORE = 4
_AGAIN_S = 60.0
_CALM_S = 1.5


class Slots(Protocol):
    """Devices for trials."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        ...

    def submit(self, job: Job, *, source: Path | None = None) -> RunStore:
        """Create the run of a trial; it waits until it is started."""
        ...

    def start(
        self, run: RunStore, devices: int, *, most: int | None = None, promise: float = 0.0
    ) -> None:
        """Start a trial, or resume one that has stopped.

        Args:
            run: Its run.
            devices: On so many.
            most: To so many it may grow later; without a word, to all there are.
            promise: The chance that it is among the best; says who goes first where others wait.
        """
        ...

    def resize(self, run: RunStore, devices: int, *, promise: float = 0.0) -> bool:
        """Resize a running trial; False where that is not possible now."""
        ...

    def held(self, run: RunStore) -> int:
        """Devices it holds now; 0 where no process works on it."""
        ...

    def usable(self, run: RunStore) -> int | None:
        """Most devices its model and batch can be split over; None until known."""
        ...

    def release(self, run: RunStore, *, for_good: bool) -> None:
        """It will end by itself at a rung: no other process may start it again."""
        ...

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """Ask it to save and stop, or kill it at once; does not wait."""
        ...


def restarts_on_resize(run: RunStore) -> bool:
    """Whether a run of this machine must restart to get other devices."""
    record = read_leases(run)
    return record is None or any(lease.slots for lease in record.wanted)


def find_slots(devices: int | None = None) -> Slots:
    """The pool if one is up, else this machine."""
    if find_service(lifecycle.home()) is not None:
        return PoolSlots(devices)
    return LocalSlots(devices)


def check_cpu_share(devices: int | None) -> None:
    """Refuse more CPU shares than the machine can run as processes."""
    cores = len(os.sched_getaffinity(0))
    if devices is None or devices <= _SHARES_PER_CORE * cores:
        return
    if not count_gpus() and find_service(lifecycle.home()) is None:
        raise StudyError(
            f"{devices} devices would be shares of {cores} core{'s' * (cores != 1)} of this machine",
            hint=f"ask for {_SHARES_PER_CORE * cores} or fewer; --parallel says how many trials train "
            "at once",
        )


class LocalSlots:
    """This machine: its GPUs, or equal shares of its processor."""

    def __init__(self, devices: int | None = None) -> None:
        """Takes as many devices as there are GPUs, or cores, where no number is given."""
        address = "local" if devices is None else f"local://?devices={devices}"
        self._adapter = ExecutorAdapter(open_executor(address))
        self._node = self._adapter.nodes()[0]
        self._most: dict[str, int] = {}
        self._stopped_at: dict[str, float] = {}
        self._growth_wish: dict[str, tuple[float, float]] = {}
        """Since when, and until when, a trial should grow."""

    @property
    def devices(self) -> int:
        """As ``Slots.devices``."""
        return self._node.devices

    def submit(self, job: Job, *, source: Path | None = None) -> RunStore:
        """As ``Slots.submit``."""
        return lifecycle.submit(job, source=source)

    def start(
        self, run: RunStore, devices: int, *, most: int | None = None, promise: float = 0.0
    ) -> None:
        """As ``Slots.start``; all trials run at once, so that promise does not matter."""
        del promise
        most = self.devices if most is None else most
        if devices == most == 1 and not count_gpus():
            self._start_light(run)
        else:
            self._adapter.start(run, self._placement(devices))

    def resize(self, run: RunStore, devices: int, *, promise: float = 0.0) -> bool:
        """As ``Slots.resize``: live, or by a stop from which it is to be started again."""
        del promise
        observation, worker_group = self._adapter.observe(run), read_worker_group(run)
        must_restart = restarts_on_resize(run)
        if observation.state is not RunState.RUNNING or not (
            must_restart or observation.is_resizable
        ):
            return False
        held = (
            max(observation.devices, 1)
            if must_restart or worker_group is None
            else worker_group.target
        )
        if held == devices:
            return True  # requested before, and about to happen
        if devices > held and not self._is_growth_stable(run):
            return False
        if must_restart:
            return self._stop_to_restart(run)
        try:
            return self._adapter.resize(run, self._placement(devices))
        except NotNowError:
            return False

    def held(self, run: RunStore) -> int:
        """As ``Slots.held``."""
        observation = self._adapter.observe(run)
        if observation.is_alive:
            return max(observation.devices, 1)
        cpu_limits.forget(run.id)
        return 0

    def usable(self, run: RunStore) -> int | None:
        """As ``Slots.usable``."""
        if read_leases(run) is not None:
            return self._adapter.observe(run).usable
        if run.id not in self._most:
            job = read_job(run)
            self._most[run.id] = min(make_request(job).most, self.devices)
        return self._most[run.id]

    def release(self, run: RunStore, *, for_good: bool) -> None:
        """As ``Slots.release``: no other process starts trials here."""

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """As ``Slots.stop``."""
        lifecycle.request_stop(run, now=now)

    def _start_light(self, run: RunStore) -> None:
        if lifecycle.read_record(run).state is RunState.PENDING:
            lifecycle.start(run, command=WORKER)
        else:
            lifecycle.resume(run, command=WORKER)
        worker = recorded_worker(run)
        if worker is not None and self.devices > 1:
            cpu_limits.sweep()
            cores = len(os.sched_getaffinity(0))
            cpu_limits.limit(run.id, worker.pid, cpus=cores / self.devices)

    def _is_growth_stable(self, run: RunStore) -> bool:
        """Whether the trial should have grown for a while already.

        Between the end of one trial and the start of the next, devices only seem free.
        """
        now = time.monotonic()
        first, last = self._growth_wish.get(run.id, (now, now))
        first = now if now - last > _CALM_S else first
        self._growth_wish[run.id] = (first, now)
        return now - first >= _CALM_S

    def _stop_to_restart(self, run: RunStore) -> bool:
        """Request a stop, from which it restarts; not again while it may still be saving."""
        asked_at = self._stopped_at.get(run.id, -_AGAIN_S)
        if time.monotonic() - asked_at < _AGAIN_S:
            return False
        self._stopped_at[run.id] = time.monotonic()
        lifecycle.request_stop(run)
        return True

    def _placement(self, devices: int) -> Placement:
        return Placement(((self._node.name, devices),))


class PoolSlots:
    """The pool of this home: its allocator places trials beside all other runs.

    A trial is an entry of the queue, bounded to what the study means it to have. The pool may give it
    less, or later, where others need the devices more.
    """

    def __init__(self, devices: int | None = None) -> None:
        """Takes the most devices of the study."""
        self._home = lifecycle.home()
        self._most = devices

    @property
    def devices(self) -> int:
        """As ``Slots.devices``: all the pool has now, unless the study may have fewer."""
        view = PoolStore(self._home).read_view() or {}
        there = int(view.get("devices") or 0)
        return min(there, self._most) if self._most is not None else there

    def submit(self, job: Job, *, source: Path | None = None) -> RunStore:
        """As ``Slots.submit``: not in the queue before it is started."""
        return lifecycle.submit(job, source=source)

    def start(
        self, run: RunStore, devices: int, *, most: int | None = None, promise: float = 0.0
    ) -> None:
        """As ``Slots.start``: put into the queue of the pool."""
        del most  # a bound in the queue can be raised at any time
        job = read_job(run)
        request = make_request(job, most=devices)
        priority = _priority_of(promise)
        if read_entry(run) is None:
            adapted = job.train.adapt_batch
            entry = QueueEntry(
                submitted_at=time.time(),
                priority=priority,
                request=request,
                most_batch=adapted.max if adapted else None,
                signature=job_signature(job),
                wish="pause",  # until it is whole
            )
            run.write(Document.QUEUE_ENTRY, entry.model_dump_json(indent=2))
        else:
            change_entry(run, request=request, priority=priority)
        requeue(run)

    def resize(self, run: RunStore, devices: int, *, promise: float = 0.0) -> bool:
        """As ``Slots.resize``: changes the bound; the pool applies it at its next decision."""
        entry = read_entry(run)
        if entry is None or entry.wish != "run":
            return False
        most = max(devices // entry.request.multiple * entry.request.multiple, entry.request.least)
        request = entry.request.model_copy(update={"most": most, "requested": most})
        priority = _priority_of(promise)
        if (request, priority) != (entry.request, entry.priority):
            change_entry(run, request=request, priority=priority)
        return True

    def held(self, run: RunStore) -> int:
        """As ``Slots.held``: devices that the pool has assigned to it."""
        return sum(read_allocation(run).claims.values())

    def usable(self, run: RunStore) -> int | None:
        """As ``Slots.usable``: the pool observes it too, and gives no more."""
        worker_group = read_worker_group(run)
        return (
            max(worker_group.layouts) if worker_group is not None and worker_group.layouts else None
        )

    def release(self, run: RunStore, *, for_good: bool) -> None:
        """As ``Slots.release``: leaves the queue, and its devices return to the pool."""
        with suppress(StoreError):  # never queued
            change_entry(run, wish="stop" if for_good else "pause")

    def stop(self, run: RunStore, *, now: bool = False) -> None:
        """As ``Slots.stop``."""
        self.release(run, for_good=False)
        lifecycle.request_stop(run, now=now)


def _priority_of(promise: float) -> int:
    # Never above the usual: other runs of the pool do not wait for a promising trial.
    return 0 if promise >= PROMISING else -1


_RUNG_S = 60.0
"""Assumed on one device, before any trial has made a step."""
_RESIZE_S = 2.0
_START_S = 5.0
_SAVE_S = 1.0
_KEPT = 64
"""Runs whose speeds are remembered."""
_SETTLED_S = 1.0
"""Delay of a step below which it counts as normal."""


class TrialSpeeds:
    """Speeds of the running and the most recent trials of a study."""

    def __init__(self, *, rungs: int) -> None:
        self._rungs = rungs
        self._progress: dict[int, RunProgress] = {}
        self.power = fit_power(())
        """Speed on k devices is k to this power; fitted to trials observed at two sizes."""
        self.resize_s = _RESIZE_S
        """Pause of a trial when it is resized."""
        self.start_s = _START_S
        """From a start to the first step."""
        self._usual_rung_s = _RUNG_S

    def observe(self, runs: Iterable[tuple[int, RunStore]]) -> None:
        """Read new metrics of the runs of these trials, by number."""
        has_moved = False
        for number, run in runs:
            progress = self._progress.pop(number, None) or RunProgress(run)
            self._progress[number] = progress  # the newest last
            has_moved |= progress.take()
        for number in [*self._progress][:-_KEPT]:
            del self._progress[number]
        if has_moved:
            self._sum_up()

    def _sum_up(self) -> None:
        runs_progress = self._progress.values()
        pairs: list[tuple[int, float, int, float]] = []
        for progress in runs_progress:
            seen = _steps_s(progress)
            pairs += [(*few, *many) for few, many in pairwise(seen)]
        self.power = fit_power(pairs)
        resizes_s = [span_s for progress in runs_progress for span_s in progress.resizes_s]
        starts_s = [
            progress.startup_s for progress in runs_progress if progress.startup_s is not None
        ]
        rungs_s = [s for item in self._progress if (s := self._own_rung_s(item)) is not None]
        self.resize_s = median(resizes_s) if resizes_s else _RESIZE_S
        self.start_s = median(starts_s) if starts_s else _START_S
        self._usual_rung_s = median(rungs_s) if rungs_s else _RUNG_S

    def rung_s(self, number: int) -> float:
        """Seconds of one device from one rung of a trial to the next."""
        own_s = self._own_rung_s(number)
        return self._usual_rung_s if own_s is None else own_s

    def claim(
        self,
        trial: Trial,
        *,
        held: int,
        promise: float = 0.5,
        least: int = 1,
        most: int = MANY,
        is_pinned: bool = False,
    ) -> DeviceClaim:
        """Device claim of a trial, by its own speed, else by that of the others."""
        rung_s, reached = self.rung_s(trial.number), float(trial.rung)
        progress = self._progress.get(trial.number)
        if progress is not None and progress.steps:
            reached = max(reached, progress.step / progress.steps * self._rungs)
        work_s = max(0.0, trial.until - reached) * rung_s
        if held and progress is not None:
            work_s = max(work_s, self._late_s(progress, held))
        return DeviceClaim(
            number=trial.number,
            work_s=work_s,
            held=held,
            beyond_s=promise * max(0, self._rungs - trial.until) * rung_s,
            promise=promise,
            least=least,
            most=most,
            power=self.power,
            resize_s=self._change_s(progress),
            start_s=self.start_s,
            is_pinned=is_pinned,
        )

    def _own_rung_s(self, number: int) -> float | None:
        progress = self._progress.get(number)
        if progress is None or not progress.steps:
            return None
        singles_s = [pace_s * devices**self.power for devices, pace_s in _steps_s(progress)]
        return median(singles_s) * progress.steps / self._rungs if singles_s else None

    def _change_s(self, progress: RunProgress | None) -> float:
        """Cost of a resize: a pause, or a restart."""
        if progress is None or not restarts_on_resize(progress.run):
            return self.resize_s
        return self.start_s + _SAVE_S

    def _late_s(self, progress: RunProgress, held: int) -> float:
        """Estimated delay of a stalled trial: as long again as it has stalled."""
        pace_s = progress.pace_s(held) or progress.usual_step_s
        idle_s = time.monotonic() - progress.moved_at - pace_s
        return idle_s * held**self.power if idle_s > _SETTLED_S else 0.0


def _steps_s(progress: RunProgress) -> list[tuple[int, float]]:
    """Median step time for each number of devices observed."""
    return [
        (item.devices, pace_s)
        for item in progress.seen("")
        if (pace_s := progress.pace_s(item.devices)) is not None
    ]


Elastic = bool | Literal["auto"]

_SHARE_S = 0.5
_TRY_S = 10.0
"""Time limit for retries of a refused start."""
_WORTH = 20.0
"""A trial may grow if it takes this many times as long as its start-up."""


class SlotAllocation:
    """Assigns devices to trials, and takes them back."""

    def __init__(
        self, records: Records, method: Method, slots: Slots, *, elastic: Elastic = "auto"
    ) -> None:
        request = records.request
        assert request.job is not None
        self._records, self._slots, self._elastic = records, slots, elastic
        self._aim: Aim = getattr(method, "aim", "best")
        self._least, self._is_fixed = find_size(request.job)
        if self._least > slots.devices:
            raise StoreError(
                f"a trial needs {self._least} devices, and there are {slots.devices}",
                hint="lower devices in the job, or give the study more (--devices)",
            )
        most = slots.devices // self._least
        self.workers = min(request.parallel or most, most)
        """Trials that can run at once."""
        self.ignores_verdicts = request.job.communication.method == "asynchronous"
        self.queue: dict[int, RunStore] = {}
        """Trials that wait for devices, by number."""
        self._speeds = TrialSpeeds(rungs=max(request.rungs, 1))
        self._given: dict[str, int] = {}
        self._leaving: list[RunStore] = []
        self._refused_at: dict[int, float] = {}
        self._shares: dict[int, int] = {}
        self._rebalanced_at = -inf
        price = request.dollars_per_hour
        self._device_price = None if price is None else price / slots.devices / 3600
        self.start_s = (usual_start_s() or 0.0) * self._least
        """Device-seconds of a trial's start-up; 0 where no earlier run was measured."""

    # Cost.

    def dollars(self, device_seconds: float) -> float | None:
        """Cost of device-seconds; None where no price is known."""
        return None if self._device_price is None else device_seconds * self._device_price

    def seconds_for(self, dollars: float) -> float:
        """Wall seconds of all devices that this amount pays for."""
        return self.wall_s_of(dollars / (self._device_price or inf))

    def wall_s_of(self, device_seconds: float) -> float:
        """Wall seconds in which all devices together spend these device-seconds."""
        return device_seconds / self._slots.devices

    # Queue.

    def enqueue(self, number: int, run: RunStore) -> None:
        """Queue a trial to start or continue as soon as devices are free."""
        self.queue[number] = run
        self._rebalanced_at = -inf

    def leave(self, run: RunStore) -> None:
        """A run has ended; its processes may still be exiting."""
        if self._given.pop(run.id, None) is not None:
            self._leaving.append(run)
        self._rebalanced_at = -inf

    def clear(self) -> list[int]:
        """Empty the queue; return the trials that were in it."""
        waited = [*self.queue]
        self.queue.clear()
        return waited

    def start_queued(self, watched_trials: Sequence[WatchedTrial]) -> list[tuple[int, RunStore]]:
        """Start queued trials for which devices are free."""
        if not self.queue:
            return []
        started: list[tuple[int, RunStore]] = []
        free = self._slots.devices - self._taken(watched_trials)
        for number, run in [*self.queue.items()]:
            devices = self._find_size(number)
            if devices > free and self._leaving:
                break  # a moment later its full share is free
            devices = devices if devices <= free else self._least
            if devices > free:
                break  # in order: larger trials are not overtaken
            if self._slots.held(run) or not self._start(number, run, devices):
                continue  # processes of its last attempt are still exiting
            free -= devices
            del self.queue[number]
            started.append((number, run))
        return started

    def _find_size(self, number: int) -> int:
        """Its share; one worker where the rest is shorter than the start-up of several."""
        trial, share = self._records.trial(number), self._shares.get(number, 0)
        left_s = self._speeds.rung_s(number) * (trial.until - trial.rung)
        is_short = self._is_measured() and left_s < self._speeds.start_s
        return self._least if self._elastic == "auto" and is_short else max(share, self._least)

    def _start(self, number: int, run: RunStore, devices: int) -> bool:
        trial = self._records.trial(number)
        write_verdict(run, {"until": trial.until})
        most = self._slots.devices if self._may_grow(number) else devices
        try:
            self._slots.start(run, devices, most=most, promise=self._promise(number))
        except StoreError:
            refused_at = self._refused_at.setdefault(number, time.monotonic())
            if time.monotonic() - refused_at < _TRY_S:
                return False
            raise
        self._refused_at.pop(number, None)
        self._given[run.id] = devices
        self._records.change_trial(number, state=TrialState.RUNNING, devices=devices)
        return True

    def _taken(self, watched_trials: Sequence[WatchedTrial]) -> int:
        self._leaving = [run for run in self._leaving if self._slots.held(run)]
        here = {
            watched.run.id: watched.run
            for watched in watched_trials
            if watched.number not in self.queue
        }
        return sum(
            max(self._slots.held(run), self._given.get(run.id, 0)) for run in here.values()
        ) + sum(self._slots.held(run) for run in self._leaving)

    # Shares.

    def rebalance(self, watched_trials: Sequence[WatchedTrial]) -> None:
        """Resize trials to the shares that minimize the time to the goal."""
        now = time.monotonic()
        if now - self._rebalanced_at < _SHARE_S or not self._is_elastic():
            return
        self._rebalanced_at = now
        self._speeds.observe((watched.number, watched.run) for watched in watched_trials)
        promises = find_promises(self._records.trials())
        running = [watched for watched in watched_trials if watched.number not in self.queue]
        claims = [self._claim(watched, promises) for watched in running]
        claims += [
            self._speeds.claim(
                self._records.trial(number), held=0, promise=promises[number], least=self._least
            )
            for number in self.queue
        ]
        self._shares = share_devices(self._slots.devices, claims, aim=self._aim)
        free = self._slots.devices - self._taken(watched_trials)
        changes = [
            (self._shares[claim.number] - claim.held, watched)
            for claim, watched in zip(claims, running, strict=False)
            if self._shares[claim.number] != claim.held and not claim.is_pinned
        ]
        for more, watched in sorted(changes, key=lambda change: change[0]):  # shrink first
            devices = self._shares[watched.number]
            if more <= free and self._slots.resize(
                watched.run, devices, promise=promises[watched.number]
            ):
                free -= max(more, 0)  # freed devices count once they are released
                self._given[watched.run.id] = devices
                self._records.change_trial(watched.number, devices=devices)

    def _claim(self, watched: WatchedTrial, promises: dict[int, float]) -> DeviceClaim:
        trial = self._records.trial(watched.number)
        held = self._given.get(watched.run.id) or self._slots.held(watched.run) or self._least
        is_moving = watched.events.state is not RunState.RUNNING or bool(watched.verdict_sent)
        usable = self._slots.usable(watched.run)
        return self._speeds.claim(
            trial,
            held=held,
            promise=promises[watched.number],
            least=self._least,
            most=self._slots.devices if usable is None else max(usable, self._least),
            is_pinned=is_moving or usable is None or trial.rung >= trial.until,
        )

    def _is_elastic(self) -> bool:
        return bool(self._elastic) and not self._is_fixed and self._slots.devices > self._least

    def _may_grow(self, number: int) -> bool:
        """Whether it starts as a group that workers can join, which takes longer than a single worker."""
        if not self._is_elastic():
            return False
        if self._elastic is True:
            return True
        whole_s = self._speeds.rung_s(number) * max(self._records.request.rungs, 1)
        return self._is_measured() and whole_s > _WORTH * self._speeds.start_s

    def _is_measured(self) -> bool:
        return any(facts.points for facts in self._records.facts())

    def _promise(self, number: int) -> float:
        return find_promises(self._records.trials())[number] if self._is_elastic() else 0.5
