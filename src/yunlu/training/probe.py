"""What this machine has, and how fast each precision is on it.

``python -m yunlu.training.probe [--measure]`` prints it as JSON, also where torch is not installed:
so a room that must not import torch can ask.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import psutil

from yunlu.catalog.machine import Device, Machine
from yunlu.core.settings import read_settings
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

# Flags of processors that compute in the precision instead of converting back and forth.
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_CPU_FP16 = ("avx512_fp16", "amx_fp16", "fp16_arith")


def probe_machine() -> Machine:
    """This machine: cores and memory as its containers allow, its devices, its price."""
    cores, memory_bytes, free_bytes = count_cores(), *_memory()
    return Machine(
        hostname=socket.gethostname(),
        cores=cores,
        memory_bytes=memory_bytes,
        devices=(_cpu(free_bytes), *_accelerators()),
        dollars_per_hour=read_settings().dollars_per_hour,
    )


def count_cores(cgroup: Cgroup | None = None) -> int:
    """Cores this process may use: its affinity, less where a container grants less time."""
    limits = read_cgroup() if cgroup is None else cgroup
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:  # macOS, Windows
        allowed = os.cpu_count() or 1
    granted = limits.cores if limits.cores is not None else allowed
    return max(1, min(allowed, int(granted)))


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
    return [(int(limit), int(used or 0))]


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _memory() -> tuple[int, int]:
    """Total and free bytes, whichever of machine and container is tighter."""
    machine, limits = psutil.virtual_memory(), read_cgroup()
    total, free = machine.total, machine.available
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
        free = min(free, limits.memory_bytes - limits.memory_used_bytes)
    return total, max(0, free)


def _cpu(free_bytes: int) -> Device:
    torch = _torch()
    flags = {} if torch is None else dict(torch.cpu.get_capabilities())
    fast: list[Precision] = ["fp32"]
    if any(flags.get(flag) for flag in _CPU_BF16):
        fast.append("bf16")
    if any(flags.get(flag) for flag in _CPU_FP16):
        fast.append("fp16")
    name = flags.get("cpu_name") or platform.processor() or platform.machine()
    return Device(
        kind="cpu", name=str(name), memory_bytes=free_bytes, fast_precisions=tuple(fast)
    )


def _accelerators() -> list[Device]:
    torch = _torch()
    if torch is None:
        return []
    if torch.cuda.is_available():
        return [_cuda(torch, index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [_mps(torch)]
    return []


def _cuda(torch: Any, index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    # Tensor cores: fp16 from Volta (7.0) on, bf16 from Ampere (8.0); AMD's have both.
    is_amd = torch.version.hip is not None
    fast: list[Precision] = ["fp32"]
    if is_amd or properties.major >= 8:
        fast.append("bf16")
    if is_amd or properties.major >= 7:
        fast.append("fp16")
    return Device(
        kind="cuda", name=properties.name, memory_bytes=free_bytes, fast_precisions=tuple(fast)
    )


def _mps(torch: Any) -> Device:
    fast: list[Precision] = ["fp32", "fp16"]
    if torch.backends.mps.is_macos_or_newer(14, 0):
        fast.insert(1, "bf16")
    return Device(
        kind="mps",
        name=platform.processor() or "Apple",
        memory_bytes=torch.mps.recommended_max_memory(),
        fast_precisions=tuple(fast),
    )


def _torch() -> Any:
    """Torch, or None where it is missing or broken; ``torch_problem`` says which."""
    try:
        import torch  # noqa: PLC0415 (may be absent, and takes seconds)
    except (ImportError, OSError):
        return None
    return torch
