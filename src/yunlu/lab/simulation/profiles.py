"""Measured applications (step times, convergence) and recorded workloads.

Step times of pipeline-parallel models: several devices hold one copy and share its micro-batches.
The tables of such an application (``gpt_pmp`` in the artifact of Sia, SOSP'23) tell for each shape how
long one stage takes forward with one micro-batch of so many samples, and how long copies take to sum
their gradients. A pass of ``micro_batches`` takes three times as long as forwards alone, and as long
again as the stages but one to fill and drain. A device's samples are its share of its copy's.

The format is that of the artifact of Pollux (OSDI'21): a directory for each application with
``placements.csv``, ``scalability.csv`` and ``validation-BATCH.csv``.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from yunlu.core.errors import YunluError, did_you_mean, missing_part
from yunlu.scheduler.policy.goodput import BatchLimits, GradientNoise, split_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from yunlu.scheduler.policy.goodput import BatchSplit


class SimulationError(YunluError):
    """A workload, profile or cluster that cannot be simulated."""

    code = "simulation"


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All rows, each with at least these columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            result = reader.fieldnames or []
            missing = [name for name in columns if name not in result]
            if missing:
                raise SimulationError(
                    f"{path}: there is no column {', '.join(missing)}.",
                    hint=f"its first line should hold: {','.join(columns)}",
                )
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        text = getattr(error, "strerror", None) or error
        raise SimulationError(
            f"{path} cannot be read as CSV: {text}.",
            hint=f"name a file whose first line holds: {','.join(columns)}",
        ) from error
    if not rows:
        raise SimulationError(
            f"{path} has no rows below its head.", hint=f"each holds: {','.join(columns)}"
        )
    return rows


def read_number(path: Path, line: int, row: dict[str, str], column: str) -> float:
    """One cell as a finite number; ``line`` counts rows below the head from 0."""
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SimulationError(f"{path}, line {line + 2}: {column} is {text!r}, not a number.")
    return value


def read_count(path: Path, line: int, row: dict[str, str], column: str) -> int:
    """One cell as a whole number above 0."""
    value = read_number(path, line, row, column)
    if value != int(value) or value < 1:
        raise SimulationError(
            f"{path}, line {line + 2}: {column} is {row[column]!r}, not a whole number above 0."
        )
    return int(value)


Shape = tuple[int, ...]
"""Devices on each node of a placement."""
Times = tuple[float, float]
"""Seconds of a step, and the part of it for the exchange of gradients."""

_PLACEMENT_COLUMNS = ("placement", "local_bsz", "step_time", "sync_time")
_SCALE_COLUMNS = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")


class StepTimes:
    """Step times of one application on one device type, for any shape and local batch.

    A shape that was measured is linear in the batch between its measurements. Any other is linear
    in (nodes, devices, batch) between the means over shapes and the measurements at larger scale.
    """

    def __init__(self, name: str, curves: dict[Shape, list[tuple[int, Times]]],
                 scale: list[tuple[int, int, int, Times]]) -> None:  # fmt: skip
        self.name = name
        self._curves = {shape: _Curve(points) for shape, points in curves.items()}
        self._points, self._values = _join(curves, scale)
        self._between: Any = None
        self._known: dict[tuple[Shape, int], Times | None] = {}
        locals_seen = [local for points in curves.values() for local, _ in points]
        self.local_least, self.local_most = min(locals_seen), max(locals_seen)
        self.most_by_shape = {
            shape: max(local for local, _ in points) for shape, points in curves.items()
        }
        """The largest local batch that was measured in each shape."""
        self.max_nodes = int(self._points[:, 0].max())
        self.max_devices = int(self._points[:, 1].max())

    def find(self, shape: Shape, local: int) -> Times | None:
        """Times in that shape; None outside the measured range."""
        key = (shape, local)
        if key not in self._known:
            self._known[key] = self._find(normalise(shape), local)
        return self._known[key]

    def _find(self, shape: Shape, local: int) -> Times | None:
        curve = self._curves.get(shape)
        if curve is not None:
            return curve.at(local)
        index = (min(len(shape), self.max_nodes), sum(shape), local)
        step_s, sync_s = (float(value) for value in self._interpolate(np.array([index]))[0])
        return (step_s, sync_s) if step_s == step_s else None  # noqa: PLR0124 (NaN: outside)

    def prepare(self) -> None:
        """Triangulate the points now, so that no decision is charged with it."""
        if self._between is not None:
            return
        try:
            from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 (slow to import)
            from scipy.spatial import QhullError  # noqa: PLC0415
        except ImportError as error:
            raise missing_part("scipy", "train", "Replaying a workload") from error
        try:
            self._between = LinearNDInterpolator(self._points, self._values)
        except (QhullError, ValueError):
            # All in one plane, as with a single node: no interpolation.
            self._between = _return_nan

    def _interpolate(self, places: NDArray[Any]) -> NDArray[np.float64]:
        self.prepare()
        return np.asarray(self._between(places), dtype=np.float64)


def _return_nan(places: NDArray[Any]) -> NDArray[np.float64]:
    return np.full((len(places), 2), np.nan)


class _Curve:
    def __init__(self, points: list[tuple[int, Times]]) -> None:
        points = sorted(points)
        self._locals = [local for local, _ in points]
        self._times = [times for _, times in points]

    def at(self, local: int) -> Times:
        """Linear; constant beyond the ends."""
        if len(self._locals) == 1 or local <= self._locals[0]:
            return self._times[0]
        if local >= self._locals[-1]:
            return self._times[-1]
        high = bisect_right(self._locals, local)
        start, span = self._locals[high - 1], self._locals[high] - self._locals[high - 1]
        low_times, high_times = self._times[high - 1], self._times[high]
        step_s, sync_s = (
            (above - below) / span * (local - start) + below
            for below, above in zip(low_times, high_times, strict=True)
        )
        return step_s, sync_s


def normalise(shape: Shape) -> Shape:
    """Its smallest rotation: a ring has no first node."""
    if len(shape) < 2:
        return shape
    return min(shape[turn:] + shape[:turn] for turn in range(len(shape)))


def load_step_times(directory: Path, suffix: str = "") -> StepTimes:
    """Read ``placements`` and, where it exists, ``scalability``, of one type of devices."""
    path = directory / f"placements{suffix}.csv"
    curves: dict[Shape, list[tuple[int, Times]]] = {}
    for line, row in enumerate(read_rows(path, _PLACEMENT_COLUMNS)):
        text = row["placement"].strip()
        if not text.isdigit() or "0" in text:
            raise SimulationError(
                f"{path}, line {line + 2}: placement is {text!r}.",
                hint="write the devices on each node as digits: 44 is two nodes with four each",
            )
        local = read_count(path, line, row, "local_bsz")
        shape = normalise(tuple(int(digit) for digit in text))
        curves.setdefault(shape, []).append((local, _read_times(path, line, row)))
    return StepTimes(directory.name, curves, _load_scale(directory / f"scalability{suffix}.csv"))


def _load_scale(path: Path) -> list[tuple[int, int, int, Times]]:
    if not path.exists():
        return []
    rows: list[tuple[int, int, int, Times]] = []
    for line, row in enumerate(read_rows(path, _SCALE_COLUMNS)):
        nodes, devices, local = (read_count(path, line, row, name) for name in _SCALE_COLUMNS[:3])
        rows.append((nodes, devices, local, _read_times(path, line, row)))
    return rows


def _read_times(path: Path, line: int, row: dict[str, str]) -> Times:
    step_s, sync_s = (read_number(path, line, row, name) for name in ("step_time", "sync_time"))
    if not 0 <= sync_s <= step_s or step_s == 0:
        raise SimulationError(
            f"{path}, line {line + 2}: sync_time {sync_s:g} is not within step_time {step_s:g}."
        )
    return step_s, sync_s


def _join(
    curves: dict[Shape, list[tuple[int, Times]]], scale: list[tuple[int, int, int, Times]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All known points (nodes, devices, batch), averaged over shapes, in a fixed order."""
    grouped: dict[tuple[int, int, int], list[Times]] = {}
    for shape, points in curves.items():
        for local, times in points:
            grouped.setdefault((len(shape), sum(shape), local), []).append(times)
    places = [*sorted(grouped), *((nodes, devices, local) for nodes, devices, local, _ in scale)]
    means = [np.mean(np.array(grouped[index]), axis=0) for index in sorted(grouped)]
    values = [*means, *(np.array(times) for *_, times in scale)]
    return np.array(places, dtype=np.float64), np.array(values, dtype=np.float64)


