"""Fits a job's throughput model to measured steps, with residuals where the formula is off.

Residuals of the step-time formula, learnt from measured steps.
A formula with seven parameters is a few per cent off: kernels like some batches better than others,
and the sum of gradients hides behind the backward pass from some batch on. That is as much as
choosing between two batches is about. So the residual (the logarithm of measured over predicted time) is
modelled as a Gaussian process over shapes and samples per device (kriging): a measurement is trusted
where it was made, partly in its neighbourhood, and elsewhere the formula holds, corrected by the mean
residual of the shape or the nearest one.

The loss and the optimism about what was never seen are those of Pollux (OSDI 2021, section 4.1):
a term without evidence is taken as free, so that the job is tried there. Three things differ: a
job begins on a few devices at once and leaps further (each step up costs a restart), timings of other
jobs of the same program count as its own (no ramp at all for a model that the pool knows), and what
was measured is trusted more than the formula (the residual model).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.goodput import FittedSpeed, Throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.goodput import (
        GradientNoise,
        NoisePoint,
        Observations,
        SpeedModel,
        StepTiming,
    )

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_SHAPE_SPREAD = 0.15
"""Standard deviation of the mean residual of a shape."""
_SHAPE_REACH = 4.0
"""How far that holds for other numbers of devices, as a logarithm: very far, since a shape is not
better for never having been tried."""
_BATCH_SPREAD = 0.06
"""Standard deviation of one batch of a shape around that."""
_BATCH_REACH = 0.2
"""Length scale over other batches, as a logarithm."""
_BATCH_SHAPE_REACH = 1.0
"""Length scale over other numbers of devices."""
_DOUBT = 0.01
"""Standard deviation of a measurement."""


@dataclass(frozen=True, slots=True)
class ResidualModel:
    """Measured points and their kriging weights."""

    nodes: tuple[int, ...]
    devices: tuple[int, ...]
    local: tuple[float, ...]
    """Samples of one device in one pass."""
    weights: tuple[float, ...]

    def __hash__(self) -> int:
        """Of the weights alone: models are looked up by their value, over and over."""
        return hash(self.weights)

    def predict_factor(self, nodes: Ints, devices: Ints, local: Floats) -> Floats:
        """Ratio of the real time of a step to that of the formula."""
        known = np.array(self.nodes), np.array(self.devices), np.array(self.local)
        return np.exp(_covariance((nodes, devices, local), known) @ np.array(self.weights))


def fit_residuals(nodes: Ints, devices: Ints, local: Floats, off: Floats) -> ResidualModel:
    """Fit to measurements, each with the logarithm of measured over predicted time."""
    at = nodes, devices, local
    doubt = _DOUBT**2 * np.eye(len(off))
    weights = np.linalg.solve(_covariance(at, at) + doubt, off)
    return ResidualModel(
        nodes=tuple(nodes.tolist()),
        devices=tuple(devices.tolist()),
        local=tuple(local.tolist()),
        weights=tuple(weights.tolist()),
    )


def _covariance(at: tuple[Ints, Ints, Floats], known: tuple[Ints, Ints, Floats]) -> Floats:
    """Covariance of each point (leading axes) with each known point (the last axis)."""
    nodes, devices, local = (item[..., None] for item in at)
    # Within a node and between nodes, gradients are summed over different wires.
    is_alike = (nodes > 1) == (known[0] > 1)
    devices_away = np.abs(np.log(devices / known[1]))
    batch_away = np.log(local / known[2]) / _BATCH_REACH
    shape = _SHAPE_SPREAD**2 * np.exp(-devices_away / _SHAPE_REACH)
    batch = _BATCH_SPREAD**2 * np.exp(-devices_away / _BATCH_SHAPE_REACH - 0.5 * batch_away**2)
    return is_alike * (shape + batch)


_FLOOR = 1e-8
_MOST_OVERLAP = 10.0
_LEAST_OVERLAP = 1.001
_ACCURATE = 0.03
"""A new timing that the model predicts within this needs no new fit."""
_MOST_PER_SHAPE = 6
"""Timings of one shape that are fitted: more batch sizes only make it slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitter:
    """Fits speed models to observations: an ``Estimator``."""

    leap: int = 4
    """How many times the largest size seen so far a job may be tried with."""
    first_devices: int = 4
    """The largest size for a program that was never observed."""

    def __call__(self, seen: Observations, before: SpeedModel | None) -> FittedSpeed:
        """The model of a job, from its own timings and those of its program."""
        last = before if isinstance(before, FittedSpeed) else None
        if last is not None and _is_as_before(seen, last):
            throughputs, most = last.throughputs, last.max_devices
        else:
            merged = _merge(seen.shared_timings, seen.timings)
            throughputs = _fit_types(merged or seen.predicted_timings, last)
            largest = max((timing.devices for timing in merged), default=0)
            most = max(self.leap * largest, self.first_devices)
        return FittedSpeed(
            throughputs=throughputs,
            limits=seen.limits,
            noise=seen.noise or _first_noise(seen.shared_noise),
            max_devices=most,
            timings=seen.timings,
            shared=seen.shared_timings,
            predicted=seen.predicted_timings,
        )


