"""Speed model of Sia's scheduler: one fit per type; other types are projected by the speed of one device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.fitting import fit_throughput
from yunlu.scheduler.policy.goodput import FittedSpeed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.lab.simulation.sia_rules import TablePrior
    from yunlu.scheduler.policy.goodput import Throughput
    from yunlu.scheduler.policy.observations import (
        BatchLimits,
        BatchSplit,
        Observations,
        SpeedModel,
        StepTiming,
    )

_LEAP = 2
_MOST_DEVICES = 64
_ACCURATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SiaSpeed:
    """The models of one job."""

    fits: Mapping[str, FittedSpeed]
    """By type that it has run on."""
    seen: Observations = field(compare=False, repr=False)
    estimator: SiaEstimator = field(compare=False, repr=False)

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Useful samples per second; before the first step, 1 for one device of any type."""
        prior = self.estimator.prior
        here = prior.samples_per_s(self.seen, device_type)
        if here is None:
            return np.zeros(len(devices))
        unit = prior.multiple(self.seen, device_type)
        if not self.fits or self.seen.noise is None:
            return np.where(devices == unit, 1.0, 0.0)
        most = prior.most_devices(self.seen, device_type) or 0
        if device_type in self.fits:
            result = self.fits[device_type].goodput(device_type, nodes, devices)
            return np.where((devices <= most) & (devices % unit == 0), result, 0.0)
        source = next(
            node_device for node_device in self.estimator.node_devices if node_device in self.fits
        )
        there = prior.samples_per_s(self.seen, source)
        assert there is not None
        # As many copies of the model there, each as fast as one is here.
        unit_there = prior.multiple(self.seen, source)
        devices_there = np.maximum(devices // unit, 1) * unit_there
        nodes_there = -(-devices_there // self.estimator.node_devices[source])
        ratio = here * unit / (there * unit_there)
        result = self.fits[source].goodput(source, nodes_there, devices_there) * ratio
        return np.where((devices <= most) & (devices % unit == 0), result, 0.0)

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        """The batch to run with, within what fits that shape."""
        most = self.estimator.prior.local_most(self.seen, device_type, nodes, devices)
        limits = self.estimator.prior.limits(self.seen, device_type)
        assert most is not None
        assert limits is not None
        limits = replace(limits, local_most=most)
        fit = self.fits.get(device_type)
        if fit is None:
            return FittedSpeed(throughputs={}, limits=limits).choose_batch(
                device_type, nodes, devices
            )
        return replace(fit, limits=limits).choose_batch(device_type, nodes, devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiaEstimator:
    """Fits them: an :class:`~...observations.Estimator`."""

    prior: TablePrior
    node_devices: Mapping[str, int]
    """Devices per node of each type; the order is that in which types are projected from."""

    def __call__(self, seen: Observations, before: SpeedModel | None) -> SiaSpeed:
        """Fit each type that the job has run on."""
        last = before if isinstance(before, SiaSpeed) else None
        throughputs = self._fit(seen, last)
        fits = {
            name: FittedSpeed(
                throughputs={name: throughput},
                limits=self._believed_limits(seen, name),
                noise=seen.noise,
                max_devices=self._cap(seen),
            )
            for name, throughput in throughputs.items()
        }
        return SiaSpeed(fits=fits, seen=seen, estimator=self)

    def _fit(self, seen: Observations, last: SiaSpeed | None) -> Mapping[str, Throughput]:
        prior: dict[str, Throughput] = {}
        if last is not None:
            prior = {name: fit.throughputs[name] for name, fit in last.fits.items()}
            if last.seen.timings is seen.timings:
                return prior
        by_type: dict[str, list[StepTiming]] = {}
        for timing in seen.timings:
            by_type.setdefault(timing.device_type, []).append(timing)
        for name, timings in by_type.items():
            old = {t[:3] for t in last.seen.timings} if last is not None else set[object]()
            if (
                name in prior
                and all(t[:3] in old for t in timings)
                and _is_accurate(prior[name], timings)
            ):
                continue
            # Sia uses its formula also where it has measured.
            prior[name] = replace(fit_throughput(timings), measured=None)
        return prior

    def _limits(self, seen: Observations, name: str) -> BatchLimits:
        limits = self.prior.limits(seen, name)
        assert limits is not None
        return limits

    def _believed_limits(self, seen: Observations, name: str) -> BatchLimits:
        """Its estimates are limited to the batch that was asked for, though jobs are not."""
        limits = self._limits(seen, name)
        requested = seen.asked_batch
        return limits if requested is None else replace(limits, most=min(requested, limits.most))

    def _cap(self, seen: Observations) -> int:
        """Twice the largest number seen on any type."""
        most = 1
        for name in self.node_devices:
            largest = max((t.devices for t in seen.timings if t.device_type == name), default=0)
            limits = self.prior.limits(seen, name)
            if limits is None:  # it cannot run there
                continue
            allowed = limits.most // limits.local_least
            least = self.prior.multiple(seen, name)
            most = max(most, min(max(_LEAP * largest, least), _MOST_DEVICES, allowed))
        return most


def _is_accurate(throughput: Throughput, timings: list[StepTiming]) -> bool:
    """Whether a model predicts these timings so well that another fit would change nothing."""
    nodes, devices, local, step_s = (
        np.array([timing[at] for timing in timings]) for at in (1, 2, 3, 5)
    )
    result = throughput.predict_step_s(
        nodes, devices, local.astype(np.float64), np.zeros(len(local))
    )
    return bool((np.abs(np.log(result / step_s)) < _ACCURATE).all())
