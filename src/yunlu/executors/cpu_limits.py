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
    """The best that this machine allows us: a quota of time, else a set of cores."""
    if can_hold(home_v2(), "cpu.max"):
        return "cgroup v2"
    return "cgroup v1" if can_hold(_home_v1(), "cpu.cfs_quota_us") else "affinity"


def limit(run_id: str, pid: int, *, cpus: float) -> None:
    """Let a process, and what it starts from now on, have so many processors' time."""
    kind = find_kind()
    with suppress(OSError, psutil.NoSuchProcess):  # without a limit it runs all the same
        if kind == "affinity":
            _pin(pid, cpus)
            return
        group = group_of(run_id)
        for _ in range(2):  # an empty group may be swept away before anybody stands in it
            with suppress(FileNotFoundError):
                group.mkdir(exist_ok=True)
                _write_quota(group, cpus)
                (group / "cgroup.procs").write_text(str(pid))
                return


def change(run_id: str, pid: int, *, cpus: float) -> None:
    """Another share for a run that has one."""
    with suppress(OSError, psutil.NoSuchProcess):
        if find_kind() == "affinity":
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    _pin(process.pid, cpus)
        else:
            _write_quota(group_of(run_id), cpus)


def forget(run_id: str) -> None:
    """Remove the limit of a run that is over; one that still has processes stays."""
    if find_kind() != "affinity":
        with suppress(OSError):
            group_of(run_id).rmdir()


def sweep(keep: Callable[[Path], bool] = lambda _: False) -> None:
    """Remove the limits of all runs that are over, whoever forgot to, but for those to ``keep``."""
    if find_kind() != "affinity":
        sweep_home(group_of("").parent, keep)


def sweep_home(home: Path, keep: Callable[[Path], bool]) -> None:
    """Remove groups of ours in which nobody stands."""
    for group in home.glob(f"{PREFIX}*"):
        if not keep(group):
            with suppress(OSError):
                group.rmdir()


def group_of(run_id: str) -> Path:
    """The control group of a run; only where there are such."""
    home = home_v2() if find_kind() == "cgroup v2" else _home_v1()
    return home / f"{PREFIX}{run_id}"


def home_v2() -> Path:
    """Where groups of version 2 are made."""
    # Processes may only stand in leaves: our own group cannot be the parent of another.
    own = own_group("")
    return (_V2 / own).parent if own else _V2


def _home_v1() -> Path:
    own = _V1 / own_group("cpu")
    return own if own.is_dir() else _V1  # in a container the path may be the host's


def own_group(controller: str) -> str:
    """The group of this process, of version 2 where no controller is named."""
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path.strip("/")
    return ""


def can_hold(home: Path, file: str) -> bool:
    """Whether we may make groups there, and set this limit of them."""
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
    """A group counts as one process: without this, four shares of a busy machine are worth one."""
    with suppress(OSError):  # the quota holds without it
        file.write_text(str(min(max(round(weight), least), most)))


def _pin(pid: int, cpus: float) -> None:
    """So many cores, as many as there are to choose from; which ones depends on the process."""
    cores = sorted(os.sched_getaffinity(os.getpid()))
    count = max(1, min(len(cores), round(cpus)))
    first = pid % len(cores)
    os.sched_setaffinity(pid, {cores[(first + i) % len(cores)] for i in range(count)})