_FORWARD_AND_BACKWARD = 3.0
_MICRO_BATCH = 1
"""Samples of one micro-batch."""


def load_pipeline_times(
    directory: Path, suffix: str, *, stages: int, micro_batches: int
) -> StepTimes:
    """Read ``placements`` of one type of devices, on which a copy of the model takes ``stages``."""
    if stages < 1 or micro_batches % stages:
        raise SimulationError(
            f"{directory}: {micro_batches} micro-batches cannot be shared by {stages} stages.",
            hint="micro_batches should be a multiple of every number of stages",
        )
    path = directory / f"placements{suffix}.csv"
    local = micro_batches * _MICRO_BATCH // stages
    curves: dict[Shape, list[tuple[int, Times]]] = {}
    for line, row in enumerate(read_rows(path, _PLACEMENT_COLUMNS)):
        if read_count(path, line, row, "local_bsz") != _MICRO_BATCH:
            continue
        shape = normalise(tuple(int(digit) for digit in row["placement"].strip()))
        if sum(shape) % stages:
            raise SimulationError(
                f"{path}, line {line + 2}: {sum(shape)} devices are no multiple of {stages} stages."
            )
        stage_s, sync_s = (read_number(path, line, row, name) for name in _PLACEMENT_COLUMNS[2:])
        pass_s = _FORWARD_AND_BACKWARD * (stages - 1 + micro_batches) * stage_s
        curves[shape] = [(local, (pass_s + sync_s, sync_s))]
    if not curves:
        raise SimulationError(f"{path}: nothing was measured with micro-batches of one sample.")
    return StepTimes(directory.name, curves, [])


