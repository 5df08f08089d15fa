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
from yunlu.core.settings import read_accelerators, read_settings, worker_environment
from yunlu.core.value import Value
from yunlu.hardware.fleet import Machine, PrecisionSpeed
from yunlu.jobs.accelerator_facts import AcceleratorFacts, read_accelerator_facts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.jobs.accelerator_facts import DriverFacts

INSTALL_TORCH = 'pip install "yunlu[train]"'
_PROBE_TIMEOUT_S = 300


class TorchState(Value):
    """Whether torch can be used."""

    version: str | None
    problem: str | None = None
    builds: tuple[str, ...] = ()
    """Kinds of accelerators that it was built for: ``cuda``, ``rocm``, ``npu``, ``xpu``, ``mps``."""


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


class AcceleratorProblem(Value):
    """Why accelerators of this machine cannot train, and what to do."""

    title: str
    """Which ones: ``Ascend NPU``."""
    problem: str
    advice: str


class MachineFindings(_Probed):
    """Result of ``yunlu doctor``."""

    yunlu: str
    python: str
    store: StoreState
    accelerators: AcceleratorFacts
    accelerator_problems: tuple[AcceleratorProblem, ...] = ()
    parts: tuple[OptionalPart, ...]
    can_train: bool
    advice: tuple[str, ...]
    """What to fix before this machine can train; empty where it can."""


def examine_machine() -> MachineFindings:
    """Examine this machine; takes some seconds."""
    probed = _probe()
    store = examine_store(read_settings().home)
    accelerators = _read_accelerators(probed)
    problems = tuple(find_accelerator_problems(accelerators))
    advice = list_advice(probed.torch, store, problems)
    return MachineFindings(
        yunlu=__version__,
        python=sys.version.split()[0],
        **dict(probed),
        store=store,
        accelerators=accelerators,
        accelerator_problems=problems,
        parts=tuple(find_parts()),
        can_train=not advice,
        advice=advice,
    )


