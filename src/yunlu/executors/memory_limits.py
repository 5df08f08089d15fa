"""Memory limits of a run on this machine: a run beyond its limit is killed alone."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from yunlu.core.cgroup import count_oom_kills, read_cgroup
from yunlu.core.units import show_bytes
from yunlu.executors import cpu_limits

_V1 = Path("/sys/fs/cgroup/memory")
_LEAST_BYTES = 2 << 30
"""Least limit: a process that has loaded torch must fit."""
_HEADROOM, _BESIDES_BYTES = 1.25, 1 << 30
"""Added to what training may use: other memory of the workers, and their supervisor."""
_NO_LIMIT = 1 << 60
"""Cgroup version 1 encodes "no limit" as a number near 2^63."""
_CLEARING_S = 2.0
"""How long to wait for killed processes of an earlier attempt."""


def choose_bytes(*, total: float, devices: int, of: int, declared_gb: float | None = None) -> int:
    """Memory limit of a run that holds so many devices of a machine.

    Args:
        total: Bytes of the machine.
        devices: That the run holds.
        of: That the machine is divided into.
        declared_gb: What its job says that training takes on each device, if it says so.
    """
    share = max(total * devices / of, _LEAST_BYTES)
    if declared_gb is not None:
        share = max(share, devices * declared_gb * 1e9 * _HEADROOM + _BESIDES_BYTES)
    return int(min(share, total))


def total_bytes() -> int:
    """Memory of this machine, or of the container."""
    return min(psutil.virtual_memory().total, read_cgroup().memory_bytes or _NO_LIMIT)


@cache
def find_kind() -> cpu_limits.Kind | None:
    """Kind of memory limit available here; None if there is none."""
    if cpu_limits.can_hold(cpu_limits.home_v2(), "memory.max"):
        return "cgroup v2"
    return "cgroup v1" if cpu_limits.can_hold(_home_v1(), "memory.limit_in_bytes") else None


def limit(run_id: str, pid: int, *, most_bytes: int) -> None:
    """Limit the memory of a process and of its future children."""
    group = _group_of(run_id)
    if group is None:
        return
    _clear(group)
    for _ in range(2):  # an empty cgroup may be removed before a process is in it
        with suppress(OSError):  # it runs without a limit
            group.mkdir(exist_ok=True)
            _write(group, most_bytes)
            (group / "cgroup.procs").write_text(str(pid))
            break
    with suppress(OSError, psutil.NoSuchProcess):  # children started meanwhile
        for child in psutil.Process(pid).children(recursive=True):
            (group / "cgroup.procs").write_text(str(child.pid))


def change(run_id: str, *, most_bytes: int) -> None:
    """Change the limit of a run; never to less than it uses already."""
    group = _group_of(run_id)
    if group is not None and group.is_dir():
        with suppress(OSError):
            used = _read(group, "memory.current", "memory.usage_in_bytes") or 0
            _write(group, max(most_bytes, int(1.1 * used)))


def report_exceeded(run_id: str) -> str | None:
    """Message if a process of the run was killed for exceeding the limit; else None."""
    group = _group_of(run_id)
    if group is None or not has_exceeded(group):
        return None
    most = _read(group, "memory.max", "memory.limit_in_bytes")
    text = "" if most is None else f" of {show_bytes(most)}"
    return f"it took more memory than its limit{text}, and was ended for that"


def forget(run_id: str) -> None:
    """Remove the limit of a run that is over, even if processes are still exiting."""
    group = _group_of(run_id)
    if group is not None and not _remove(group):
        with suppress(OSError):  # counts as read, and is removed once it is empty
            _write(group, _NO_LIMIT)


def sweep() -> None:
    """Remove limits of runs that are over, except those whose out-of-memory kill nobody has read yet."""
    home = _group_of("")
    if home is not None:
        cpu_limits.sweep_home(home.parent, has_exceeded)


def has_exceeded(group: Path) -> bool:
    """Whether a process was killed for exceeding the limit, and that was not read yet."""
    most = _read(group, "memory.max", "memory.limit_in_bytes")
    return most is not None and most < _NO_LIMIT and count_oom_kills(group) > 0


def describe(*, devices: int) -> str:
    """How the memory of runs is limited here, as text."""
    kind = find_kind()
    if kind is None:
        return "memory is not limited: control groups cannot be made here"
    share = choose_bytes(total=total_bytes(), devices=1, of=devices)
    return f"{show_bytes(share)} of memory ({kind}), more where its job says train.memory_gb"


def _group_of(run_id: str) -> Path | None:
    kind = find_kind()
    if kind is None:
        return None
    home = cpu_limits.home_v2() if kind == "cgroup v2" else _home_v1()
    return home / f"{cpu_limits.PREFIX}{run_id}"


def _home_v1() -> Path:
    """High enough in the hierarchy: a run outlives the cgroup of the process that started it."""
    home = _V1 / cpu_limits.own_group("memory")
    if not home.is_dir():  # in a container the path may be the host's
        return _V1
    while home != _V1 and (_read(home, "memory.limit_in_bytes") or 0) >= _NO_LIMIT:
        home = home.parent
    return home


def _clear(group: Path) -> None:
    """Remove the cgroup of an earlier attempt, or its out-of-memory kill would be counted again."""
    deadline = time.monotonic() + _CLEARING_S
    while not _remove(group) and time.monotonic() < deadline:
        time.sleep(0.01)


def _remove(group: Path) -> bool:
    """Whether the cgroup is gone: one with an exiting process stays."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(group: Path, most_bytes: int) -> None:
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(most_bytes))
        with suppress(OSError):  # kill all together; a lone lost worker would only be restarted
            (group / "memory.oom.group").write_text("1")
        with suppress(OSError):  # there may be no swap
            (group / "memory.swap.max").write_text("0")
        return
    both = group / "memory.memsw.limit_in_bytes"  # with swap: never below the one without
    order = [group / "memory.limit_in_bytes", both]
    if both.exists() and (_read(group, both.name) or 0) < most_bytes:
        order.reverse()
    for file in order:
        if file.exists():
            file.write_text(str(most_bytes))


def _read(group: Path, *names: str) -> int | None:
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None
