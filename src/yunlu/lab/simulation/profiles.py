"""Measured applications: step times and convergence.

The format is that of the artifact of Pollux (OSDI'21): a directory for each application with
``placements.csv``, ``scalability.csv`` and ``validation-BATCH.csv``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from yunlu.core.errors import did_you_mean
from yunlu.lab.simulation.pipelines import load_pipeline_times
from yunlu.lab.simulation.step_times import StepTimes, load_step_times
from yunlu.lab.simulation.tables import SimulationError, read_number, read_rows
from yunlu.scheduler.policy.observations import BatchLimits, GradientNoise

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

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