def _read_accelerators(probed: _Probed) -> AcceleratorFacts:
    declared, environment = read_accelerators()
    torch, machine = probed.torch, probed.machine
    kinds = [device.kind for device in machine.devices] if machine else []
    return read_accelerator_facts(
        environment,
        declared=declared,
        torch=torch.version,
        builds=None if torch.version is None else torch.builds,
        seen=[kind for kind in kinds if kind != "cpu"],
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


def list_advice(
    torch: TorchState, store: StoreState, problems: tuple[AcceleratorProblem, ...] = ()
) -> tuple[str, ...]:
    """What to fix before this machine can train."""
    advice: list[str] = []
    if torch.version is None:
        # A plug-in that cannot be loaded takes torch with it: installing torch again cures nothing.
        cure = problems[0].advice if problems else f"Install it: {INSTALL_TORCH}"
        advice.append(f"torch {torch.problem}. {cure}")
    if store.problem:
        advice.append(
            f"{store.path} cannot be written: {store.problem}. "
            "Name another directory: export YUNLU_HOME=DIRECTORY"
        )
    return tuple(advice)


def find_accelerator_problems(facts: AcceleratorFacts) -> Iterator[AcceleratorProblem]:
    """Why accelerators of this machine cannot train: what to do first comes first."""
    for driver in facts.drivers:
        if facts.seen and facts.seen_kind != driver.kind:
            continue  # torch drives one kind at a time, and here another one
        problems = [
            *_driver_problems(driver),
            *_hidden(driver, facts),
            *_missing_software(driver, facts),
        ]
        if not problems and facts.builds is not None and facts.seen < driver.visible:
            cause = "The driver may be too old for this build of torch, or a device broken"
            cure = f"{cause}: {_STATUS_PROGRAMS[driver.maker]} tells."
            problems.append((f"torch can use {facts.seen} of {driver.visible}.", cure))
        for problem, advice in problems:
            yield AcceleratorProblem(title=driver.title, problem=problem, advice=advice)


_STATUS_PROGRAMS = {
    "nvidia": "nvidia-smi",
    "amd": "rocm-smi",
    "ascend": "npu-smi info",
    "intel": "xpu-smi discovery",
}
_GUIDE = "(https://pytorch.org/get-started names the index of each build)"
_INSTALL_BUILDS = {
    "cuda": "pip install --force-reinstall torch (on Linux, PyPI's build is for CUDA)",
    "rocm": f"install torch's build for ROCm {_GUIDE}",
    "xpu": f"install torch's build for XPU {_GUIDE}",
}
_DIGITS = re.compile(r"\d+(,\d+)*")


def _driver_problems(driver: DriverFacts) -> Iterator[tuple[str, str]]:
    if not driver.devices:
        yield (
            f"{driver.on_bus} on the PCI bus, but their driver is not loaded.",
            "Install the driver, or load its kernel module; in a container, pass the devices on.",
        )
    elif driver.blocked:
        first, *others = driver.blocked
        more = f" and {len(others)} more files" if others else ""
        named = driver.group not in {None, "root"}
        group = f"sudo usermod -aG {driver.group} $USER, then log in again" if named else ""
        yield (
            f"you may not open {first}{more}.",
            f"{group or 'Ask the administrator for access'}; in a container, pass the devices on.",
        )


def _hidden(driver: DriverFacts, facts: AcceleratorFacts) -> Iterator[tuple[str, str]]:
    if not driver.devices:
        return
    if facts.declared.strip() == "cpu":
        yield "YUNLU_ACCELERATORS=cpu says not to use any.", "unset YUNLU_ACCELERATORS"
    settings = " ".join(f"{name}={value!r}" for name, value in driver.variables.items())
    if not driver.visible:
        names = " ".join(driver.variables)
        yield f"{settings} hides all {driver.devices} of them.", f"unset {names}"
        return
    for name, value in driver.variables.items():
        if driver.maker == "ascend" and not _DIGITS.fullmatch(value):
            reads = f"{name} is {value!r}: the driver stops reading at the first other sign."
            yield reads, f"Write numbers and commas only, in ascending order: export {name}=0,1"


def _missing_software(driver: DriverFacts, facts: AcceleratorFacts) -> Iterator[tuple[str, str]]:
    if driver.maker == "ascend":
        yield from _missing_for_ascend(facts)
    elif facts.builds is not None and driver.build not in facts.builds:
        yield (
            f"torch {facts.torch} is built without {driver.build}.",
            _INSTALL_BUILDS[driver.build],
        )


def _missing_for_ascend(facts: AcceleratorFacts) -> Iterator[tuple[str, str]]:
    ascend = facts.ascend
    torch = re.match(r"[\d.]*\d", facts.torch or "")
    version = torch.group() if torch else None
    if version is not None and {"cuda", "rocm"} & set(facts.builds or ()):
        yield (
            f"torch {facts.torch} is a build for other accelerators, beside which torch_npu refuses to load.",
            f"Install the CPU build of torch {version} {_GUIDE}.",
        )
    if ascend.torch_npu is None:
        yield "torch_npu is not installed.", f"pip install torch_npu=={version or '2.13.0'}"
    elif version is not None and ascend.needs_torch not in {None, version}:
        yield (
            f"torch_npu {ascend.torch_npu} is for torch {ascend.needs_torch}, here is {facts.torch}.",
            f"pip install torch_npu=={version}",
        )
    if ascend.cann_home is None and ascend.scripts:
        yield (
            "CANN is installed, but not in this environment: ASCEND_HOME_PATH is not set.",
            f"source {ascend.scripts[0]}",
        )
    elif ascend.cann_home is None:
        yield (
            "CANN was not found: ASCEND_HOME_PATH is not set.",
            "Install CANN (docs/ascend.md has the versions), then source its set_env.sh.",
        )
    if not facts.loads_plugins:
        yield (
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu.",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )


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
