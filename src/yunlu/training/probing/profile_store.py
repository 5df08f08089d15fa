"""Stored machine profiles, and the calibration learned from runs."""

from __future__ import annotations

import fcntl
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import torch

from yunlu.core.files import make_directory, open_lock, write_atomically
from yunlu.core.settings import read_settings
from yunlu.planning import calibration as learnt
from yunlu.planning.machine_profile import (
    FOLDER,
    choose_profile,
    dump_profiles,
    file_names,
    is_same_version,
    parse_profiles,
    with_profile,
)
from yunlu.training.probe import cpu_name

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.calibration import Calibration
    from yunlu.planning.machine_profile import MachineProfile


_OWN_LOAD = 0.5
"""Share of the load average caused by this worker's start, and by any idle machine."""


def profile_files() -> tuple[Path, ...]:
    """Profile files of this machine: the current one, and those of earlier versions."""
    folder = read_settings().cache / FOLDER
    return tuple(folder / name for name in file_names(cpu_name(), socket.gethostname()))


def load_profile(machine: Machine) -> MachineProfile | None:
    """The profile of the best device for this torch version and thread count; None if missing."""
    device, threads = machine.best_device, torch.get_num_threads()
    profiles: list[MachineProfile] = []
    for path in profile_files():
        with suppress(OSError):
            profiles += parse_profiles(path.read_bytes())
    alike = [
        profile
        for profile in profiles
        if (profile.kind, profile.device) == (device.kind, device.name)
        and is_same_version(profile.torch, torch.__version__)
        and profile.knows(threads)
    ]
    return choose_profile(alike, threads=threads)


def save_profile(profile: MachineProfile) -> None:
    """Store a profile beside those of other devices and versions; ignores write errors."""
    path = profile_files()[0]
    with suppress(OSError):
        make_directory(path.parent)
        with _locked(path):
            before = parse_profiles(path.read_bytes()) if path.exists() else ()
            write_atomically(path, dump_profiles(with_profile(before, profile)))


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Exclusive lock: concurrent writers must not lose each other's profiles."""
    with open_lock(path.with_suffix(".lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def background_load(machine: Machine) -> float:
    """Cores kept busy by other processes, by the 1-minute load average; 0 on a GPU."""
    if machine.best_device.kind != "cpu":
        return 0.0
    return max(psutil.getloadavg()[0] - _OWN_LOAD, 0.0)


def load_calibration() -> Calibration:
    """The stored calibration; empty if there is none."""
    try:
        text = (read_settings().cache / learnt.FILE).read_bytes()
    except OSError:
        return learnt.Calibration()
    return learnt.parse_calibration(text)
