"""CPU limits of a run on this machine: cgroup or affinity."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["cgroup v2", "cgroup v1", "affinity"]

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_PERIOD_US = 100_000
PREFIX = "yunlu-"


@cache
def find_kind() -> Kind:
    """The best kind of limit available here: a CPU quota, else CPU affinity."""
    if can_hold(home_v2(), "cpu.max"):
        return "cgroup v2"
    return "cgroup v1" if can_hold(_home_v1(), "cpu.cfs_quota_us") else "affinity"


def limit(run_id: str, pid: int, *, cpus: float) -> None:
    """Limit the CPU time of a process and of its future children."""
    kind = find_kind()
    with suppress(OSError, psutil.NoSuchProcess):  # it runs without a limit
        if kind == "affinity":
            _pin(pid, cpus)
            return
        group = group_of(run_id)
        for _ in range(2):  # an empty cgroup may be removed before a process is in it
            with suppress(FileNotFoundError):
                group.mkdir(exist_ok=True)
                _write_quota(group, cpus)
                (group / "cgroup.procs").write_text(str(pid))
                return


def change(run_id: str, pid: int, *, cpus: float) -> None:
    """Change the limit of a run."""
    with suppress(OSError, psutil.NoSuchProcess):
        if find_kind() == "affinity":
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    _pin(process.pid, cpus)
        else:
            _write_quota(group_of(run_id), cpus)


def forget(run_id: str) -> None:
    """Remove the limit of a run that is over, unless it still has processes."""
    if find_kind() != "affinity":
        with suppress(OSError):
            group_of(run_id).rmdir()


def sweep(keep: Callable[[Path], bool] = lambda _: False) -> None:
    """Remove the limits of all runs that are over, except those in ``keep``."""
    if find_kind() != "affinity":
        sweep_home(group_of("").parent, keep)


def sweep_home(home: Path, keep: Callable[[Path], bool]) -> None:
    """Remove cgroups of ours without processes."""
    for group in home.glob(f"{PREFIX}*"):
        if not keep(group):
            with suppress(OSError):
                group.rmdir()


def group_of(run_id: str) -> Path:
    """Cgroup of a run; None where cgroups are not used."""
    home = home_v2() if find_kind() == "cgroup v2" else _home_v1()
    return home / f"{PREFIX}{run_id}"


def home_v2() -> Path:
    """Parent directory of cgroups, version 2."""
    # Processes may only be in leaf cgroups: our own cgroup cannot be a parent.
    own = own_group("")
    return (_V2 / own).parent if own else _V2


def _home_v1() -> Path:
    own = _V1 / own_group("cpu")
    return own if own.is_dir() else _V1  # in a container the path may be the host's


def own_group(controller: str) -> str:
    """Cgroup of this process; version 2 if no controller is named."""
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path.strip("/")
    return ""


def can_hold(home: Path, file: str) -> bool:
    """Whether cgroups can be created there with this limit."""
    trial = home / f"{PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return os.access(trial / file, os.W_OK)
    finally:
        with suppress(OSError):
            trial.rmdir()


def _write_quota(group: Path, cpus: float) -> None:
    quota_us = max(1_000, round(cpus * _PERIOD_US))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        _weigh(group / "cpu.weight", 100 * cpus, least=1, most=10_000)
    else:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        _weigh(group / "cpu.shares", 1024 * cpus, least=2, most=262_144)


def _weigh(file: Path, weight: float, *, least: int, most: int) -> None:
    """Weight: a cgroup counts as one process, so four shares of a busy machine would get the time of one."""
    with suppress(OSError):  # the quota works without it
        file.write_text(str(min(max(round(weight), least), most)))


def _pin(pid: int, cpus: float) -> None:
    """Pin to so many cores, at most all; which ones depends on the process."""
    cores = sorted(os.sched_getaffinity(os.getpid()))
    count = max(1, min(len(cores), round(cpus)))
    first = pid % len(cores)
    os.sched_setaffinity(pid, {cores[(first + i) % len(cores)] for i in range(count)})
