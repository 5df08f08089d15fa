"""Memory limits of a run on this machine: a run beyond its limit is ended alone."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from yunlu.core.cgroup import read_cgroup
from yunlu.core.units import show_bytes
from yunlu.executors import cpu_limits

_V1 = Path("/sys/fs/cgroup/memory")
_LEAST_BYTES = 2 << 30
"""A process that has loaded torch must fit, however many devices a machine is divided into."""
_HEADROOM, _BESIDES_BYTES = 1.25, 1 << 30
"""Beyond what training may take: what it takes besides weights and activations, and its supervisor."""
_NO_LIMIT = 1 << 60
"""Version 1 says so with a number near 2^63."""
_CLEARING_S = 2.0
"""How long the last processes of an earlier life are waited for: they were killed."""


def choose_bytes(*, total: float, devices: int, of: int, declared_gb: float | None = None) -> int:
    """What a run may take with so many devices of a machine.

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
    """Memory of this machine, or of the container that we are in."""
    return min(psutil.virtual_memory().total, read_cgroup().memory_bytes or _NO_LIMIT)


@cache
def find_kind() -> cpu_limits.Kind | None:
    """What keeps a run to its memory here; None where nothing may."""
    if cpu_limits.can_hold(cpu_limits.home_v2(), "memory.max"):
        return "cgroup v2"
    return "cgroup v1" if cpu_limits.can_hold(_home_v1(), "memory.limit_in_bytes") else None


def limit(run_id: str, pid: int, *, most_bytes: int) -> None:
    """Let a process, and what it starts from now on, have so much memory."""
    group = _group_of(run_id)
    if group is None:
        return
    _clear(group)
    for _ in range(2):  # an empty group may be swept away before anybody stands in it
        with suppress(OSError):  # without a limit it runs all the same
            group.mkdir(exist_ok=True)
            _write(group, most_bytes)
            (group / "cgroup.procs").write_text(str(pid))
            break
    with suppress(OSError, psutil.NoSuchProcess):  # what it has started meanwhile
        for child in psutil.Process(pid).children(recursive=True):
            (group / "cgroup.procs").write_text(str(child.pid))


def change(run_id: str, *, most_bytes: int) -> None:
    """Another limit for a run that has one; never one that it is beyond already."""
    group = _group_of(run_id)
    if group is not None and group.is_dir():
        with suppress(OSError):
            used = _read(group, "memory.current", "memory.usage_in_bytes") or 0
            _write(group, max(most_bytes, int(1.1 * used)))


def report_exceeded(run_id: str) -> str | None:
    """That the run grew beyond its limit, and something of it was ended for that; None where not."""
    group = _group_of(run_id)
    if group is None or not has_exceeded(group):
        return None
    most = _read(group, "memory.max", "memory.limit_in_bytes")
    text = "" if most is None else f" of {show_bytes(most)}"
    return f"it took more memory than its limit{text}, and was ended for that"


def forget(run_id: str) -> None:
    """Remove the limit of a run that is over, whatever of it is still ending."""
    group = _group_of(run_id)
    if group is not None and not _remove(group):
        with suppress(OSError):  # so that it counts as read, and is swept away once it is empty
            _write(group, _NO_LIMIT)


def sweep() -> None:
    """Remove limits of runs that are over, but for those whose end nobody has read yet."""
    home = _group_of("")
    if home is not None:
        cpu_limits.sweep_home(home.parent, has_exceeded)


def has_exceeded(group: Path) -> bool:
    """Whether something was ended there because it took more than it may, and nobody has read that."""
    most = _read(group, "memory.max", "memory.limit_in_bytes")
    return most is not None and most < _NO_LIMIT and _count_kills(group) > 0


def describe(*, devices: int) -> str:
    """How runs are kept to their memory here, in words."""
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
    """As high as no limit is lost: a run outlives the group of whoever started it."""
    home = _V1 / cpu_limits.own_group("memory")
    if not home.is_dir():  # in a container the path may be the host's
        return _V1
    while home != _V1 and (_read(home, "memory.limit_in_bytes") or 0) >= _NO_LIMIT:
        home = home.parent
    return home


def _clear(group: Path) -> None:
    """Remove what an earlier life left: else what that one was ended for would be counted again."""
    deadline = time.monotonic() + _CLEARING_S
    while not _remove(group) and time.monotonic() < deadline:
        time.sleep(0.01)


def _remove(group: Path) -> bool:
    """Whether the group is gone: one in which a process is still ending stays."""
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
        with suppress(OSError):  # all of it ends together; one worker less would only try again
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


def _count_kills(group: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError):
            parts = (group / name).read_text().split()
            return int(dict(zip(parts[::2], parts[1::2], strict=False)).get("oom_kill", 0))
    return 0


def _read(group: Path, *names: str) -> int | None:
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None
