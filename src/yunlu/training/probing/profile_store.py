"""What was measured before: the machine's figures, and what runs have taught about them."""

from __future__ import annotations

import fcntl
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import torch

from yunlu.core.files import write_atomically
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

    from yunlu.hardware.machine import Machine
    from yunlu.planning.calibration import Calibration
    from yunlu.planning.machine_profile import MachineProfile


_OWN_LOAD = 0.5
"""What a worker that started some seconds ago is in that mean, and what any machine does besides."""


def profile_files() -> tuple[Path, ...]:
    """Where the figures of this machine are kept, and where an earlier version kept them."""
    folder = read_settings().cache / FOLDER
    return tuple(folder / name for name in file_names(cpu_name(), socket.gethostname()))


def load_profile(machine: Machine) -> MachineProfile | None:
    """What was measured of the best device with the torch and the threads at hand."""
    device, threads = machine.best_device, torch.get_num_threads()
    probes: list[MachineProfile] = []
    for path in profile_files():
        with suppress(OSError):
            probes += parse_profiles(path.read_bytes())
    alike = [
        each
        for each in probes
        if (each.kind, each.device) == (device.kind, device.name)
        and is_same_version(each.torch, torch.__version__)
        and each.knows(threads)
    ]
    return choose_profile(alike, threads=threads)


def save_profile(probed: MachineProfile) -> None:
    """Store it among those of other devices and versions; without a place for it, do nothing."""
    path = profile_files()[0]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            before = parse_profiles(path.read_bytes()) if path.exists() else ()
            write_atomically(path, dump_profiles(with_profile(before, probed)))


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """Two that store at the same time must not lose what the other found."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def background_load(machine: Machine) -> float:
    """How many cores others keep busy, by the system's mean of the last minute; a GPU is one's own."""
    if machine.best_device.kind != "cpu":
        return 0.0
    return max(psutil.getloadavg()[0] - _OWN_LOAD, 0.0)


def load_calibration() -> Calibration:
    """What runs have taught; nothing where there were none."""
    try:
        text = (read_settings().cache / learnt.FILE).read_bytes()
    except OSError:
        return learnt.Calibration()
    return learnt.parse_calibration(text)
