"""Control-group limits of this process: CPU and memory of a container."""

from __future__ import annotations

from pathlib import Path

from yunlu.core.value import Value


class Cgroup(Value):
    """What the control groups of this process allow; None means no limit."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int = 0


def read_cgroup(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Cgroup:
    """The tightest limits from this process's group up to the root, in version 1 or 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return Cgroup()
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(root, path):
                cores += _quota_v2(folder / "cpu.max")
                memory += _limit(folder, "memory.max", "memory.current")
        if "cpu" in controllers.split(","):
            for folder in _upwards(root / "cpu", path):
                cores += _quota_v1(folder)
        if "memory" in controllers.split(","):
            for folder in _upwards(root / "memory", path):
                memory += _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = min(memory, default=(None, 0))
    return Cgroup(cores=min(cores, default=None), memory_bytes=limit, memory_used_bytes=used)


def _upwards(root: Path, path: str) -> list[Path]:
    """The group's folder and its parents; inside a container only some of them are visible."""
    here = root / path.strip("/")
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(root)]


def _quota_v2(file: Path) -> list[float]:
    quota, _, period = (_read(file) or "max").partition(" ")
    return [] if quota == "max" else [float(quota) / float(period)]


def _quota_v1(folder: Path) -> list[float]:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return [float(quota) / float(period)] if quota and period and float(quota) > 0 else []


def _limit(folder: Path, limit_name: str, used_name: str) -> list[tuple[int, int]]:
    limit, used = _read(folder / limit_name), _read(folder / used_name)
    # Version 1 says "no limit" with a number near 2^63.
    if limit is None or limit == "max" or int(limit) >= 1 << 60:
        return []
    return [(int(limit), int(used or 0) - _reclaimable(folder))]


def _reclaimable(folder: Path) -> int:
    """Bytes of files kept in memory only while nobody needs the room."""
    fields = (_read(folder / "memory.stat") or "").split()
    stat = dict(zip(fields[::2], fields[1::2], strict=False))
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def count_oom_kills(folder: Path) -> int:
    """Processes of a group that were killed for want of memory so far."""
    for name in ("memory.events", "memory.oom_control"):
        parts = (_read(folder / name) or "").split()
        if parts:
            return int(dict(zip(parts[::2], parts[1::2], strict=False)).get("oom_kill", 0))
    return 0
