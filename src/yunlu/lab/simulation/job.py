"""One job of a simulated pool: trains as measured, and is observed as a live job would be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yunlu.hardware.fleet import NOTHING, Placement
from yunlu.lab.simulation.profiles import FixedBatchSpeed, SimulationError
from yunlu.scheduler.policy.goodput import (
    BatchSplit,
    NoisePoint,
    Observations,
    StepTiming,
    clamp_batch,
    split_batch,
)
from yunlu.scheduler.policy.values import Demand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.lab.simulation.profiles import Application, Submission
    from yunlu.lab.simulation.simulator import Faults, JobFaults, SimulationRules
    from yunlu.scheduler.policy.goodput import (
        BatchLimits,
        Estimator,
        GradientNoise,
        SpeedModel,
    )
    from yunlu.scheduler.policy.values import Speed

Key = tuple[str, int, int, int]
_REPEATS = 4
"""Number of measurements of one configuration that are averaged."""


@dataclass(slots=True)
class SharedObservations:
    """Observations of all jobs of one application."""

    timings: dict[Key, StepTiming] = field(default_factory=dict[Key, StepTiming])
    noise: dict[int, NoisePoint] = field(default_factory=dict[int, NoisePoint])
    version: int = 0
    _timings: tuple[StepTiming, ...] = ()
    _noise: tuple[NoisePoint, ...] = ()
    _stale: tuple[bool, bool] = (False, False)

    def add_timing(self, key: Key, timing: StepTiming) -> None:
        """The first of a configuration counts, so that fits stay stable."""
        if key not in self.timings:
            self.timings[key] = timing
            self.version += 1
            self._stale = (True, self._stale[1])

    def add_noise(self, epoch: int, point: NoisePoint) -> None:
        """The first at each progress counts."""
        if epoch not in self.noise:
            self.noise[epoch] = point
            self.version += 1
            self._stale = (self._stale[0], True)

    def read(self) -> tuple[tuple[StepTiming, ...], tuple[NoisePoint, ...]]:
        """Both; the same objects while nothing is added."""
        timings, noise = self._stale
        if timings:
            self._timings = tuple(self.timings.values())
        if noise:
            self._noise = tuple(self.noise.values())
        self._stale = (False, False)
        return self._timings, self._noise


class JobObservations:
    """Observations of one job."""

    def __init__(
        self,
        signature: str,
        limits: BatchLimits,
        asked_batch: int,
        shared: SharedObservations | None,
    ) -> None:
        self._signature, self._limits, self._shared = signature, limits, shared
        self._asked_batch = asked_batch
        self._timings: dict[Key, tuple[StepTiming, int]] = {}
        self._noise: GradientNoise | None = None
        self._history: dict[int, NoisePoint] = {}
        self._own: tuple[tuple[StepTiming, ...], tuple[NoisePoint, ...]] = ((), ())
        self._stale = [False, False]
        self._shelf_version = -1
        self._seen: Observations | None = None

    def add(
        self,
        timing: StepTiming,
        noise: GradientNoise,
        *,
        epoch: int,
        done: float,
        batch: BatchSplit,
        averages: bool,
    ) -> None:
        """Add one measurement."""
        key: Key = timing[:4]
        known = self._timings.get(key)
        if known is None:
            self._timings[key] = (timing, 1)
            self._stale[0] = True
            if self._shared is not None:
                self._shared.add_timing(key, timing)
        elif averages and known[1] < _REPEATS:
            self._timings[key] = (_mean(*known, timing), known[1] + 1)
            self._stale[0] = True
        if noise is not self._noise:
            self._noise = noise
            self._seen = None
        if epoch not in self._history:
            point = NoisePoint(done, batch.total(timing.devices), noise)
            self._history[epoch] = point
            self._stale[1] = True
            if self._shared is not None:
                self._shared.add_noise(epoch, point)

    def read(self) -> Observations:
        """As one value; the same object while nothing is new."""
        shared = self._shared
        is_new = any(self._stale) or self._seen is None
        if shared is not None and shared.version != self._shelf_version:
            self._shelf_version, is_new = shared.version, True
        if not is_new:
            assert self._seen is not None
            return self._seen
        timings, history = self._own
        if self._stale[0]:
            timings = tuple(timing for timing, _ in self._timings.values())
        if self._stale[1]:
            history = tuple(self._history.values())
        self._own, self._stale = (timings, history), [False, False]
        shared = shared.read() if shared is not None else ((), ())
        self._seen = Observations(
            signature=self._signature,
            limits=self._limits,
            asked_batch=self._asked_batch,
            timings=timings,
            noise=self._noise,
            noise_history=history,
            shared_timings=shared[0],
            shared_noise=shared[1],
        )
        return self._seen


def _mean(known: StepTiming, count: int, more: StepTiming) -> StepTiming:
    return known._replace(
        accumulate_s=(known.accumulate_s * count + more.accumulate_s) / (count + 1),
        step_s=(known.step_s * count + more.step_s) / (count + 1),
    )


_OVERRUN = 0.05
"""Least remaining share of its declared length that a job reports."""


class SimulatedJob:
    """State of a job. Time passes for it only through ``advance``."""

    def __init__(
        self,
        submission: Submission,
        application: Application,
        *,
        rules: SimulationRules,
        faults: Faults,
        job_faults: JobFaults,
        estimator: Estimator | None,
        shared: SharedObservations | None,
        devices_per_node: Mapping[str, int],
    ) -> None:
        self.submission, self.application = submission, application
        self.ended_at: float | None = None
        self.retry_at: float | None = None
        """When it may be started again after a crash."""
        self.crashes = 0
        self.placement: Placement = NOTHING
        self._starts = 0
        self.served_device_s: float = 0
        self.history: list[tuple[float, Placement]] = []
        self._rules, self._faults, self._estimator = rules, faults, estimator
        self._job_faults = job_faults
        self._types = frozenset(application.times)
        self._notes = JobObservations(
            application.name, application.limits, submission.asked_batch, shared
        )
        self._model: SpeedModel | None = None
        self._modelled: object = None
        self._asked_speed = FixedBatchSpeed(application, submission.asked_batch, devices_per_node)
        self._epoch = 0
        self._progress = 0.0
        self._shape: tuple[int, ...] = ()
        self._devices = 0
        self._device_type = ""
        self._batch = BatchSplit(0)
        self._rate = 0.0
        self._is_stale = True
        """Whether the rate must be computed again."""
        self._news: tuple[StepTiming, GradientNoise] | None = None
        """Observations of its next step; not visible before that step."""
        self._restart_left_s: float = 0
        self._held_since: float | None = None
        self._crashes_at = job_faults.crashes_at * application.length
        self._saved = (0, 0.0)
        self._unsaved_s = 0.0
        self._dice = np.random.default_rng(job_faults.noise_seed) if faults.step_noise else None
        own = rules.restart_s_by_application
        self._restart_s = own.get(application.name, rules.restart_s)
        self._slowdown = rules.slowdown_by_application.get(application.name, 1.0)

    @property
    def name(self) -> str:
        """As in the workload."""
        return self.submission.name

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(self._starts - 1, 0)

    @property
    def is_restarting(self) -> bool:
        """Whether it holds devices and does not train yet."""
        return self._restart_left_s > 0

    def demand(self) -> Demand:
        """What a policy may know about it."""
        requested, limits = self.submission, self.application.limits
        most = self.application.max_devices
        if self._estimator is None:
            most = min(most, max(requested.asked_batch // limits.local_least, 1))
        return Demand(
            id=requested.name,
            submitted_at=requested.submitted_at,
            program=self.application.name,
            speed=self._speed(),
            remaining=self._remaining() if self._rules.declares_length else None,
            done=self._progress * limits.base,
            min_devices=self.application.multiple,
            max_devices=most,
            multiple=self.application.multiple,
            asked_devices=requested.asked_devices,
            types=self._types,
            held=self.placement,
            restart_s=self._restart_s,
            restarts=self.restarts,
            served_device_s=self.served_device_s,
            held_since=self._held_since,
            is_pinned=self.is_restarting,
        )

    def place(self, placement: Placement, device_type: str, now: float) -> None:
        """Give it other devices, or none."""
        if placement == self.placement:
            return
        shape = tuple(count for _, count in placement.shares)
        is_same = shape == self._shape and device_type == self._device_type
        self.placement = placement
        self.history.append((now, placement))
        self._held_since = now if placement else None
        self._saved, self._unsaved_s = (self._epoch, self._progress), 0.0
        if is_same and not self._rules.restarts_on_move:
            return
        self._shape, self._devices, self._device_type = shape, sum(shape), device_type
        self._restart_left_s = 0
        if placement:
            self._starts += 1
            self._restart_left_s = self._restart_s
            self._choose_batch()
            self._is_stale = True

    def advance(self, start: float, seconds: float, interference: float = 0.0) -> None:
        """Let time pass with the devices it holds."""
        if not self._shape or self.ended_at is not None:
            return
        delay = min(self._restart_left_s, seconds)
        self._restart_left_s -= delay
        self._unsaved_s += seconds
        clock, left = start + delay, seconds - delay
        while left > 0 and self._shape and self.ended_at is None:
            if self._is_stale:
                self._measure()
            has_news = self._note()
            spent = self._train(left, self._rate * (1.0 - interference), clock)
            clock, left = clock + spent, left - spent
            if has_news and self._shape:
                self._choose_batch()
        # Time after its end is not its own; a crash has released its devices already.
        self.served_device_s += (clock - start) * self._devices
        if not self._shape:
            self._devices = 0
        if self._unsaved_s >= self._faults.checkpoint_s:
            self._saved, self._unsaved_s = (self._epoch, self._progress), 0.0

    def next_event_s(self, within_s: float) -> float:
        """Seconds to the next end of an epoch, where the job may end within a span; else beyond."""
        if not self._shape or self.ended_at is not None:
            return math.inf
        if self._is_stale:
            self._measure()
        left = self.application.length - self._progress
        # The rate changes from epoch to epoch, but it does not double in one span.
        if self._restart_left_s + left / self._rate / 2 > within_s:
            return math.inf
        end = self.application.ends[self._epoch + 1]
        return self._restart_left_s + max(1, round((end - self._progress) / self._rate))

    def _train(self, seconds: float, rate: float, clock: float) -> float:
        """Train to the end of the span, of the epoch, or to a crash; returns the seconds."""
        end = self.application.ends[self._epoch + 1]
        if self._crashes_at < end:
            reached = self._progress + rate * seconds
            if reached >= self._crashes_at:
                spent = min(round((self._crashes_at - self._progress) / rate), seconds)
                self._crash(clock + spent)
                return spent
        if self._progress + rate * seconds < end:
            self._progress += rate * seconds
            return seconds
        spent = min(round((end - self._progress) / rate), seconds)
        self._epoch += 1
        self._progress = end
        self._is_stale = True
        if self._epoch >= self.application.epochs:
            self.ended_at = clock + spent
        return spent

    def _crash(self, at: float) -> None:
        self.crashes += 1
        self._crashes_at = math.inf
        self._epoch, self._progress = self._saved
        self._is_stale = True
        self.retry_at = at + self._faults.retry_s
        self.placement, self._shape = NOTHING, ()
        self._restart_left_s = 0
        self._held_since = None
        self.history.append((at, NOTHING))

    def _measure(self) -> None:
        """Compute the true rate, and what the job would measure of it."""
        application, batch = self.application, self._batch
        times = application.times[self._device_type].find(self._shape, batch.local)
        if times is None:
            raise SimulationError(
                f"{self.name}: nothing was measured near {self._devices} devices "
                f"on {len(self._shape)} nodes with {batch.local} samples each.",
                hint="the policy should stay within max_devices, the cluster within the profiles",
            )
        step_s, sync_s = times
        if self._dice is not None:
            factor = math.exp(self._faults.step_noise * float(self._dice.standard_normal()))
            step_s, sync_s = step_s * factor, sync_s * factor
        accumulate_s = step_s - sync_s
        total = batch.total(self._devices)
        noise = application.noise(total, self._epoch)
        scale = total / application.limits.base
        gain = (noise.var + noise.sqr) / (noise.var / scale + noise.sqr)
        self._rate = gain / (step_s + accumulate_s * batch.accumulation)
        if self._slowdown != 1.0:
            self._rate /= self._slowdown
        self._is_stale = False
        key = (self._device_type, len(self._shape), self._devices, batch.local)
        timing = StepTiming(*key, accumulate_s * self._slowdown, step_s * self._slowdown)
        self._news = (timing, noise)

    def _note(self) -> bool:
        """Record the measurement once its first step is made; returns whether there was one."""
        if self._news is None:
            return False
        timing, noise = self._news
        self._news = None
        if self._estimator is not None:
            self._notes.add(
                timing,
                noise,
                epoch=self._epoch,
                done=self._progress * self.application.limits.base,
                batch=self._batch,
                averages=self._dice is not None,
            )
        return True

    def _choose_batch(self) -> None:
        limits = self.application.limits
        if self._estimator is None:
            fitting = self._asked_speed.split(self._device_type, self._shape)
            chosen = fitting or split_batch(limits, self.submission.asked_batch, self._devices)
        elif limits.fixed is not None:
            chosen = split_batch(limits, limits.fixed, self._devices)
        else:
            model = self._make_model(self._estimator)
            chosen = model.choose_batch(self._device_type, len(self._shape), self._devices)
            chosen = clamp_batch(limits, chosen, self._devices)
        if chosen != self._batch:
            self._batch = chosen
            self._is_stale = True

    def _speed(self) -> Speed:
        if self._estimator is not None:
            return self._make_model(self._estimator)
        self._asked_speed.epoch = self._epoch
        return self._asked_speed

    def _make_model(self, estimator: Estimator) -> SpeedModel:
        seen = self._notes.read()
        if self._model is None or seen is not self._modelled:
            self._model, self._modelled = estimator(seen, self._model), seen
        return self._model

    def _remaining(self) -> float:
        """Declared minus done; a job beyond its declared length is taken to be half way."""
        declared = self.application.length * self._job_faults.declared_factor
        left = max(declared - self._progress, self._progress - declared, _OVERRUN * declared)
        if self._job_faults.declared_factor == 1.0:
            left = self.application.length - self._progress
        return left * self.application.limits.base