class FixedBatchSpeed:
    """Speed for policies that do not learn: the measured tables, in the current epoch."""

    def __init__(
        self, application: Application, batch: int, devices_per_node: Mapping[str, int]
    ) -> None:
        self.epoch = 0
        self._application, self._batch = application, batch
        self._devices_per_node = devices_per_node
        self._steps: dict[tuple[str, int, int], float | None] = {}
        self._batches: dict[tuple[str, Shape], BatchSplit | None] = {}

    @property
    def steps_left(self) -> float:
        """Steps of the epochs after this one, at least one: as Optimus counts them."""
        last = self._application.epochs - 1
        if last <= self.epoch:
            return 1.0
        steps = self._application.steps
        return steps(self._batch, last) - steps(self._batch, self.epoch)

    def step_s(self, device_type: str, nodes: int, devices: int) -> float | None:
        """Step time of devices packed onto nodes; None where it cannot run."""
        key = (device_type, nodes, devices)
        if key not in self._steps:
            self._steps[key] = self._find(*key)
        return self._steps[key]

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Useful samples per second of devices packed onto nodes."""
        both = np.broadcast(nodes, devices)
        rates = [self._rate(device_type, int(node), int(count)) for node, count in both]
        return np.array(rates, dtype=np.float64).reshape(both.shape)

    def split(self, device_type: str, shape: Shape) -> BatchSplit | None:
        """Split of the batch there; None where nothing was measured."""
        key = (device_type, shape)
        if key not in self._batches:
            self._batches[key] = self._split(*key)
        return self._batches[key]

    def _rate(self, device_type: str, nodes: int, devices: int) -> float:
        step_s = self.step_s(device_type, nodes, devices)
        if step_s is None:
            return 0.0
        batch = self.split(device_type, self._shape(device_type, nodes, devices))
        assert batch is not None
        limits = self._application.limits
        total = batch.total(devices)
        noise = self._application.noise(total, self.epoch)
        gain = (noise.var + noise.sqr) / (noise.var / (total / limits.base) + noise.sqr)
        return gain * limits.base / step_s

    def _find(self, device_type: str, nodes: int, devices: int) -> float | None:
        if not 0 < nodes <= devices:
            return None
        shape = self._shape(device_type, nodes, devices)
        batch = self.split(device_type, shape)
        if batch is None:
            return None
        result = self._application.times[device_type].find(shape, batch.local)
        assert result is not None
        step_s, sync_s = result
        return step_s + (step_s - sync_s) * batch.accumulation

    def _split(self, device_type: str, shape: Shape) -> BatchSplit | None:
        times = self._application.times.get(device_type)
        if times is None:
            return None
        limits, devices = self._application.limits, sum(shape)
        limits = replace(limits, local_most=min(limits.local_most, times.local_most))
        batch = split_batch(limits, self._batch, devices)
        # A device with less memory was measured with smaller batches only: more passes.
        while batch.local >= 1 and times.find(shape, batch.local) is None:
            if batch.local <= times.local_least:
                return None
            limits = replace(limits, local_most=batch.local - 1)
            batch = split_batch(limits, self._batch, devices)
        return batch if batch.local >= 1 else None

    def _shape(self, device_type: str, nodes: int, devices: int) -> Shape:
        """Full nodes first; as even as possible where more nodes are used than needed."""
        size = self._devices_per_node.get(device_type, devices)
        full, rest = divmod(devices, size)
        if full + (rest > 0) == nodes:
            return (size,) * full + ((rest,) if rest else ())
        item, more = divmod(devices, nodes)
        return (item + 1,) * more + (item,) * (nodes - more)


_COLUMNS = ("progress", "iteration", "grad_sqr", "grad_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationFacts:
    """Properties that an application's tables do not hold."""

    epochs: int | None = None
    """Length of its training; default: as long as was measured."""
    local_most: int | None = None
    batch: int | None = None
    """Fixed batch of elastic policies."""
    max_devices: int | None = None
    stages: Mapping[str, int] | None = None
    """By device type: pipeline stages of one copy of the model; 1 on other types."""
    micro_batches: int = 48
    """Micro-batches of one pipeline pass."""


