"""Observations of a job while it runs, and of all jobs of its application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.scheduler.policy.observations import NoisePoint, Observations, StepTiming

if TYPE_CHECKING:
    from yunlu.scheduler.policy.observations import BatchLimits, BatchSplit, GradientNoise

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
