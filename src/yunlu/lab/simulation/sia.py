"""Sia (Jayaram Subramanya et al., SOSP'23) as a baseline: speed model, policy, and its simulator's rules.

Sia's policy (Jayaram Subramanya et al., SOSP'23), as a baseline.
The same objective, penalties and constants as in its artifact: goodputs of a job relative to its
smallest, to the power of -0.5, a factor against restarts, 1.1 for a job that gets nothing; one
binary per job and shape. Solved with HiGHS in place of CBC.

A pool of several device types, replayed as Sia's own simulator does (SOSP'23, section 5).
Its tables tell for each type what was measured there; jobs run slower than these by a calibrated
factor, a restart takes as long as that program takes, and costs nothing where only the nodes
change but neither their type nor the shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.lab.simulation.cluster import parse_cluster, place_shapes
from yunlu.lab.simulation.profiles import (
    Profiles,
    Shape,
    load_application,
    load_facts,
    normalise,
    read_count,
    read_number,
    read_rows,
)
from yunlu.scheduler.policy.fitting import fit_throughput
from yunlu.scheduler.policy.goodput import BatchLimits, FittedSpeed
from yunlu.scheduler.policy.shapes import ShapeTable, allow_shapes, group_nodes, lay_out_groups
from yunlu.scheduler.policy.speed_by_type import tabulate_goodputs
from yunlu.scheduler.policy.values import Decision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from yunlu.hardware.fleet import Node
    from yunlu.lab.simulation.profiles import Application
    from yunlu.lab.simulation.simulator import SimulationRules
    from yunlu.scheduler.policy.goodput import (
        BatchSplit,
        Observations,
        SpeedModel,
        StepTiming,
        Throughput,
    )
    from yunlu.scheduler.policy.values import Demand, PoolState

    Floats = NDArray[np.float64]

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
    """Fits them: an ``Estimator``."""

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


_DEAREST = 3000.0
_GAP = 1e-4


@dataclass(kw_only=True)
class SiaPolicy:
    """Fair goodput over device types, by integer programming."""

    name: str = "sia"
    power: float = -0.5
    waiting_cost: float = 1.1
    restart_s_by_program: Mapping[str, float] = field(default_factory=dict[str, float])
    """Assumed restart cost, by the part of a job's name before the dash."""

    def decide(self, state: PoolState) -> Decision:
        """Placement of each job."""
        groups = group_nodes(state.nodes)
        if not groups or not state.jobs:
            return Decision(placements={})
        fixed = {job.min_devices for job in state.jobs if job.min_devices == job.max_devices}
        shapes = lay_out_groups(groups, fixed)
        held = [shapes.find_packed(job.held) for job in state.jobs]
        cost = self._cost(state, shapes, held)
        picks = _solve(cost, shapes, held, [job.is_pinned for job in state.jobs])
        return Decision(placements=place_shapes(state.jobs, picks, shapes))

    def _cost(self, state: PoolState, shapes: ShapeTable, held: Sequence[int | None]) -> Floats:
        """Cost of each shape to each job, minus that of waiting; ``inf`` where it cannot run."""
        types = [shapes.groups[group].type for group in shapes.group]
        goodput = tabulate_goodputs(
            state.jobs, types, shapes.nodes.tolist(), shapes.devices.tolist()
        )
        goodput = np.where(allow_shapes(state.jobs, shapes), goodput, 0.0)
        cost = np.full(goodput.shape, np.inf)
        for row, job in enumerate(state.jobs):
            valid = goodput[row] > 0
            if not valid.any():
                continue
            least = int(np.argmin(np.where(valid, goodput[row], np.inf)))
            unit = int(shapes.devices[valid & (shapes.group == shapes.group[least])].min())
            relative = goodput[row] * unit / goodput[row, least]
            at = held[row]
            if at is not None:
                stay = relative[at]
                relative = relative * self._restart_factor(job, state.now)
                relative[at] = stay
            valid &= relative > 0
            price = np.round(relative[valid] ** self.power, 2)
            cost[row, valid] = np.minimum(price, _DEAREST) - self.waiting_cost
        return cost

    def _restart_factor(self, job: Demand, now: float) -> float:
        program = job.id.partition("-")[0]
        restart_s = self.restart_s_by_program.get(program, job.restart_s)
        age = now - job.submitted_at
        if age < restart_s:
            return 1.0
        return max(age - job.restarts * restart_s, 0.0) / (age + restart_s)