_KNOWN: Mapping[str, ApplicationFacts] = {
    "bert": ApplicationFacts(epochs=2),
    "cifar10": ApplicationFacts(epochs=100),
    "deepspeech2": ApplicationFacts(epochs=80),
    "gpt_pmp": ApplicationFacts(epochs=2, stages={"rtx": 8, "dgx-ext": 2}),
    "imagenet": ApplicationFacts(epochs=90),
    "ncf": ApplicationFacts(epochs=10, batch=32768, max_devices=1),
    "yolov3": ApplicationFacts(epochs=50, local_most=8),
}
"""Applications of Pollux's and Sia's artifacts; others have ``facts.yaml`` in their directory."""


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """A training run at one global batch: values at the end of each epoch."""

    progress: tuple[float, ...]
    """Equivalent steps at the base batch."""
    steps: tuple[float, ...]
    noise: tuple[GradientNoise, ...]


@dataclass(frozen=True, slots=True)
class Application:
    """One application."""

    name: str
    times: Mapping[str, StepTimes]
    """By device type."""
    trainings: Mapping[int, TrainingCurve]
    """By global batch, ascending."""
    epochs: int
    limits: BatchLimits
    max_devices: int
    ends: tuple[float, ...]
    """Progress at the start of each epoch and at the end of the last."""
    stages: Mapping[str, int] = field(default_factory=dict[str, int])
    """By device type: devices per copy of the model, where more than one."""
    _noise: dict[tuple[int, int], GradientNoise] = field(
        default_factory=dict[tuple[int, int], GradientNoise]
    )

    @property
    def multiple(self) -> int:
        """Greatest common divisor of its usable numbers of devices."""
        return math.gcd(*self.stages.values()) if self.stages else 1

    @property
    def length(self) -> float:
        """Progress at its end."""
        return self.ends[self.epochs]

    def noise(self, batch: int, epoch: int) -> GradientNoise:
        """Gradient statistics in an epoch, linear in the batch between measured trainings."""
        key = (batch, epoch)
        known = self._noise.get(key)
        if known is None:
            low, high = self._around(batch)
            below, above = self.trainings[low].noise[epoch], self.trainings[high].noise[epoch]
            known = GradientNoise(
                _between(batch, low, high, below.sqr, above.sqr),
                _between(batch, low, high, below.var, above.var),
            )
            self._noise[key] = known
        return known

    def steps(self, batch: int, epoch: int) -> float:
        """Steps at the end of an epoch at that batch."""
        low, high = self._around(batch)
        trainings = self.trainings
        return _between(batch, low, high, trainings[low].steps[epoch], trainings[high].steps[epoch])

    def _around(self, batch: int) -> tuple[int, int]:
        sizes = list(self.trainings)
        high = min(bisect_left(sizes, batch), len(sizes) - 1)
        if sizes[high] <= batch or high == 0:
            return sizes[high], sizes[high]
        return sizes[high - 1], sizes[high]


