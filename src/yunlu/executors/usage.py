"""CPU, memory and GPU usage of processes, recorded beside a run."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import psutil

from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yunlu.runs.run_store import RunStore

_AREA = "usage"
_ANSWER_S = 3.0
_QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"


class NodeUse(Value):
    """Utilisation of a node, as shares."""

    cpu: float
    memory: float
    gpus: tuple[tuple[float, float], ...] = ()
    """Utilisation and memory share of each GPU."""


class LeaseUse(Value):
    """Usage of a lease and of its node."""

    at: float
    node: str
    cores: float
    memory_bytes: float
    machine: NodeUse


class UsageMeter:
    """Measures this machine periodically."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}
        psutil.cpu_percent(interval=None)  # the first value is meaningless

    def sample(self) -> NodeUse:
        """Utilisation since the last call."""
        return NodeUse(
            cpu=psutil.cpu_percent(interval=None) / 100.0,
            memory=psutil.virtual_memory().percent / 100.0,
            gpus=read_gpus(),
        )

    def measure(self, name: str, pids: Iterable[int]) -> tuple[float | None, float]:
        """Busy cores of these processes since the last call (0 at the first) and their memory."""
        now = time.monotonic()
        busy_s, memory_bytes = _sum_up(pids)
        then, busy_then_s = self._before.get(name, (now, busy_s))
        self._before[name] = (now, busy_s)
        cores = max(0.0, busy_s - busy_then_s) / (now - then) if now > then else None
        return cores, memory_bytes

    def keep(self, names: Iterable[str]) -> None:
        """Drop all other processes."""
        names = {*names}
        self._before = {name: seen for name, seen in self._before.items() if name in names}


def read_gpus() -> tuple[tuple[float, float], ...]:
    """Utilisation and memory share of each GPU of this machine; empty where unknown."""
    program = _nvidia_smi()
    if program is None:
        return ()
    try:
        parts = [program, _QUERY, "--format=csv,noheader,nounits"]
        done = subprocess.run(parts, capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603 (the driver's own program)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(_read_line(line) for line in done.stdout.splitlines() if line.count(",") == 2)


def write_use(run: RunStore, lease: str, use: LeaseUse) -> None:
    """Write usage for observers on other machines; not flushed, and errors are ignored."""
    with suppress(OSError):
        run.write(f"{_AREA}/{lease}.json", use.model_dump_json(), durable=False)


def read_uses(run: RunStore, leases: Iterable[str]) -> Iterator[tuple[str, LeaseUse]]:
    """Last usage written by these leases."""
    for lease in leases:
        with suppress(OSError, ValueError):
            content = run.read(f"{_AREA}/{lease}.json")
            if content is not None:
                yield lease, LeaseUse.model_validate_json(content)


@cache
def _nvidia_smi() -> str | None:
    return shutil.which("nvidia-smi")


def _read_line(line: str) -> tuple[float, float]:
    figures: list[float] = []
    for word in line.split(","):
        try:
            figures.append(float(word))
        except ValueError:  # [N/A]
            figures.append(0.0)
    busy, used, total = figures
    return busy / 100.0, used / total if total else 0.0


def _sum_up(pids: Iterable[int]) -> tuple[float, float]:
    busy_s = memory_bytes = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:
            continue
        busy_s += times.user + times.system
        # Forked workers share pages of the data.
        memory_bytes += memory.rss - getattr(memory, "shared", 0)
    return busy_s, memory_bytes
