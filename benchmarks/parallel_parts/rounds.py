"""Rounds: each layout by hand and by Yunlu, one after another, in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from benchmarks.faults_parts.processes import Processes
from benchmarks.parallel_parts.figures import Run, summarize
from benchmarks.parallel_parts.workload import make_job
from yunlu.runs.home import find_runs
from yunlu.runs.run_store import Log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_READ_S = 0.2
_TICKS_S = os.sysconf("SC_CLK_TCK")
_LONGEST_S = 1800.0


class RunError(Exception):
    """A run that gave no figures."""


def run_rounds(
    layouts: Sequence[str],
    contenders: Sequence[str],
    directory: Path,
    *,
    rounds: int,
    steps: int,
    warmup: int,
) -> Iterator[tuple[str, str, Run | str]]:
    """Each layout and contender of each round: what it measured, or why it could not."""
    for number in range(rounds):
        for layout in layouts:
            for contender in contenders:
                place = directory / f"{layout}-{contender}-{number}"
                place.mkdir(parents=True, exist_ok=True)
                try:
                    start = _start_hand if contender == "hand" else _start_yunlu
                    processes = Processes(log=place / "run.log", environment=_environment(place))
                    readings = _measure(processes, start(layout, directory, place, steps))
                    at, losses = (_read_hand if contender == "hand" else _read_yunlu)(place)
                    if len(at) != steps:
                        raise RunError(f"{len(at)} of {steps} steps were completed")
                    step_s, cpu_s = summarize(at, readings, warmup=warmup)
                except (RunError, ValueError, OSError) as error:
                    yield layout, contender, f"{error}; see {place}:\n{_tail(place / 'run.log')}"
                    continue
                run = Run(
                    layout=layout,
                    contender=contender,
                    round=number,
                    step_s=step_s,
                    cpu_s=cpu_s,
                    losses=tuple(losses),
                )
                yield layout, contender, run


def _start_hand(layout: str, data: Path, place: Path, steps: int) -> list[str]:
    del steps  # as many as there are tokens for
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "benchmarks.parallel_parts.hand", layout, str(data), str(place / "record.json"),
    ]  # fmt: skip


def _start_yunlu(layout: str, data: Path, place: Path, steps: int) -> list[str]:
    job = place / "job.yaml"
    job.write_text(yaml.safe_dump(make_job(data, layout, steps)))
    return [sys.executable, "-m", "yunlu.cli.main", "train", str(job)]


def _measure(processes: Processes, command: Sequence[str]) -> list[tuple[float, float]]:
    """Run to the end; instants, and the processor seconds used until then."""
    meter = Meter(processes)
    try:
        processes.start(command)
        meter.start()
        _wait(processes)
    finally:
        meter.stop()
        processes.end()
    return meter.readings


def _wait(processes: Processes) -> None:
    until = time.monotonic() + _LONGEST_S
    while not processes.is_over():
        if time.monotonic() > until:
            raise RunError(f"it was not over after {_LONGEST_S:.0f} s")
        time.sleep(0.05)


def _read_hand(place: Path) -> tuple[list[float], list[float]]:
    record = json.loads((place / "record.json").read_text())
    return record["at"], record["losses"]


def _read_yunlu(place: Path) -> tuple[list[float], list[float]]:
    for run in find_runs(place / "home", having=Log.METRICS):
        records = [record for record, _ in run.read_metrics()]
        return [each["at"] for each in records], [each["loss"] for each in records]
    raise RunError("there is no log of steps")


def _environment(place: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "YUNLU_HOME": str(place / "home"),
        "YUNLU_CACHE": str(place.parent / "cache"),
    }


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


@dataclass(slots=True)
class Meter:
    """Reads the processor time of all processes of a run, from outside, a few times a second."""

    processes: Processes
    readings: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    _used: dict[int, float] = field(default_factory=dict[int, float])
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_READ_S):
            for pid in self.processes.alive():
                with suppress(OSError, ValueError):
                    self._used[pid] = cpu_seconds(Path(f"/proc/{pid}/stat").read_text())
            # One that is over has used what it had used when last seen.
            self.readings.append((time.time(), sum(self._used.values())))


def cpu_seconds(stat: str) -> float:
    """User and system time of a process, its threads included (``proc_pid_stat(5)``, 14 and 15)."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S
