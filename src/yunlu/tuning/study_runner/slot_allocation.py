"""Allocates slots to trials: queue, devices of each trial, cost."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Literal

from yunlu.core.errors import StoreError
from yunlu.jobs.calibration import usual_start_s
from yunlu.runs.states import RunState
from yunlu.tuning.rungs import find_size
from yunlu.tuning.study_runner.device_shares import find_promises, share_devices
from yunlu.tuning.study_runner.trial_runs import write_verdict
from yunlu.tuning.study_runner.trial_speeds import TrialSpeeds
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.device_shares import Aim, DeviceClaim
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.study_runner.watched_trial import WatchedTrial
    from yunlu.tuning.values import Method

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