def _is_as_before(seen: Observations, last: FittedSpeed) -> bool:
    """Whether no timing is new."""
    return (
        last.timings is seen.timings
        and last.shared is seen.shared_timings
        and last.predicted is seen.predicted_timings
    )


def fit_throughput(timings: Sequence[StepTiming]) -> Throughput:
    """The seven parameters that fit these timings best, with the residuals.

    All timings are of one type of device.
    """
    return _correct(_fit(tuple(_thin(timings))), timings)


def _renew(before: Throughput | None, timings: Sequence[StepTiming]) -> Throughput:
    """The old formula while it fits the timings; residuals are learnt from all timings."""
    if before is None or not _is_accurate(before, timings):
        return fit_throughput(timings)
    return _correct(before, timings)


def _merge(shared: Sequence[StepTiming], own: Sequence[StepTiming]) -> list[StepTiming]:
    """One timing of each configuration; the job's own goes first."""
    result = {_key(timing): timing for timing in shared}
    result.update((_key(timing), timing) for timing in own)
    return [result[key] for key in sorted(result)]


def _key(timing: StepTiming) -> tuple[str, int, int, int]:
    return timing.device_type, timing.nodes, timing.devices, timing.local_batch


def _fit_types(merged: Sequence[StepTiming], last: FittedSpeed | None) -> dict[str, Throughput]:
    by_type: dict[str, list[StepTiming]] = {}
    for timing in merged:
        by_type.setdefault(timing.device_type, []).append(timing)
    known = last.throughputs if last else {}
    return {name: _renew(known.get(name), timings) for name, timings in by_type.items()}


def _is_accurate(throughput: Throughput, timings: Sequence[StepTiming]) -> bool:
    """Whether the model knows every shape of these timings and predicts them well."""
    points = _Points.of(timings)
    known = throughput.measured
    shapes = set(zip(known.nodes, known.devices, strict=True)) if known is not None else set()
    if any((timing.nodes, timing.devices) not in shapes for timing in timings):
        return False
    result = throughput.predict_step_s(
        points.nodes, points.devices, points.local, np.zeros_like(points.local)
    )
    return bool(np.all(np.abs(np.log(result / points.step_s)) < _ACCURATE))


def _first_noise(points: Sequence[NoisePoint]) -> GradientNoise | None:
    """Gradient noise of other jobs at their start."""
    return min(points, key=lambda point: point.done).noise if points else None