def _solve(
    cost: Floats, shapes: ShapeTable, held: Sequence[int | None], pinned: Sequence[bool]
) -> list[int | None]:
    """The cheapest choice of at most one shape per job within the capacity of each kind."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (slow to import)
    from scipy.sparse import csr_array  # noqa: PLC0415

    stays = {row: at for row, at in enumerate(held) if at is not None and pinned[row]}
    is_open = cost < 0
    for row, at in stays.items():
        is_open[row] = False
        is_open[row, at] = True
    jobs, columns = np.nonzero(is_open)
    count = len(jobs)
    picks: list[int | None] = [None] * len(cost)
    if not count:
        return picks
    item = np.arange(count)
    matrix = csr_array(
        (
            np.concatenate([np.ones(count), shapes.devices[columns]]),
            (
                np.concatenate([jobs, len(cost) + shapes.group[columns]]),
                np.concatenate([item, item]),
            ),
        ),
        shape=(len(cost) + len(shapes.groups), count),
    )
    limits: Any = np.concatenate([np.ones(len(cost)), [group.devices for group in shapes.groups]])
    must: Any = np.array([float(row in stays) for row in jobs])
    answer = milp(
        np.where(np.isfinite(cost[jobs, columns]), cost[jobs, columns], 0.0),
        constraints=LinearConstraint(matrix, ub=limits),
        integrality=np.ones(count),
        bounds=Bounds(must, 1),
        options={"mip_rel_gap": _GAP},
    )
    if answer.x is None:
        return [at if at is not None and row in stays else None for row, at in enumerate(held)]
    for index in np.flatnonzero(answer.x > 0.5):
        picks[int(jobs[index])] = int(columns[index])
    return picks


TYPES = ("aws", "dgx-ext", "rtx")
"""T4, A100 and RTX 2080 Ti."""
RESTART_S = {
    "bert": 120.0,
    "cifar10": 50.0,
    "deepspeech2": 25.0,
    "imagenet": 250.0,
    "ncf": 15.0,
    "yolov3": 80.0,
}
BELIEVED_RESTART_S = {**RESTART_S, "cifar10": 30.0, "yolov3": 45.0, "ncf": 30.0}
"""Restart cost that Sia's policy assumes."""
SLOWDOWN = {"cifar10": 1.8, "ncf": 1.5, "gpt_pmp": 1.0} | dict.fromkeys(
    ("bert", "deepspeech2", "imagenet", "yolov3"), 1.2
)
_LOCAL_MOST = {("deepspeech2", "rtx"): 57}
"""Largest local batch that the scheduler assumes, where the tables say more."""


def apply_sia_rules(rules: SimulationRules) -> SimulationRules:
    """The same rules, with restarts and speeds as in Sia's simulator."""
    return replace(
        rules,
        restart_s_by_application=RESTART_S,
        slowdown_by_application=SLOWDOWN,
        restarts_on_move=False,
    )


def build_sia_cluster(scale: int = 1) -> tuple[Node, ...]:
    """Sia's cluster of 64 devices, scaled."""
    return parse_cluster(f"{6 * scale}x4:aws+{2 * scale}x8:dgx-ext+{3 * scale}x8:rtx")


