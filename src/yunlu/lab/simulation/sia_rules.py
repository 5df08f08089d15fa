"""A pool of several device types, replayed as Sia's own simulator does (SOSP'23, section 5).

Its tables tell for each type what was measured there; jobs run slower than these by a calibrated
factor, a restart takes as long as that program takes, and costs nothing where only the nodes
change but neither their type nor the shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import Profiles, load_application, load_facts
from yunlu.lab.simulation.step_times import Shape, normalise
from yunlu.lab.simulation.tables import read_count, read_number, read_rows
from yunlu.scheduler.policy.observations import BatchLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from yunlu.hardware.fleet import Node
    from yunlu.lab.simulation.profiles import Application
    from yunlu.lab.simulation.rules import SimulationRules
    from yunlu.scheduler.policy.observations import Observations

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
