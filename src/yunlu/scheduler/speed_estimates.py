"""Speed estimates of runs for the allocator, from observed step times."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

from yunlu.hardware.catalog import load_catalog
from yunlu.scheduler.policy.observations import BatchLimits, GradientNoise, Observations, StepTiming
from yunlu.scheduler.policy.speed_by_type import NoDeviceTypePrior

if TYPE_CHECKING:
    from yunlu.scheduler.allocation_record import RecordedTiming
    from yunlu.scheduler.policy.observations import Estimator, SpeedModel
    from yunlu.scheduler.run_status import ScheduledRun

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
        )
        # Never observed: it starts with the number of devices that its owner requested.
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
        if not (seen.timings or seen.shared_timings):
            return None
        return _peak_flops(device_type)


@cache
def _peak_flops(device_type: str) -> float | None:
    catalog = load_catalog()
    if not catalog.has_device(device_type):
        return None
    peaks = catalog.device(device_type).peak_flops
    return next((peaks[item] for item in _TRAINED_IN if item in peaks), None)


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
