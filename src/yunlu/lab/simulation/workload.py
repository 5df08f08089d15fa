"""Recorded workloads: arrivals of jobs, and what their owners asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.lab.simulation.tables import SimulationError, read_count, read_number, read_rows

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


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
    for line, row in enumerate(read_rows(path, _COLUMNS)):
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
