"""Machine profile: measured speed of a machine, interpolated to any size. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, model_validator

from yunlu.core.limits import decode_json
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

Kind = Literal[
    "product",
    "convolution",
    "convolution_back",
    "attention",
    "stream",
    "function",
    "random",
    "update",
]
"""Kinds of operators: products, convolutions and attention (sized by FLOPs); sums and copies,
functions such as exp, random numbers, and the optimiser's update (sized by bytes)."""

VERSION = 1
FOLDER = "probe"
"""Below the settings' cache: one file for each kind of processor."""
_SMALLEST = 1e-12


class FiniteFigures(Value):
    """Values that no one writes by hand: without the docstrings in a schema they load faster."""

    model_config = ConfigDict(use_attribute_docstrings=False)


class KernelTiming(FiniteFigures):
    """Time of one operator of a kind, by its size."""

    kind: Kind
    precision: str = "fp32"
    threads: int
    sizes: tuple[float, ...]
    """FLOPs or bytes of one call, ascending."""
    seconds: tuple[float, ...]
    """The best of several trials for each size."""
    spread: float
    """Relative difference of the median trial to the best; median over sizes."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> KernelTiming:
        values = *self.sizes, *self.seconds
        rises = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not values or len(self.sizes) != len(self.seconds) or not rises:
            raise ValueError("sizes must ascend, with seconds for each")
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError("sizes and seconds must be above 0")
        return self

    def seconds_at(self, size: ArrayLike) -> NDArray[np.float64]:
        """Power law between two sizes; proportional beyond the largest, constant below the smallest."""
        requested = np.asarray(size, dtype=np.float64)
        inside = np.clip(requested, self.sizes[0], self.sizes[-1])
        result = np.exp(np.interp(np.log(inside), np.log(self.sizes), np.log(self.seconds)))
        return result * np.maximum(requested / self.sizes[-1], 1.0)

    @property
    def best_rate(self) -> float:
        """FLOPs or bytes per second at the best size."""
        return max(size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True))

    @property
    def call_s(self) -> float:
        """Time of the smallest size."""
        return self.seconds[0]


class MessageTime(FiniteFigures):
    """An exchange between two workers takes ``message_s + bytes / bytes_per_s``."""

    message_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    """Measurements that the two were fitted to."""


class LinkFigures(FiniteFigures):
    """Link between two workers of this machine."""

    backend: str
    all_reduce: MessageTime
    send: MessageTime
    """From one to the other, one direction."""


class DiskFigures(FiniteFigures):
    """Disk speed where runs are stored."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    """From the page cache, if the system did not drop the file."""


class StartFigures(FiniteFigures):
    """Start-up times of a worker, before it reads data."""

    torch_s: float
    """Until Python has imported torch."""
    worker_s: float
    """Until all imports of a worker are done."""
    cpu_s: float
    """CPU time of this: the rest waited for the disk or other processes."""
    resident_bytes: float


class MachineProfile(FiniteFigures):
    """Profile of one machine, for one torch version and number of threads."""

    version: Literal[1] = VERSION
    at: float
    """Seconds since the epoch."""
    took_s: float
    is_quick: bool
    """Only what a plan needs at once: no link, disk or start-up figures."""
    host: str
    kind: str
    device: str
    devices: int = 1
    """Number of identical devices; a CPU is one."""
    cores: int
    memory_bytes: int
    """Memory of one device."""
    threads: int
    """Default number of threads of torch."""
    torch: str
    paces: tuple[KernelTiming, ...]
    memory_bytes_per_s: float = Field(gt=0)
    """Bandwidth of adding two large arrays into a third, all threads together."""
    call_s: float = Field(gt=0)
    """Overhead of one operator of a model, both passes, Python included."""
    mixed: float = 1.0
    """Time of operators in a small model over their time alone."""
    mixed_convolutions: float = 1.0
    """The same for convolutions."""
    link: LinkFigures | None = None
    disk: DiskFigures | None = None
    start: StartFigures | None = None

    def pace(self, kind: Kind, *, threads: int, precision: str = "fp32") -> KernelTiming | None:
        """The timing with this number of threads, else with the nearest one."""
        alike = [
            one_pace
            for one_pace in self.paces
            if one_pace.kind == kind and one_pace.precision == precision
        ]
        return min(alike, key=lambda item: abs(item.threads - threads), default=None)

    def products_per_s(self, precision: str) -> float | None:
        """FLOP/s of large matrix products with the best number of threads."""
        rates = [
            pace.best_rate
            for pace in self.paces
            if pace.kind == "product" and pace.precision == precision
        ]
        return max(rates, default=None)

    def knows(self, threads: int) -> bool:
        """Whether this number of threads was measured; a GPU needs none."""
        return self.kind != "cpu" or any(pace.threads == threads for pace in self.paces)

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """Key: another measurement with the same key replaces this one."""
        return self.kind, self.device, self.torch, self.threads

    @property
    def name(self) -> str:
        """Device name in calibration and catalog: processor name and cores."""
        if self.kind == "cpu":
            return f"{self.device} ({self.cores} cores)"
        return self.device


def parse_profiles(text: bytes | str) -> tuple[MachineProfile, ...]:
    """Valid profiles in a file; empty if it is damaged."""
    try:
        stored = decode_json(text)
    except ValueError:
        return ()
    listed: Any = cast("Any", stored).get("probes") if isinstance(stored, dict) else None
    if not isinstance(listed, list):
        return ()
    return tuple(result for item in cast("Any", listed) if (result := _parse(item)) is not None)


def _parse(stored: object) -> MachineProfile | None:
    try:
        return MachineProfile.model_validate(stored)
    except ValidationError:
        return None


def dump_profiles(probes: Iterable[MachineProfile]) -> bytes:
    """A file's content."""
    listed = [probe.model_dump(mode="json") for probe in probes]
    return json.dumps({"probes": listed}, indent=1).encode()