def load_typed_profiles(
    directory: Path, names: Iterable[str], types: Sequence[str] = TYPES
) -> Profiles:
    """The applications of these names, on all types."""
    return Profiles(
        {name: load_application(directory / name, types) for name in sorted(set(names))}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeTable:
    """Prior knowledge of one application on one type."""

    local_least: int
    local_most: int
    most_by_shape: Mapping[Shape, int]
    most_by_scale: tuple[tuple[int, int, int], ...]
    """Nodes, devices, largest local batch measured at that scale."""
    max_devices: int
    samples_per_s: float
    """Of one device with its largest batch."""
    stages: int = 1
    """Devices that hold one copy of the model."""

    def most_in(self, shape: Shape) -> int:
        """The largest local batch that fits a shape."""
        shape = normalise(shape)
        if shape in self.most_by_shape:
            return self.most_by_shape[shape]
        nodes, devices = len(shape), sum(shape)
        larger = [most for n, d, most in self.most_by_scale if n >= nodes and d >= devices]
        alike = [most for item, most in self.most_by_shape.items() if sum(item) == devices]
        return min(max(larger, default=self.local_most), max(alike, default=self.local_most))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePrior:
    """Memory limits and single-device speed, as measured: a ``DeviceTypePrior``."""

    tables: Mapping[tuple[str, str], TypeTable]
    """By application and type."""
    slowdown: Mapping[str, float] = field(default_factory=dict[str, float])
    """How much slower each application runs than its tables say."""

    def limits(self, seen: Observations, device_type: str) -> BatchLimits | None:
        """The job's limits with the local batches of the type."""
        table = self.tables.get((seen.signature, device_type))
        if table is None:
            return None
        most = _LOCAL_MOST.get((seen.signature, device_type), table.local_most)
        return BatchLimits(
            base=seen.limits.base,
            most=seen.limits.most,
            local_least=table.local_least,
            local_most=most,
            fixed=seen.limits.fixed,
            is_whole=seen.limits.is_whole,
        )

    def local_most(
        self, seen: Observations, device_type: str, nodes: int, devices: int
    ) -> int | None:
        """Measured to fit in that shape; shapes are as even as whole nodes allow."""
        table = self.tables.get((seen.signature, device_type))
        if table is None:
            return None
        item, rest = divmod(devices, nodes)
        return table.most_in((item,) * (nodes - rest) + (item + 1,) * rest)

    def most_devices(self, seen: Observations, device_type: str) -> int | None:
        """As many as were measured."""
        table = self.tables.get((seen.signature, device_type))
        return table.max_devices if table else None

    def multiple(self, seen: Observations, device_type: str) -> int:
        """Devices that hold one copy of the model."""
        table = self.tables.get((seen.signature, device_type))
        return table.stages if table else 1

    def samples_per_s(self, seen: Observations, device_type: str) -> float | None:
        """Of one device, or of each device of one copy of a model that is split."""
        table = self.tables.get((seen.signature, device_type))
        return table.samples_per_s / self.slowdown.get(seen.signature, 1.0) if table else None


def load_prior(
    directory: Path,
    names: Iterable[str],
    types: Sequence[str] = TYPES,
    slowdown: Mapping[str, float] | None = None,
) -> TablePrior:
    """Read it from the tables of these applications; they run as fast as the tables say, or slower."""
    return TablePrior(
        tables={
            (name, kind): _load_table(directory / name, kind)
            for name in sorted(set(names))
            for kind in types
            if (directory / name / f"placements-{kind}.csv").exists()
        },
        slowdown=slowdown or {},
    )


def _load_table(directory: Path, kind: str) -> TypeTable:
    if load_facts(directory).stages is not None:
        return _describe_pipeline(load_application(directory, (kind,)), kind)
    path = directory / f"placements-{kind}.csv"
    most_by_shape: dict[Shape, int] = {}
    least, alone_local, alone_s = 1 << 30, 0, 0.0
    for line, row in enumerate(read_rows(path, ("placement", "local_bsz", "step_time"))):
        shape = normalise(tuple(int(digit) for digit in row["placement"].strip()))
        local = read_count(path, line, row, "local_bsz")
        least = min(least, local)
        most_by_shape[shape] = max(most_by_shape.get(shape, 0), local)
        if shape == (1,):
            alone_local = max(alone_local, local)
            alone_s = max(alone_s, read_number(path, line, row, "step_time"))
    most_by_scale: dict[tuple[int, int], int] = {}
    path = directory / f"scalability-{kind}.csv"
    columns = ("num_nodes", "num_replicas", "local_bsz")
    for line, row in enumerate(read_rows(path, columns) if path.exists() else ()):
        nodes, devices, local = (read_count(path, line, row, name) for name in columns)
        most_by_scale[nodes, devices] = max(most_by_scale.get((nodes, devices), 0), local)
    return TypeTable(
        local_least=least,
        local_most=max(most_by_shape.values()),
        most_by_shape=most_by_shape,
        most_by_scale=tuple((*key, most) for key, most in sorted(most_by_scale.items())),
        max_devices=max(
            [devices for _, devices in most_by_scale] + [sum(s) for s in most_by_shape]
        ),
        samples_per_s=alone_local / alone_s if alone_s else 0.0,
    )


def _describe_pipeline(application: Application, kind: str) -> TypeTable:
    times, stages = application.times[kind], application.stages[kind]
    result = times.find((stages,), times.local_most)
    assert result is not None
    return TypeTable(
        local_least=times.local_least,
        local_most=times.local_most,
        most_by_shape=times.most_by_shape,
        most_by_scale=(),
        max_devices=times.max_devices,
        samples_per_s=times.local_most / result[0],
        stages=stages,
    )
