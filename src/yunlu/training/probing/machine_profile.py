"""The profile of this machine, measured now if it is not stored."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from yunlu.core.json_decode import decode_json
from yunlu.core.processes import piped_process
from yunlu.planning.machine_profile import MachineProfile
from yunlu.training.probing.profile_store import load_profile, save_profile

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Machine

_PROGRAM = (sys.executable, "-m", "yunlu.training.probing.measure", "--quick")


def load_or_measure(machine: Machine) -> MachineProfile:
    """The stored profile; else a quick measurement, which is then stored."""
    profile = load_profile(machine)
    if profile is None:
        profile = _measure_in_subprocess()
        save_profile(profile)
    return profile


def _measure_in_subprocess() -> MachineProfile:
    """Measure in a subprocess: benchmark arrays would count in the run's peak memory."""
    command = [*_PROGRAM, "--threads", str(torch.get_num_threads())]
    with piped_process(command, errors=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(b'{"probed"'):
                return MachineProfile.model_validate(decode_json(line)["probed"])
    from yunlu.training.probing.measure import measure_machine  # noqa: PLC0415 - hardly ever

    return measure_machine(quick=True)
