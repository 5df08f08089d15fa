"""Workers that somebody else started: what torchrun, srun or mpirun told this process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from yunlu.core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORTS = range(20_000, 30_000)
"""Where a launcher names no port, all processes derive the same one from the job's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """This process among those that were started together."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Where rank 0 is."""
    port: int
    by: str
    """Whose convention it was."""
    id: str = ""
    """What the launcher calls this launch, the same after a restart; empty where it has no name."""
    restarts: int = 0
    """How often the launcher has started these processes before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convention:
    by: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]


_CONVENTIONS = (
    _Convention(by="torchrun", rank="RANK", size=("WORLD_SIZE",), local_rank=("LOCAL_RANK",)),
    _Convention(
        by="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    _Convention(
        by="srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
    ),
    _Convention(
        by="mpiexec",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
    ),
)


def detect_launch(variables: Mapping[str, str]) -> LaunchInfo | None:
    """What the launcher told us; none where nobody launched several.

    Args:
        variables: See ``core.settings.launch_variables``.
    """
    conventions = [
        c for c in _CONVENTIONS if c.rank in variables or any(name in variables for name in c.size)
    ]
    # A batch script has the job's variables, a rank among them, but is not one of several tasks.
    in_step = any(name.startswith("SLURM_STEP") for name in variables)
    conventions = [c for c in conventions if c.by != "srun" or (c.rank in variables and in_step)]
    if not conventions:
        return None
    convention = conventions[0]
    rank = _number(variables, convention.rank, convention.by)
    size_name = next((name for name in convention.size if name in variables), convention.size[-1])
    size = _number(variables, size_name, convention.by)
    if not 0 <= rank < size:
        raise TrainingError(
            f"{convention.rank} is {rank}, but {size_name} is {size}.",
            hint=f"The rank of {convention.by} counts from 0 to one less than the size.",
        )
    if size == 1:
        return None
    local = next((name for name in convention.local_rank if name in variables), None)
    if local is None and convention.by == "torchrun":
        _number(variables, "LOCAL_RANK", convention.by)
    host, port = _meeting(variables, convention.by)
    return LaunchInfo(
        rank=rank,
        size=size,
        local_rank=_number(variables, local, convention.by) if local else 0,
        host=host,
        port=port,
        by=convention.by,
        id=_name(variables, convention.by),
        restarts=_restarts(variables, convention.by),
    )


def _name(variables: Mapping[str, str], by: str) -> str:
    if by == "torchrun":
        return variables.get("TORCHELASTIC_RUN_ID", "")
    if by == "srun" and "SLURM_JOB_ID" in variables:
        return f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_STEP_ID', '')}"
    return variables.get("PMIX_NAMESPACE", "") if by == "mpirun" else ""


def _restarts(variables: Mapping[str, str], by: str) -> int:
    name = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "srun": "SLURM_RESTART_COUNT"}.get(by)
    return _number(variables, name, by) if name is not None and name in variables else 0


def _number(variables: Mapping[str, str], name: str, by: str) -> int:
    if name not in variables:
        raise TrainingError(
            f"This process looks as if {by} had started it, but {name} is not set.",
            hint=f"Start it with {by}, or unset the other variables of {by}.",
        )
    try:
        return int(variables[name])
    except ValueError:
        raise TrainingError(
            f"{name} is {variables[name]!r}, which is not a whole number.",
            hint=f"{by} sets it; do not change it.",
        ) from None


def _meeting(variables: Mapping[str, str], by: str) -> tuple[str, int]:
    """Where rank 0 waits for the others."""
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if host and port:
        return host, _number(variables, "MASTER_PORT", by)
    if by == "torchrun" or host or port:
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
        f"{by} does not tell where rank 0 is.",
        hint="Set MASTER_ADDR and MASTER_PORT to a host and a free port of rank 0.",
    )


def first_host(nodes: str) -> str:
    """The first of a list such as ``gpu[03-05,09],head``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise TrainingError(f"{nodes!r} is not a list of Slurm nodes.")
    return match[1] + (match[2] or "") + (match[3] or "")
