"""How fast a job trains usefully: throughput times statistical efficiency, observed or modelled.

Observations of a running job, and the interface of estimators that fit a speed model to them.
The live pool and the simulator both pass these values; neither knows how a speed is fitted.

The model is that of Pollux (Qiao et al., OSDI 2021, section 3): seven parameters predict the time of
a step from nodes, devices and samples per device; the gradient noise scale (McCandlish et al.,
arXiv 1812.06162) gives the value of a sample of a larger batch. Everything is a table over shapes
(devices on so many nodes), so that a thousand jobs are predicted at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from yunlu.scheduler.policy.values import Speed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.fitting import ResidualModel

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


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
    predicted_timings: tuple[StepTiming, ...] = ()
    """What its plan expects of each size: believed until a step was timed, of it or of a job alike."""


class SpeedModel(Speed, Protocol):
    """A fitted speed that can also say which batch to run with."""

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        """The batch of the best goodput there; something sensible before anything was seen."""
        ...


class Estimator(Protocol):
    """Makes a model of what was seen.

    ``before`` is the job's last model (None at first): where all timings are the very same objects as
    then, only the noise has changed and nothing needs to be fitted again.
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


CANDIDATES = 50
"""Batch sizes that are tried for each shape, geometrically spaced."""
_ROUND = 1e-8
"""A batch that divides evenly must not be rounded up by the last bit."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Time of a step in seconds: gradients, and their sum over devices, partly at the same time.

    ``gradient_s + gradient_s_per_sample * samples`` for a device's samples; the sum takes
    ``link_s + link_s_per_device * max(devices - 2, 0)`` within a node, ``network_s`` and
    ``network_s_per_device`` between nodes; ``overlap`` 1 is one after the other, 10 both at once.
    """

    gradient_s: float
    gradient_s_per_sample: float
    network_s: float
    network_s_per_device: float
    link_s: float
    link_s_per_device: float
    overlap: float
    measured: ResidualModel | None = None
    """Residuals of the formula where steps were measured."""

    def predict_gradient_s(self, local: Floats) -> Floats:
        """Seconds of one forward and backward of so many samples on each device."""
        return self.gradient_s + self.gradient_s_per_sample * local

    def predict_allreduce_s(self, nodes: Ints, devices: Ints) -> Floats:
        """Seconds of the all-reduce of gradients by itself."""
        more = np.maximum(devices - 2, 0)
        between = self.network_s + self.network_s_per_device * more
        within = self.link_s + self.link_s_per_device * more
        return np.where(devices <= 1, 0.0, np.where(nodes > 1, between, within))

    def predict_step_s(
        self, nodes: Ints, devices: Ints, local: Floats, accumulation: Floats
    ) -> Floats:
        """Seconds from one update to the next, with so many extra passes before each."""
        gradient_s = self.predict_gradient_s(local)
        sum_s = self.predict_allreduce_s(nodes, devices)
        longest = np.maximum(gradient_s, sum_s)
        power = (gradient_s / longest) ** self.overlap + (sum_s / longest) ** self.overlap
        step_s = accumulation * gradient_s + longest * power ** (1.0 / self.overlap)
        if self.measured is None:
            return step_s
        return step_s * self.measured.predict_factor(nodes, devices, local)


