"""State of this machine: what is installed, what is missing, and the command that installs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import TYPE_CHECKING

from yunlu import __version__
from yunlu.core.errors import StoreError
from yunlu.core.files import check_home
from yunlu.core.limits import decode_json
from yunlu.core.settings import read_settings, worker_environment
from yunlu.core.value import Value
from yunlu.hardware.fleet import Machine, PrecisionSpeed

if TYPE_CHECKING:
    from pathlib import Path

INSTALL_TORCH = 'pip install "yunlu[train]"'
_PROBE_TIMEOUT_S = 300


class TorchState(Value):
    """Whether torch can be used."""

    version: str | None
    problem: str | None = None


class DeviceSpeeds(Value):
    """Measured speed of each precision on the best device."""

    device: str
    precisions: tuple[PrecisionSpeed, ...]


class StoreState(Value):
    """The directory of all runs: whether it can be written, and its free space."""

    path: str
    exists: bool
    problem: str | None
    free_bytes: int


class OptionalPart(Value):
    """An optional package or program."""

    name: str
    purpose: str
    version: str | None
    """None where it is not installed."""
    install: str
    """The command that installs it."""


class _Probed(Value):
    """Output of the probing process."""

    machine: Machine | None
    torch: TorchState
    measured: DeviceSpeeds | None = None


class MachineFindings(_Probed):
    """Result of ``yunlu doctor``."""

    yunlu: str
    python: str
    store: StoreState
    parts: tuple[OptionalPart, ...]
    can_train: bool
    advice: tuple[str, ...]
    """What to fix before this machine can train; empty where it can."""


def examine_machine() -> MachineFindings:
    """Examine this machine; takes some seconds."""
    probed = _probe()
    store = examine_store(read_settings().home)
    advice = list_advice(probed.torch, store)
    return MachineFindings(
        yunlu=__version__,
        python=sys.version.split()[0],
        **dict(probed),
        store=store,
        parts=tuple(find_parts()),
        can_train=not advice,
        advice=advice,
    )


def _probe() -> _Probed:
    """Probe in a separate process: importing torch takes seconds and may fail."""
    command = [sys.executable, "-m", "yunlu.training.probe", "--measure"]
    try:
        done = subprocess.run(  # noqa: S603 (our own module)
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=worker_environment(),
            check=True,
        )
        return _Probed.model_validate(decode_json(done.stdout))
    except subprocess.CalledProcessError as error:
        last = (str(error.stderr).strip().splitlines() or ["no message"])[-1]
        problem = f"cannot be used: {last}"
    except subprocess.TimeoutExpired:
        problem = f"did not answer within {_PROBE_TIMEOUT_S} s"
    return _Probed(machine=None, torch=TorchState(version=None, problem=problem))


def examine_store(home: Path) -> StoreState:
    """Whether runs can be written, and the free space."""
    ground = next(folder for folder in (home, *home.parents) if folder.exists())
    problem = None
    try:
        check_home(home)
        # Only writing proves it: permissions do not show full disks and read-only mounts.
        with tempfile.NamedTemporaryFile(dir=ground, prefix=".yunlu-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        problem = error.strerror or str(error)
    except StoreError as error:
        problem = str(error)
    return StoreState(
        path=str(home),
        exists=home.exists(),
        problem=problem,
        free_bytes=shutil.disk_usage(ground).free,
    )


def list_advice(torch: TorchState, store: StoreState) -> tuple[str, ...]:
    """What to fix before this machine can train."""
    advice: list[str] = []
    if torch.version is None:
        advice.append(f"torch {torch.problem}. Install it: {INSTALL_TORCH}")
    if store.problem:
        advice.append(
            f"{store.path} cannot be written: {store.problem}. "
            "Name another directory: export YUNLU_HOME=DIRECTORY"
        )
    return tuple(advice)


def find_parts() -> list[OptionalPart]:
    """The optional packages and programs."""
    return [_package(*row) for row in _PACKAGES] + [_program(*row) for row in _PROGRAMS]


_PACKAGES = (
    ("transformers", "hf", "Hugging Face models"),
    ("datasets", "hf", "Hugging Face data sets"),
    ("keras", "keras", "Keras 3 models on torch"),
    ("pytorch-optimizer", "optimizers", "the optimisers LAMB and LARS"),
    ("tensorboard", "train", "curves in TensorBoard"),
    ("wandb", "wandb", "curves in Weights & Biases"),
    ("mlflow", "mlflow", "curves in MLflow"),
    ("s3fs", "s3", "data on S3 and its likes"),
)
_PROGRAMS = (
    ("C++ compiler", ("c++", "g++", "clang++"), "faster models with torch.compile"),
    ("git", ("git",), "the commit of your code in each report"),
    ("espeak-ng", ("espeak-ng",), "the made data of the speech examples"),
)
_INSTALLERS = {"apt-get": "install", "dnf": "install", "pacman": "-S", "brew": "install"}
_COMPILERS = {"apt-get": "g++", "dnf": "gcc-c++", "pacman": "gcc", "brew": "gcc"}


def _package(name: str, extra: str, purpose: str) -> OptionalPart:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    return OptionalPart(
        name=name, purpose=purpose, version=version, install=f'pip install "yunlu[{extra}]"'
    )


def _program(name: str, commands: tuple[str, ...], purpose: str) -> OptionalPart:
    path = next((path for command in commands if (path := shutil.which(command))), None)
    version = _version_of(path) if path else None
    return OptionalPart(name=name, purpose=purpose, version=version, install=_system_install(name))


def _version_of(program: str) -> str:
    """The version that the program prints."""
    try:
        done = subprocess.run(  # noqa: S603 (a program from our own table)
            [program, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "found"
    version = re.search(r"\d+(\.\d+)+", done.stdout)
    return version.group() if version else "found"


def _system_install(program: str) -> str:
    tool = next((tool for tool in _INSTALLERS if shutil.which(tool)), None)
    if tool is None:
        return f"install {program} with your system's packages"
    package = _COMPILERS[tool] if program == "C++ compiler" else program
    # Homebrew refuses to run as root, and root needs no sudo.
    sudo = "" if tool == "brew" or os.geteuid() == 0 else "sudo "
    return f"{sudo}{tool} {_INSTALLERS[tool]} {package}"
