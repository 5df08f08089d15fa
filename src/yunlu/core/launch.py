"""Detect external launchers: environment variables of torchrun, srun and mpirun."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from yunlu.core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORTS = range(20_000, 30_000)
"""Ports from which all processes choose the same one by the job's id, if the launcher sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """Rank of this process among externally launched ones."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Address of rank 0."""
    port: int
    launcher: str
    """Launcher whose variables were found."""
    id: str = ""
    """The launcher's id of this launch, unchanged by a restart; empty if it has none."""
    restarts: int = 0
    """Previous starts of these processes by the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convention:
    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]


_CONVENTIONS = (
    _Convention(launcher="torchrun", rank="RANK", size=("WORLD_SIZE",), local_rank=("LOCAL_RANK",)),
    _Convention(
        launcher="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    _Convention(
        launcher="srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
    ),
    _Convention(
        launcher="mpiexec",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
    ),
)


def detect_launch(variables: Mapping[str, str]) -> LaunchInfo | None:
    """Read the launcher's variables; None unless several processes were launched.

    Args:
        variables: See ``core.settings.launch_variables``.
    """
    conventions = [
        c for c in _CONVENTIONS if c.rank in variables or any(name in variables for name in c.size)
    ]
    # A batch script has the job's variables, including a rank, but is not one of several tasks.
    in_step = any(name.startswith("SLURM_STEP") for name in variables)
    conventions = [
        c for c in conventions if c.launcher != "srun" or (c.rank in variables and in_step)
    ]
    if not conventions:
        return None
    convention = conventions[0]
    rank = _read_int(variables, convention.rank, convention.launcher)
    size_name = next((name for name in convention.size if name in variables), convention.size[-1])
    size = _read_int(variables, size_name, convention.launcher)
    if not 0 <= rank < size:
        raise TrainingError(
            f"{convention.rank} is {rank}, but {size_name} is {size}.",
            hint=f"{convention.launcher} must set a rank from 0 to {size_name} - 1.",
        )
    if size == 1:
        return None
    local = next((name for name in convention.local_rank if name in variables), None)
    if local is None and convention.launcher == "torchrun":
        _read_int(variables, "LOCAL_RANK", convention.launcher)
    host, port = _master_address(variables, convention.launcher)
    return LaunchInfo(
        rank=rank,
        size=size,
        local_rank=_read_int(variables, local, convention.launcher) if local else 0,
        host=host,
        port=port,
        launcher=convention.launcher,
        id=_name(variables, convention.launcher),
        restarts=_restarts(variables, convention.launcher),
    )


def _name(variables: Mapping[str, str], launcher: str) -> str:
    if launcher == "torchrun":
        return variables.get("TORCHELASTIC_RUN_ID", "")
    if launcher == "srun" and "SLURM_JOB_ID" in variables:
        return f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_STEP_ID', '')}"
    return variables.get("PMIX_NAMESPACE", "") if launcher == "mpirun" else ""


def _restarts(variables: Mapping[str, str], launcher: str) -> int:
    name = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "srun": "SLURM_RESTART_COUNT"}.get(launcher)
    return _read_int(variables, name, launcher) if name is not None and name in variables else 0


def _read_int(variables: Mapping[str, str], name: str, launcher: str) -> int:
    if name not in variables:
        raise TrainingError(
            f"{launcher} seems to have started this process, but {name} is not set.",
            hint=f"Start it with {launcher}, or unset the other variables of {launcher}.",
        )
    try:
        return int(variables[name])
    except ValueError:
        raise TrainingError(
            f"{name} is {variables[name]!r}, not an integer.",
            hint=f"{launcher} sets it; do not change it.",
        ) from None


def _master_address(variables: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Address and port of rank 0."""
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if host and port:
        return host, _read_int(variables, "MASTER_PORT", launcher)
    if launcher == "torchrun" or host or port:
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise TrainingError(
            f"{missing} is not set, so the processes cannot find each other.",
            hint="Set MASTER_ADDR and MASTER_PORT to a host and a free port of rank 0.",
        )
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    job, step = variables.get("SLURM_JOB_ID", "0"), variables.get("SLURM_STEP_ID", "0")
    if nodes and job.isdigit() and step.isdigit():
        return first_host(nodes), _PORTS[(int(job) + int(step)) % len(_PORTS)]
    if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == variables.get("OMPI_COMM_WORLD_SIZE", ""):
        name = variables.get("PMIX_NAMESPACE", "")
        return "127.0.0.1", _PORTS[crc32(name.encode()) % len(_PORTS)]
    raise TrainingError(
        f"{launcher} does not set the address of rank 0.",
        hint="Set MASTER_ADDR and MASTER_PORT to a host and a free port of rank 0.",
    )


def first_host(nodes: str) -> str:
    """First host of a list such as ``gpu[03-05,09],head``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise TrainingError(f"{nodes!r} is not a list of Slurm nodes.")
    return match[1] + (match[2] or "") + (match[3] or "")