def file_names(processor: str, host: str) -> tuple[str, str]:
    """File names of a machine, by its processor: a container has another host name each time.

    The second is where an earlier version kept it.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")
    return f"{plain or 'processor'}.json", f"{host}.json"


def read_processor(cpuinfo: str) -> str:
    """Processor name in ``/proc/cpuinfo``; empty where it has none."""
    match = re.search(r"^model name\s*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else ""


def is_same_version(one: str, other: str) -> bool:
    """Whether two versions are of one release, without the local part after a plus."""
    return one.partition("+")[0] == other.partition("+")[0]


def make_monotonic(paces: Iterable[KernelTiming]) -> tuple[KernelTiming, ...]:
    """Where several threads seem slower than one (others used the cores), use the curve of one thread."""
    listed = tuple(paces)
    alone = {(item.kind, item.precision): item for item in listed if item.threads == 1}

    def corrected(pace: KernelTiming) -> KernelTiming:
        one = alone.get((pace.kind, pace.precision), pace)
        size = min(pace.sizes[-1], one.sizes[-1])
        if float(pace.seconds_at(size)) <= float(one.seconds_at(size)):
            return pace
        return one.model_copy(update={"threads": pace.threads})

    return tuple(map(corrected, listed))


def with_profile(
    probes: Iterable[MachineProfile], new: MachineProfile
) -> tuple[MachineProfile, ...]:
    """Profiles with the new one; a quick one never replaces a full one."""
    before = [probe for probe in probes if probe.identity == new.identity]
    if new.is_quick and any(not item.is_quick for item in before):
        return tuple(probes)
    return (*(probe for probe in probes if probe.identity != new.identity), new)


def choose_profile(
    probes: Iterable[MachineProfile], *, torch: str | None = None, threads: int | None = None
) -> MachineProfile | None:
    """The best match: accelerator before CPU, same torch, full, newest."""
    return max(
        probes,
        key=lambda item: (
            item.kind != "cpu",
            torch is None or is_same_version(item.torch, torch),
            not item.is_quick,
            threads is None or item.knows(threads),
            threads is None or item.threads == threads,
            item.at,
        ),
        default=None,
    )


def fit_message_time(sizes: Iterable[float], seconds: Iterable[float]) -> MessageTime:
    """Latency and bandwidth by least squares of the relative error, neither below zero."""
    bytes_, spans = np.asarray(tuple(sizes)), np.asarray(tuple(seconds))
    # Relative: else the largest message alone would decide, and latency be the remainder.
    rows = np.stack([np.ones_like(bytes_), bytes_], axis=1) / spans[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(spans), rcond=None)
    if alpha <= 0:
        alpha, per_byte = 0.0, float((rows[:, 1] @ np.ones_like(spans)) / (rows[:, 1] @ rows[:, 1]))
    if per_byte <= 0:
        alpha, per_byte = float(rows[:, 0].sum() / (rows[:, 0] @ rows[:, 0])), 0.0
    return MessageTime(
        message_s=float(alpha),
        bytes_per_s=1 / max(float(per_byte), _SMALLEST),
        sizes=tuple(bytes_.tolist()),
        seconds=tuple(spans.tolist()),
    )
