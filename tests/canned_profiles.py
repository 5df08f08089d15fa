"""Measured speeds that no test should pay for: canned probes of this processor, and of pretend devices."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from yunlu.planning.machine_profile import (
    FOLDER,
    KernelTiming,
    Kind,
    MachineProfile,
    dump_profiles,
    file_names,
)
from yunlu.training.probe import cpu_name


def store_profiles(cache: Path, **devices: str) -> None:
    """Leave probes of devices in a cache, by their kinds: as if they had been measured."""
    folder = cache / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    profiles = [make_profile(kind, device) for kind, device in devices.items()]
    (folder / file_names(cpu_name(), "")[0]).write_bytes(dump_profiles(profiles))


def make_profile(kind: str, device: str) -> MachineProfile:
    """Speeds that are plausible enough to plan with."""
    sizes, cores = (1e3, 1e6, 1e9), os.cpu_count() or 1
    rates: dict[Kind, float] = {"product": 1e10, "stream": 5e9}
    paces = tuple(
        KernelTiming(
            kind=work, threads=threads, sizes=sizes, spread=0.1,
            seconds=tuple(1e-6 + size / rate for size in sizes),
        )
        for work, rate in rates.items()
        for threads in range(1, cores + 1)
    )  # fmt: skip
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    return MachineProfile(
        at=0.0, took_s=1.0, is_quick=True, host="canned", kind=kind, device=device,
        cores=cores, memory_bytes=1 << 33, threads=1, torch=version, paces=paces,
        memory_bytes_per_s=5e9, call_s=1e-5,
    )  # fmt: skip
