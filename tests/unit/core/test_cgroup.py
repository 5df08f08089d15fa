from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.cgroup import Cgroup, read_cgroup

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")


def membership(folder: Path, *lines: str) -> Path:
    file = folder / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_the_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cpu.max": "max 100000",
            "memory.max": "max",
            "pod/cpu.max": "150000 100000",
            "pod/memory.max": str(4 * GIB),
            "pod/memory.current": str(3 * GIB),
            "pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
            "pod/box/cpu.max": "400000 100000",
            "pod/box/memory.max": "max",
        },
    )
    found = read_cgroup(tmp_path, membership(tmp_path, "0::/pod/box"))
    # Two of the three GiB in use are files kept in memory until somebody needs the room.
    assert found == Cgroup(cores=1.5, memory_bytes=4 * GIB, memory_used_bytes=GIB)


def test_version_1_groups_are_read_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cpu/box/cpu.cfs_quota_us": "50000",
            "cpu/box/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": str(GIB),
            "memory/box/memory.usage_in_bytes": str(GIB // 2),
            "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        },
    )
    lines = ["4:memory:/box", "2:cpu,cpuacct:/box", "0::/"]
    found = read_cgroup(tmp_path, membership(tmp_path, *lines))
    assert found == Cgroup(cores=0.5, memory_bytes=GIB, memory_used_bytes=GIB // 2)


def test_a_container_that_sees_only_its_own_root_still_finds_its_limit(tmp_path: Path) -> None:
    write(tmp_path, {"cpu.max": "200000 100000", "memory.max": str(GIB)})
    found = read_cgroup(tmp_path, membership(tmp_path, "0::/kubepods/pod1/box"))
    assert found == Cgroup(cores=2.0, memory_bytes=GIB)


def test_no_limits_and_no_groups_mean_no_limits(tmp_path: Path) -> None:
    write(tmp_path, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert read_cgroup(tmp_path, membership(tmp_path, "2:cpu:/", "0::/")) == Cgroup()
    assert read_cgroup(tmp_path, tmp_path / "absent") == Cgroup()
