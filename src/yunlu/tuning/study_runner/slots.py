"""Slots for trials: shares of this machine, or the pool that all runs share.

A trial that may grow while it trains starts under a supervisor, even on one device: only then can
others join it. Any other starts as a single worker, the cheapest start: about three quarters of the CPU
time. Where such a trial is to grow all the same, it is stopped, which saves it, and the runner resumes it
on more devices, like any stopped trial. The same holds for GPUs: a process keeps those it started with.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from yunlu.core.errors import StoreError
from yunlu.executors import cpu_limits
from yunlu.executors.lease_record import read_record as read_leases
from yunlu.executors.registry import open_executor
from yunlu.executors.worker_process import WORKER, count_gpus, recorded_worker
from yunlu.hardware.fleet import Placement
from yunlu.jobs import lifecycle
from yunlu.runs.documents import read_job
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.control import find_service
from yunlu.scheduler.executor_adapter import ExecutorAdapter, NotNowError
from yunlu.scheduler.pool_store import PoolStore
from yunlu.scheduler.queue import QueueEntry, change_entry, job_signature, read_entry, requeue
from yunlu.scheduler.resource_request import make_request
from yunlu.tuning.study_dir import StudyError

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

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


def find_slots(*, devices: int | None = None, priority: int = 0, team: str = "") -> Slots:
    """The pool if one is up, else this machine."""
    if find_service(lifecycle.home()) is not None:
        return PoolSlots(devices=devices, priority=priority, team=team)
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

    def __init__(self, *, devices: int | None = None, priority: int = 0, team: str = "") -> None:
        """Takes the study's priority and team, and its most devices."""
        self._home = lifecycle.home()
        self._most = devices
        self._priority = priority
        self._team = team

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
        priority = self._priority_of(promise)
        if read_entry(run) is None:
            adapted = job.train.adapt_batch
            entry = QueueEntry(
                submitted_at=time.time(),
                priority=priority,
                team=self._team,
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
        priority = self._priority_of(promise)
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

    def _priority_of(self, promise: float) -> int:
        # Never above the study's own: other runs of the pool do not wait for a promising trial.
        return self._priority if promise >= PROMISING else self._priority - 1
