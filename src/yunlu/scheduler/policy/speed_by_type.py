"""Speed of a job on each device type, including types it has never run on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.goodput import FittedSpeed, ShapeList, Throughput, compute_goodputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.goodput import (
        BatchLimits,
        BatchSplit,
        Observations,
        SpeedModel,
        StepTiming,
    )
    from yunlu.scheduler.policy.values import Demand

    Floats = NDArray[np.float64]


class DeviceTypePrior(Protocol):
    """Prior knowledge of a program on a device type, before it has run there."""

    def limits(self, seen: Observations, device_type: str) -> BatchLimits | None:
        """Limits of its batch there; None where it cannot run at all."""
        ...

    def local_most(
        self, seen: Observations, device_type: str, nodes: int, devices: int
    ) -> int | None:
        """The most samples that fit a device in that shape; None if unknown."""
        ...

    def most_devices(self, seen: Observations, device_type: str) -> int | None:
        """The most devices it can use there; None if unknown."""
        ...

    def multiple(self, seen: Observations, device_type: str) -> int:
        """It can use only multiples of this there."""
        ...

    def samples_per_s(self, seen: Observations, device_type: str) -> float | None:
        """How fast one device is, measured alone or predicted; None where nobody knows."""
        ...


class NoDeviceTypePrior:
    """All types are alike until they have been tried."""

    def limits(self, seen: Observations, device_type: str) -> BatchLimits | None:
        """The job's own."""
        del device_type
        return seen.limits

    def local_most(
        self, seen: Observations, device_type: str, nodes: int, devices: int
    ) -> int | None:
        """Unknown."""
        del seen, device_type, nodes, devices

    def most_devices(self, seen: Observations, device_type: str) -> int | None:
        """Unknown."""
        del seen, device_type

    def multiple(self, seen: Observations, device_type: str) -> int:
        """Any number."""
        del seen, device_type
        return 1

    def samples_per_s(self, seen: Observations, device_type: str) -> float | None:
        """Unknown."""
        del seen, device_type


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedByType:
    """The fitted models of one job, one for each type it can run on."""

    by_type: Mapping[str, FittedSpeed]
    fit: FittedSpeed
    """The fit to the types it has run on."""
    seen: Observations = field(compare=False, repr=False)
    prior: DeviceTypePrior = field(compare=False, repr=False)

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> Floats:
        """Useful samples a second with the best batch; 0 where it cannot run."""
        speed = self.by_type.get(device_type)
        if speed is None:
            return np.zeros(len(devices))
        return speed.goodput(device_type, nodes, devices)

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        """The batch with the best goodput there, within what fits."""
        speed = self.by_type.get(device_type, self.fit)
        most = self.prior.local_most(self.seen, device_type, nodes, devices)
        if most is not None and most < speed.limits.local_most:
            speed = replace(speed, limits=replace(speed.limits, local_most=most))
        return speed.choose_batch(device_type, nodes, devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTypeFitter:
    """Fits models for all types of a pool: an ``Estimator``.

    A type without timings is projected from one with them: the same curve, scaled by the ratio of
    the speeds of single devices (Sia, SOSP'23, section 3.3).
    """

    types: tuple[str, ...]
    prior: DeviceTypePrior = field(default_factory=NoDeviceTypePrior)
    fitter: Fitter = field(default_factory=lambda: Fitter(leap=2, first_devices=1))
    """With small leaps: a wrong estimate is projected to the other types."""

    def __call__(self, seen: Observations, before: SpeedModel | None) -> SpeedByType:
        """The model of a job, from its own timings and those of its program."""
        last = before.fit if isinstance(before, SpeedByType) else None
        fit = self.fitter(seen, last)
        by_type: dict[str, FittedSpeed] = {}
        for name in self.types:
            limits = self.prior.limits(seen, name)
            if limits is None:
                continue
            throughput = fit.throughputs.get(name) or self._project(fit, seen, name)
            most = self.prior.most_devices(seen, name)
            multiple = self.prior.multiple(seen, name)
            tried = max(fit.max_devices, multiple)
            by_type[name] = replace(
                fit,
                throughputs={name: throughput} if throughput else {},
                limits=limits,
                max_devices=tried if most is None else min(most, tried),
                multiple=multiple,
            )
        return SpeedByType(by_type=by_type, fit=fit, seen=seen, prior=self.prior)

    def _project(self, fit: FittedSpeed, seen: Observations, name: str) -> Throughput | None:
        source = _best_known(fit.throughputs, (*seen.shared_timings, *seen.timings))
        here = self.prior.samples_per_s(seen, name)
        if source is None:
            return scale_throughput(_LINEAR, _LINEAR_SAMPLES_PER_S / here) if here else None
        there = self.prior.samples_per_s(seen, source)
        ratio = there / here if there and here else 1.0
        return scale_throughput(fit.throughputs[source], ratio)


_LINEAR_SAMPLES_PER_S = 1e3
_LINEAR = Throughput(1e-8, 1 / _LINEAR_SAMPLES_PER_S, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)
"""A program of which only the speed of one device is known: linear scaling until measured."""


def scale_throughput(throughput: Throughput, ratio: float) -> Throughput:
    """The same program on devices that take so many times as long for everything."""
    return replace(
        throughput,
        gradient_s=throughput.gradient_s * ratio,
        gradient_s_per_sample=throughput.gradient_s_per_sample * ratio,
        network_s=throughput.network_s * ratio,
        network_s_per_device=throughput.network_s_per_device * ratio,
        link_s=throughput.link_s * ratio,
        link_s_per_device=throughput.link_s_per_device * ratio,
    )


def _best_known(throughputs: Mapping[str, Throughput], timings: Sequence[StepTiming]) -> str | None:
    """The type with the most timings; the first by name among equals."""
    counts = {name: sum(t.device_type == name for t in timings) for name in sorted(throughputs)}
    return max(counts, key=counts.__getitem__, default=None)


def tabulate_goodputs(
    jobs: Sequence[Demand], types: Sequence[str], nodes: Sequence[int], devices: Sequence[int]
) -> Floats:
    """Goodput of every job (rows) in every shape (columns: type, nodes, devices)."""
    table = np.zeros((len(jobs), len(types)))
    for name in dict.fromkeys(types):
        columns = [at for at, item in enumerate(types) if item == name]
        shapes = ShapeList(
            tuple(int(nodes[at]) for at in columns), tuple(int(devices[at]) for at in columns)
        )
        fitted: list[FittedSpeed] = []
        rows: list[int] = []
        for row, job in enumerate(jobs):
            speed = job.speed
            if isinstance(speed, SpeedByType):
                speed = speed.by_type.get(name)
            if isinstance(speed, FittedSpeed):
                fitted.append(speed)
                rows.append(row)
            elif speed is not None:
                table[row, columns] = speed.goodput(
                    name, np.array(shapes.nodes), np.array(shapes.devices)
                )
        if fitted:
            table[np.ix_(rows, columns)] = compute_goodputs(fitted, name, shapes)
    return table