@dataclass(frozen=True, slots=True)
class ShapeList:
    """Shapes as a hashable key: devices, and nodes they are on."""

    nodes: tuple[int, ...]
    devices: tuple[int, ...]

    def __len__(self) -> int:
        """How many."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSpeed:
    """Fitted speed model of one job: its goodput in any shape, and its best batch."""

    throughputs: Mapping[str, Throughput]
    """By type of device; a type it lacks is one the job has never run on."""
    limits: BatchLimits
    noise: GradientNoise | None = None
    """None before the first step: then a batch larger than the job's own is worth nothing."""
    max_devices: int = 1 << 30
    """Largest size that is near enough to what was measured to be predicted."""
    multiple: int = 1
    """Only multiples of this can be used: a copy of the model takes so many."""
    slowdown: float = 1.0
    """How much slower the job really runs than its model says."""
    timings: tuple[StepTiming, ...] = field(default=(), compare=False, repr=False)
    """What it was fitted to, so that it is not fitted to the same again."""
    shared: tuple[StepTiming, ...] = field(default=(), compare=False, repr=False)
    predicted: tuple[StepTiming, ...] = field(default=(), compare=False, repr=False)

    def goodput(
        self,
        device_type: str,
        nodes: NDArray[np.int64],
        devices: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Useful samples a second, with the best batch; 0 where it cannot run."""
        shapes = ShapeList(tuple(int(one) for one in nodes), tuple(int(one) for one in devices))
        return compute_goodputs([self], device_type, shapes)[0]

    def choose_batch(self, device_type: str, nodes: int, devices: int) -> BatchSplit:
        """The batch with the best goodput there; the job's own where nothing is known."""
        throughput = self.throughputs.get(device_type)
        if throughput is None:
            return starting_batch(self.limits, devices)
        table = _tabulate(throughput, self.limits, ShapeList((nodes,), (devices,)))
        worth = _weigh(table, self.noise_scale)[0, 0]
        best = int(np.argmax(worth))
        if not worth[best] > 0:
            return starting_batch(self.limits, devices)
        batch = BatchSplit(int(table.local[0, best]), int(table.accumulation[0, best]))
        return clamp_batch(self.limits, batch, devices)

    @property
    def noise_scale(self) -> float:
        """Of the gradients, in samples: where larger batches begin to pay less. 0 is unknown."""
        if self.noise is None:
            return 0.0
        return self.limits.base * max(self.noise.var, 0.0) / max(self.noise.sqr, 1e-30)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Candidates of each shape, one row per shape."""

    local: Floats
    accumulation: Floats
    total: Floats
    samples_per_s: Floats
    """0 where the candidate is not allowed."""
    base: float


def compute_goodputs(speeds: Sequence[FittedSpeed], device_type: str, shapes: ShapeList) -> Floats:
    """Useful samples a second of each job (rows) with each shape (columns)."""
    result = np.zeros((len(speeds), len(shapes)))
    groups: dict[tuple[Throughput | None, BatchLimits], list[int]] = {}
    for row, speed in enumerate(speeds):
        key = (speed.throughputs.get(device_type), speed.limits)
        groups.setdefault(key, []).append(row)
    for (throughput, limits), rows in groups.items():
        table = _tabulate(throughput, limits, shapes)
        scales = np.array([speeds[row].noise_scale for row in rows])
        result[rows] = _best(table, scales)
    caps = np.array([speed.max_devices for speed in speeds], dtype=np.float64)
    slowdowns = np.array([speed.slowdown for speed in speeds])
    multiples = np.array([speed.multiple for speed in speeds], dtype=np.int64)
    devices = np.array(shapes.devices)
    fits = (devices[None, :] <= caps[:, None]) & (devices[None, :] % multiples[:, None] == 0)
    return np.where(fits, result, 0.0) / slowdowns[:, None]


@lru_cache(maxsize=4096)
def _tabulate(throughput: Throughput | None, limits: BatchLimits, shapes: ShapeList) -> _Table:
    nodes = np.array(shapes.nodes, dtype=np.int64)[:, None]
    devices = np.array(shapes.devices, dtype=np.int64)[:, None]
    wanted, allowed = _spread_totals(limits, devices)
    per_device = np.maximum(np.ceil(wanted / devices - _ROUND), 1.0)
    accumulation = np.maximum(np.ceil(per_device / limits.local_most - _ROUND) - 1, 0)
    # One device alone learns the noise of its gradients only from several passes per update.
    alone = (devices == 1) & (wanted > limits.base + _ROUND)
    accumulation = np.where(alone, np.maximum(accumulation, 1), accumulation)
    local = np.ceil(per_device / (accumulation + 1) - _ROUND)
    if limits.is_whole:
        local = np.full_like(local, limits.local_most)
    local = np.minimum(local, np.floor(limits.most / (devices * (accumulation + 1))))
    allowed &= local >= (limits.local_most if limits.is_whole else 1)
    local = np.maximum(local, 1.0)
    total: Floats = devices.astype(np.float64) * local * (accumulation + 1)
    if throughput is None:  # never seen to run: as if it scaled perfectly
        samples_per_s = np.broadcast_to(devices.astype(np.float64), total.shape)
    else:
        samples_per_s = total / throughput.predict_step_s(nodes, devices, local, accumulation)
    return _Table(
        local=local,
        accumulation=accumulation,
        total=total,
        samples_per_s=np.where(allowed, samples_per_s, 0.0),
        base=float(limits.base),
    )


def _spread_totals(limits: BatchLimits, devices: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    least = np.maximum(limits.base, limits.local_least * devices).astype(np.float64)
    if limits.fixed is not None:
        wanted = np.full((len(devices), 1), float(limits.fixed))
        return wanted, limits.local_least * devices <= wanted
    allowed = np.broadcast_to(least <= limits.most, (len(devices), CANDIDATES)).copy()
    top = np.maximum(float(limits.most), least)
    steps = np.linspace(0.0, 1.0, CANDIDATES)[None, :]
    return least * (top / least) ** steps, allowed


def _weigh(table: _Table, scales: Floats | float) -> Floats:
    """Goodput of every candidate: jobs, shapes, candidates."""
    scale = np.asarray(scales, dtype=np.float64).reshape(-1, 1, 1)
    return table.samples_per_s * ((scale + table.base) / (scale + table.total))


def _best(table: _Table, scales: Floats) -> Floats:
    return _weigh(table, scales).max(axis=2)
