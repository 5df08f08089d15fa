"""Observations of a running job, and the interface of estimators that fit a speed model to them.

The live pool and the simulator both pass these values; neither knows how a speed is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from yunlu.scheduler.policy.values import Speed


class StepTiming(NamedTuple):
    """Measured time of steps in one configuration."""

    device_type: str
    nodes: int
    devices: int
    local_batch: int
    """Samples of one device in one pass."""
    accumulate_s: float
    """A pass without exchange of gradients."""
    step_s: float
    """The last pass of a step: with exchange and update."""


class GradientNoise(NamedTuple):
    """Gradient statistics: of the true gradient, and of one batch of the base size around it.

    The noise scale of Pollux (OSDI'21, section 3.1) is ``base batch * var / sqr``.
    """

    sqr: float
    var: float


class NoisePoint(NamedTuple):
    """The noise at one moment of a training."""

    done: float
    """Useful samples trained by then."""
    batch: int
    """The whole batch in use."""
    noise: GradientNoise


class BatchSplit(NamedTuple):
    """Split of a global batch: every device makes ``accumulation`` passes and one more."""

    local: int
    accumulation: int = 0

    def total(self, devices: int) -> int:
        """Samples of a whole step."""
        return devices * self.local * (self.accumulation + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of a job's batch."""

    base: int
    """The batch that its learning rate is meant for: one useful sample is a sample of it."""
    most: int
    local_least: int = 1
    local_most: int = 1 << 30
    fixed: int | None = None
    """The only batch its owner wants."""
    is_whole: bool = False
    """Whether every pass is of ``local_most`` samples: a pipeline is full, or it waits for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All observations of a job so far."""

    signature: str
    """What jobs alike have in common: their timings are interchangeable."""
    limits: BatchLimits
    asked_batch: int | None = None
    """What its owner would take if batches were fixed."""
    timings: tuple[StepTiming, ...] = ()
    """One for each configuration it has run in. The same object as long as nothing is added."""
    noise: GradientNoise | None = None
    """As of now; None before its first step."""
    noise_history: tuple[NoisePoint, ...] = ()
    """One for each stretch of its training so far."""
    shared_timings: tuple[StepTiming, ...] = ()
    """Of other jobs of its signature; empty where nothing is shared."""
    shared_noise: tuple[NoisePoint, ...] = ()
    """Of other jobs of its signature, by how far they were; empty where nothing is shared."""


class SpeedModel(Speed, Protocol):
    """A fitted speed that can also say which batch to run with."""

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        """The batch of the best goodput there; something sensible before anything was seen."""
        ...


class Estimator(Protocol):
    """Makes a model of what was seen.

    ``before`` is the job's last model (None at first): where ``timings`` and ``shared_timings`` are
    the very same objects as then, only the noise has changed and nothing needs to be fitted again.
    """

    def __call__(self, seen: Observations, before: SpeedModel | None) -> SpeedModel:
        """Fit; deterministic."""
        ...


_EPSILON = 1e-8


def split_batch(limits: BatchLimits, total: int, devices: int) -> BatchSplit:
    """Split a global batch over devices, with as few passes as fit; may round it up a little."""
    local = math.ceil(total / devices - _EPSILON)
    accumulation = math.ceil(local / limits.local_most - _EPSILON) - 1
    if devices == 1 and total > limits.base:
        # One lonely pass gives nothing to measure the noise from.
        accumulation = max(1, accumulation)
    item = limits.local_most
    if not limits.is_whole:
        item = math.ceil(local / (accumulation + 1) - _EPSILON)
    return clamp_batch(limits, BatchSplit(item, accumulation), devices)


def clamp_batch(limits: BatchLimits, batch: BatchSplit, devices: int) -> BatchSplit:
    """Not above the largest allowed whole batch."""
    passes = devices * (batch.accumulation + 1)
    return BatchSplit(min(batch.local, int(limits.most / passes)), batch.accumulation)


def starting_batch(limits: BatchLimits, devices: int) -> BatchSplit:
    """The batch to start with before anything was measured."""
    wanted = limits.fixed or max(limits.base, limits.local_least * devices)
    return split_batch(limits, wanted, devices)
