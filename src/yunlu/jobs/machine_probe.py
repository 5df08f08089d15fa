"""Probe this machine in a separate process; stored results are reused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import YunluError
from yunlu.core.json_decode import decode_json
from yunlu.core.processes import piped_process
from yunlu.core.value import Value
from yunlu.executors.worker_process import require_training
from yunlu.jobs import calibration
from yunlu.planning.machine_profile import MachineProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROGRAM = (sys.executable, "-m", "yunlu.training.probing.measure")


class ProbeError(YunluError):
    """The machine could not be measured."""

    code = "probe"


class ProbeProgress(Value):
    """Which part of a probe is being measured."""

    part: str
    index: int
    of: int
    """Number of parts; 0 where not known yet."""


class LearntFactor(Value):
    """Step times of runs on this machine over the prediction from the probe alone."""

    runs: int
    factor: float
    sd_of_log: float
    """Standard deviation of the logarithm of the factor."""


class ProbeResult(Value):
    """Figures of this machine."""

    probed: MachineProfile
    calibration: LearntFactor


class ForgottenRuns(Value):
    """Runs whose measurements were dropped from the calibration."""

    forgotten: int


def probe_machine(
    *,
    show: bool = False,
    afresh: bool = False,
    on_progress: Callable[[ProbeProgress], None] | None = None,
) -> ProbeResult:
    """Figures of this machine; measured where none are stored, or where asked ``afresh``."""
    probed = calibration.stored_probe()
    if show and probed is None:
        raise ProbeError("this machine was never probed", hint="yunlu probe")
    is_known = probed is not None and not probed.is_quick and calibration.knows_threads(probed)
    if not show and (afresh or not is_known):
        require_training()
        probed = measure(on_progress)
    assert probed is not None
    belief = calibration.read_calibration(refresh=True).belief(probed.name)
    learnt = LearntFactor(runs=belief.runs, factor=belief.factor, sd_of_log=belief.sd)
    return ProbeResult(probed=probed, calibration=learnt)


def forget_runs(*, all_: bool = False) -> ForgottenRuns:
    """Drop what deleted runs have taught, or every run and every probe."""
    count = calibration.forget_all() if all_ else calibration.forget_deleted()
    return ForgottenRuns(forgotten=count)


def measure(on_progress: Callable[[ProbeProgress], None] | None = None) -> MachineProfile:
    """Run the measuring process to its end."""
    if on_progress is not None:
        on_progress(ProbeProgress(part="starting", index=0, of=0))
    for message in _read_messages():
        if "probed" in message:
            return MachineProfile.model_validate(message["probed"])
        if on_progress is not None:
            on_progress(ProbeProgress.model_validate(message))
    raise AssertionError("unreachable")


def _read_messages() -> Iterator[dict[str, Any]]:
    """Messages of the measuring process; torch is imported there, not here."""
    with piped_process(_PROGRAM, errors=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                yield decode_json(line)
        output = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise ProbeError(
            f"the machine could not be measured: {output[-1] if output else 'no message'}",
            hint="yunlu doctor shows what is missing",
        )
