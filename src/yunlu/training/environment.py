"""Environment of a run: machine, packages, code, for reproduction."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu import __version__
from yunlu.core.secrets import mask

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Machine

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "datasets",
    "keras",
    "scikit-learn",
    "pyarrow",
    "pillow",
    "soundfile",
    "pytorch-optimizer",
    "tensorboard",
    "wandb",
    "mlflow",
    "fsspec",
    "s3fs",
    "pydantic",
)
"""Packages whose version can change what a run computes or where it logs."""

_GIT_TIMEOUT_S = 5.0


def describe_environment(machine: Machine) -> dict[str, Any]:
    """Data of the environment event. Never environment variables, never credentials."""
    commit, dirty = read_git(Path.cwd())
    return {
        "yunlu": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": machine.hostname,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "devices": [device.model_dump(mode="json") for device in machine.devices],
        "packages": package_versions(),
        "git_commit": commit,
        "git_dirty": dirty,
        "argv": [mask(argument) for argument in sys.argv],
    }


def package_versions() -> dict[str, str]:
    """Versions of the installed packages in ``PACKAGES``, from metadata, without importing them."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def read_git(directory: Path) -> tuple[str | None, bool | None]:
    """Commit of the directory and whether tracked files differ from it; None where unknown."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    # Untracked files are left out: counting them can take minutes beside a large data set.
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        completed = subprocess.run(  # noqa: S603 (fixed arguments, no shell)
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