def _thin(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """Of each shape a few batch sizes, evenly spread."""
    shapes: dict[tuple[int, int], list[StepTiming]] = {}
    for timing in sorted(timings, key=_key):
        shapes.setdefault((timing.nodes, timing.devices), []).append(timing)
    retained: list[StepTiming] = []
    for group in shapes.values():
        count = min(len(group), _MOST_PER_SHAPE)
        retained.extend(
            group[i] for i in sorted(set(np.linspace(0, len(group) - 1, count, dtype=int)))
        )
    return retained


@dataclass(frozen=True, slots=True)
class _Points:
    nodes: NDArray[np.int64]
    devices: NDArray[np.int64]
    local: Floats
    gradient_s: Floats
    step_s: Floats

    @classmethod
    def of(cls, timings: Sequence[StepTiming]) -> _Points:
        return cls(
            nodes=np.array([timing.nodes for timing in timings], dtype=np.int64),
            devices=np.array([timing.devices for timing in timings], dtype=np.int64),
            local=np.array([timing.local_batch for timing in timings], dtype=np.float64),
            gradient_s=np.array([max(timing.accumulate_s, 1e-6) for timing in timings]),
            step_s=np.array([max(timing.step_s, 1e-6) for timing in timings]),
        )


@lru_cache(maxsize=4096)
def _fit(timings: tuple[StepTiming, ...]) -> Throughput:
    from scipy.optimize import minimize  # noqa: PLC0415  (takes a while to import)

    points = _Points.of(timings)
    start, low, high = _bound(points)
    result = minimize(
        _compute_loss,
        np.clip(start, low, high),
        args=(points,),
        jac=True,
        method="L-BFGS-B",
        bounds=list(zip(low, high, strict=True)),
        options={"maxiter": 100, "ftol": 1e-7},
    )
    fitted = np.exp(np.clip(result.x, low, high))
    return _finish(fitted, points)


def _bound(points: _Points) -> tuple[Floats, Floats, Floats]:
    """Where to begin and how far to go, in logarithms; what has no evidence stays at the floor."""
    low, high = np.full(7, np.log(_FLOOR)), np.full(7, np.log(1e3))
    low[6], high[6] = np.log(_LEAST_OVERLAP), np.log(_MOST_OVERLAP)
    start = np.full(7, np.log(_FLOOR))
    mean_s, mean_local = points.gradient_s.mean(), points.local.mean()
    start[0], start[1] = np.log(mean_s / 2), np.log(mean_s / 2 / mean_local)
    start[6] = np.log(1.5)
    if len(np.unique(points.local)) == 1:
        low[0] = high[0] = start[0]
    waits = np.maximum(points.step_s - points.gradient_s, 0.1 * points.step_s)
    several = points.devices > 2
    for first, group in ((2, points.nodes > 1), (4, (points.nodes == 1) & (points.devices > 1))):
        if group.any():
            start[first] = np.log(waits[group].mean())
        else:
            high[first] = low[first]
        if (group & several).any():
            start[first + 1] = start[first] - np.log(100)
        else:
            high[first + 1] = low[first + 1]
    return start, low, high


def _compute_loss(logs: Floats, points: _Points) -> tuple[float, Floats]:
    """Loss of the formula, and its gradient."""
    values = np.exp(logs)
    overlap = values[6]
    more = np.maximum(points.devices - 2, 0)
    between = points.nodes > 1
    gradient_s = values[0] + values[1] * points.local
    sum_s = np.where(between, values[2] + values[3] * more, values[4] + values[5] * more)
    sum_s = np.where(points.devices > 1, sum_s, _FLOOR)
    longest = np.maximum(gradient_s, sum_s)
    one, two = gradient_s / longest, sum_s / longest
    one_p, two_p = one**overlap, two**overlap
    both = one_p + two_p
    off_gradient = np.log(gradient_s / points.gradient_s)
    off_step = np.log(longest / points.step_s) + np.log(both) / overlap
    size = len(points.local)
    rms_gradient = np.sqrt(np.mean(off_gradient**2) + 1e-6)
    rms_step = np.sqrt(np.mean(off_step**2) + 1e-6)
    pull_gradient = off_gradient / (rms_gradient * size)
    pull_step = off_step / (rms_step * size)

    to_gradient = pull_gradient / gradient_s + pull_step * one_p / both / gradient_s
    to_sum = np.where(points.devices > 1, pull_step * two_p / both / sum_s, 0.0)
    logs_two = np.log(np.maximum(two, 1e-300))
    logs_one = np.log(np.maximum(one, 1e-300))
    to_overlap = (one_p * logs_one + two_p * logs_two) / (overlap * both)
    to_overlap -= np.log(both) / overlap**2
    slope = np.array(
        [
            to_gradient.sum(),
            (to_gradient * points.local).sum(),
            to_sum[between].sum(),
            (to_sum * more)[between].sum(),
            to_sum[~between].sum(),
            (to_sum * more)[~between].sum(),
            (pull_step * to_overlap).sum() + 2e-3 * (overlap - 1),
        ]
    )
    loss = rms_gradient + rms_step + 1e-3 * (overlap - 1) ** 2
    for first in (2, 4):  # a sum that grows with every device is believed only with evidence
        ratio = values[first + 1] / values[first]
        loss += 1e-2 * ratio**2
        slope[first + 1] += 2e-2 * ratio / values[first]
        slope[first] -= 2e-2 * ratio**2 / values[first]
    return float(loss), slope * values


def _finish(fitted: Floats, points: _Points) -> Throughput:
    fitted = fitted.copy()
    if not (points.nodes > 1).any():  # a network is at least a little slower than a bus
        fitted[2] = max(fitted[2], 1.1 * fitted[4])
        fitted[3] = max(fitted[3], 1.1 * fitted[5])
    return _name(fitted)


def _correct(throughput: Throughput, timings: Sequence[StepTiming]) -> Throughput:
    """The formula with its residuals wherever it was measured."""
    plain = replace(throughput, measured=None)
    points = _Points.of(timings)
    at = points.nodes, points.devices, points.local
    off = np.log(points.step_s / plain.predict_step_s(*at, np.zeros_like(points.local)))
    return replace(plain, measured=fit_residuals(*at, off))


def _name(fitted: Floats) -> Throughput:
    one, per_sample, network, per_far, link, per_near, overlap = fitted.tolist()
    return Throughput(one, per_sample, network, per_far, link, per_near, overlap)