@dataclass(frozen=True, slots=True)
class Profiles:
    """All applications by name."""

    applications: Mapping[str, Application]

    def find(self, name: str) -> Application:
        """The application, or an error that lists the known ones."""
        if name not in self.applications:
            raise _unknown(name, self.applications)
        return self.applications[name]


def load_profiles(
    directory: Path, types: Iterable[str] = ("device",), names: Iterable[str] | None = None
) -> Profiles:
    """Read the applications below a directory (all, or those named), on these types of devices.

    A type has files of its own (``placements-TYPE.csv``) or shares ``placements.csv``.
    """
    if not directory.is_dir():
        raise SimulationError(
            f"{directory} is not a directory of profiles.",
            hint="it holds one directory for each application, with placements.csv",
        )
    paths = {
        path.name: path
        for path in sorted(directory.iterdir())
        if path.is_dir() and any(path.glob("placements*.csv"))
    }
    if not paths:
        raise SimulationError(f"{directory}: no directory below it has a placements.csv.")
    wanted = tuple(types)
    result: dict[str, Application] = {}
    for name in dict.fromkeys(paths if names is None else names):
        if name not in paths:
            raise _unknown(name, paths)
        result[name] = load_application(paths[name], wanted)
    return Profiles(result)


def _unknown(name: str, known: Iterable[str]) -> SimulationError:
    return SimulationError(
        f"There is no profile of the application {name!r}; {did_you_mean(name, known)}."
    )


def load_application(directory: Path, types: Iterable[str] = ("device",)) -> Application:
    """Read one application."""
    facts = load_facts(directory)
    times: dict[str, StepTimes] = {}
    for kind in types:
        suffix = f"-{kind}" if (directory / f"placements-{kind}.csv").exists() else ""
        if (directory / f"placements{suffix}.csv").exists():
            times[kind] = _load_times(directory, kind, suffix, facts)
    if not times:
        raise SimulationError(
            f"{directory}: nothing was measured on {', '.join(types)}.",
            hint="it should hold placements.csv, or placements-TYPE.csv for a type of devices",
        )
    trainings = _load_trainings(directory)
    shortest = min(len(training.progress) for training in trainings.values())
    epochs = facts.epochs or shortest
    if epochs > shortest:
        raise SimulationError(f"{directory}: {epochs} epochs are asked, {shortest} were measured.")
    ends = tuple(
        min(training.progress[epoch] for training in trainings.values()) for epoch in range(epochs)
    )
    local_least = min(item.local_least for item in times.values())
    most = max(trainings)
    limits = BatchLimits(
        base=min(trainings),
        most=most,
        local_least=local_least,
        local_most=facts.local_most or max(item.local_most for item in times.values()),
        fixed=facts.batch,
        is_whole=facts.stages is not None,
    )
    max_devices = facts.max_devices or min(
        max(item.max_devices for item in times.values()), max(most // local_least, 1)
    )
    stages = {kind: facts.stages[kind] for kind in times} if facts.stages is not None else {}
    return Application(
        directory.name, times, trainings, epochs, limits, max_devices, (0.0, *ends), stages
    )


def _load_times(directory: Path, kind: str, suffix: str, facts: ApplicationFacts) -> StepTimes:
    if facts.stages is None:
        return load_step_times(directory, suffix)
    if kind not in facts.stages:
        raise SimulationError(
            f"{directory}: it is a pipeline, and its number of stages is missing on {kind}.",
            hint="say it in facts.yaml: stages: {TYPE: COUNT}",
        )
    return load_pipeline_times(
        directory, suffix, stages=facts.stages[kind], micro_batches=facts.micro_batches
    )


def _load_trainings(directory: Path) -> dict[int, TrainingCurve]:
    result: dict[int, TrainingCurve] = {}
    for path in directory.glob("validation-*.csv"):
        text = path.stem.removeprefix("validation-")
        if not text.isdigit():
            raise SimulationError(f"{path}: its name should be validation-BATCH.csv.")
        result[int(text)] = _load_training(path)
    if not result:
        raise SimulationError(f"{directory}: there is no validation-BATCH.csv.")
    return dict(sorted(result.items()))


def _load_training(path: Path) -> TrainingCurve:
    rows = [
        [read_number(path, line, row, name) for name in _COLUMNS]
        for line, row in enumerate(read_rows(path, _COLUMNS))
    ]
    progress = tuple(row[0] for row in rows)
    if any(later <= earlier for earlier, later in zip((0.0, *progress), progress, strict=False)):
        raise SimulationError(f"{path}: progress does not grow from row to row.")
    return TrainingCurve(
        progress,
        tuple(row[1] for row in rows),
        tuple(GradientNoise(row[2], row[3]) for row in rows),
    )


def load_facts(directory: Path) -> ApplicationFacts:
    """Properties of an application beside its tables: from ``facts.yaml``, or built in."""
    path = directory / "facts.yaml"
    if not path.exists():
        return _KNOWN.get(directory.name, ApplicationFacts())
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ApplicationFacts(**content)
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise SimulationError(
            f"{path} cannot be understood: {error}.",
            hint=f"it may hold {', '.join(ApplicationFacts.__slots__)}",
        ) from error


def _between(batch: int, low: int, high: int, below: float, above: float) -> float:
    if low == high:
        return below
    return ((batch - low) * above + (high - batch) * below) / (high - low)


_WORKLOAD_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One job of a workload."""

    name: str
    submitted_at: float
    application: str
    asked_devices: int
    asked_batch: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order in which they were submitted."""

    name: str
    jobs: tuple[Submission, ...]


def load_workloads(path: Path) -> list[Workload]:
    """The workload of a CSV file, or those of all CSV files of a directory."""
    if not path.is_dir():
        return [load_workload(path)]
    files = sorted(path.glob("*.csv"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise SimulationError(f"{path} holds no CSV file.")
    return [load_workload(file) for file in files]


def load_workload(path: Path) -> Workload:
    """Read ``name,time,application,num_replicas,batch_size``."""
    jobs: list[Submission] = []
    names: set[str] = set()
    for line, row in enumerate(read_rows(path, _WORKLOAD_COLUMNS)):
        name = row["name"]
        if not name or name in names:
            raise SimulationError(
                f"{path}, line {line + 2}: the name {name!r} is empty or was used before."
            )
        names.add(name)
        at = read_number(path, line, row, "time")
        if at < 0:
            raise SimulationError(f"{path}, line {line + 2}: time {at:g} is below 0.")
        jobs.append(
            Submission(
                name=name,
                submitted_at=int(at) if at == int(at) else at,
                application=row["application"],
                asked_devices=read_count(path, line, row, "num_replicas"),
                asked_batch=read_count(path, line, row, "batch_size"),
            )
        )
    return Workload(path.stem, tuple(sorted(jobs, key=lambda job: job.submitted_at)))
