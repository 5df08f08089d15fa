"""``yunlu doctor``: what this machine has, what it lacks, and the command that mends it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from yunlu import __version__
from yunlu.core.settings import read_settings, worker_environment
from yunlu.core.units import show_bytes

INSTALL_TORCH = 'pip install "yunlu[train]"'
_PROBE_TIMEOUT_S = 300


def doctor(*, json_: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """Tell what this machine has and what is missing.

    Exits with 0 if it can train, with 1 if not.

    Args:
        json_: Print the findings as JSON.
    """
    if json_:
        findings = examine()
        print(json.dumps(findings, ensure_ascii=False, indent=2))
    else:
        console = Console(highlight=False)
        with console.status("measuring this machine ..."):
            findings = examine()
        console.print(_page(findings))
    return 0 if findings["can_train"] else 1


def examine() -> dict[str, Any]:
    """Everything found, as plain values."""
    probed = _probe()
    store = examine_store(read_settings().home)
    advice = _advice(probed, store)
    return {
        "yunlu": __version__,
        "python": sys.version.split()[0],
        **probed,
        "store": store,
        "parts": [asdict(part) for part in find_parts()],
        "can_train": not advice,
        "advice": advice,
    }


def _probe() -> dict[str, Any]:
    """Ask the training room, in a process of its own: torch takes seconds and may be absent."""
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
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (str(error.stderr).strip().splitlines() or ["no message"])[-1]
        problem = f"cannot be used: {last}"
    except subprocess.TimeoutExpired:
        problem = f"did not answer within {_PROBE_TIMEOUT_S} s"
    return {"machine": None, "torch": {"version": None, "problem": problem}}


def examine_store(home: Path) -> dict[str, Any]:
    """Where runs live: whether they can be written, and the room there is."""
    ground = next(folder for folder in (home, *home.parents) if folder.exists())
    problem = None
    try:
        # Only writing proves it: permissions say nothing of full disks and read-only mounts.
        with tempfile.NamedTemporaryFile(dir=ground, prefix=".yunlu-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        problem = error.strerror or str(error)
    return {
        "path": str(home),
        "exists": home.exists(),
        "problem": problem,
        "free_bytes": shutil.disk_usage(ground).free,
    }


def _advice(probed: dict[str, Any], store: dict[str, Any]) -> list[str]:
    """What must be mended before this machine can train; empty when it can."""
    advice: list[str] = []
    if probed["torch"]["version"] is None:
        advice.append(f"torch {probed['torch']['problem']}. Install it: {INSTALL_TORCH}")
    if store["problem"]:
        advice.append(
            f"{store['path']} cannot be written: {store['problem']}. "
            "Name another directory: export YUNLU_HOME=DIRECTORY"
        )
    return advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something optional that is or is not here."""

    name: str
    purpose: str
    version: str | None
    install: str


def find_parts() -> list[Part]:
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


def _package(name: str, extra: str, purpose: str) -> Part:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    return Part(
        name=name, purpose=purpose, version=version, install=f'pip install "yunlu[{extra}]"'
    )


def _program(name: str, commands: tuple[str, ...], purpose: str) -> Part:
    found = next((path for command in commands if (path := shutil.which(command))), None)
    version = _version_of(found) if found else None
    return Part(name=name, purpose=purpose, version=version, install=_system_install(name))


def _version_of(program: str) -> str:
    """What the program calls its version."""
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


def _page(findings: dict[str, Any]) -> RenderableType:
    """The findings for people: from what is here to what is missing."""
    sections = [_title(findings), *_section("Machine", _machine(findings))]
    if findings["machine"] is not None:
        sections += _section("Devices", _devices(findings["machine"]["devices"]))
    if "measured" in findings:
        measured = findings["measured"]
        title = f"Precisions on {measured['device']}, speed beside fp32"
        sections += _section(title, _precisions(measured["precisions"]))
    sections += _section("Optional parts", _parts(findings["parts"]))
    return Group(*sections, _ending(findings), "")


def _title(findings: dict[str, Any]) -> Text:
    versions = [f"Python {findings['python']}"]
    if findings["torch"]["version"]:
        versions.append(f"torch {findings['torch']['version']}")
    return Text.assemble(
        "\n",
        ("云炉 Yunlu ", "bold"),
        (findings["yunlu"], "bold"),
        "  ",
        (" · ".join(versions), "dim"),
    )


def _section(title: str, table: Table) -> list[RenderableType]:
    return [Text(f"\n{title}", style="bold cyan"), Padding(table, (0, 0, 0, 2))]


def _machine(findings: dict[str, Any]) -> Table:
    table, machine, store = _table(), findings["machine"], findings["store"]
    if machine is not None:
        free = max(
            device["memory_bytes"] for device in machine["devices"] if device["kind"] == "cpu"
        )
        price = machine["dollars_per_hour"]
        table.add_row("host", machine["hostname"])
        table.add_row("cores", str(machine["cores"]))
        table.add_row("memory", f"{show_bytes(machine['memory_bytes'])}, {show_bytes(free)} free")
        table.add_row("price", f"{price} USD/h" if price is not None else _NO_PRICE)
    table.add_row("runs", Text(store["path"], overflow="fold"))
    table.add_row("disk", Text(f"{show_bytes(store['free_bytes'])} free, ") + _writable(store))
    return table


_NO_PRICE = "not set; YUNLU_DOLLARS_PER_HOUR puts a cost in every plan"


def _writable(store: dict[str, Any]) -> Text:
    if store["problem"]:
        return Text(f"not writable: {store['problem']}", style="red")
    return Text("writable")


def _devices(devices: list[dict[str, Any]]) -> Table:
    table = _table()
    for device in devices:
        fast = ", ".join(device["fast_precisions"])
        memory = f"{show_bytes(device['memory_bytes'])} free"
        table.add_row(device["kind"], Text(device["name"]), memory, f"computes in {fast}")
    return table


def _precisions(speeds: list[dict[str, Any]]) -> Table:
    table = _table(columns=5)
    fastest = max(speed["relative_speed"] for speed in speeds)
    for speed in speeds:
        good = speed["is_worth_using"]
        bar = Bar(fastest, 0, speed["relative_speed"], width=16, color="green" if good else "red")
        times = f"{speed['relative_speed']:.2f}×"
        table.add_row(_mark(good), speed["precision"], bar, times, speed["verdict"])
    return table


def _parts(parts: list[dict[str, Any]]) -> Table:
    table = _table(columns=4)
    for part in parts:
        here = part["version"] is not None
        purpose = Text(part["purpose"])
        if not here:
            purpose.append(f"\n→ {part['install']}", style="yellow")
        table.add_row(_mark(here, absent="–"), part["name"], part["version"] or "", purpose)
    return table


def _ending(findings: dict[str, Any]) -> Text:
    if findings["can_train"]:
        return Text.assemble(
            ("\n✓ This machine can train.", "bold green"),
            ("  Begin with `yunlu init`, or `yunlu train JOB.yaml`.", "dim"),
        )
    text = Text("\n✗ This machine cannot train yet.", style="bold red")
    for advice in findings["advice"]:
        text.append(f"\n  → {advice}", style="not bold yellow")
    return text


def _mark(good: bool, *, absent: str = "✗") -> Text:
    return Text("✓", style="green") if good else Text(absent, style="yellow")


def _table(columns: int = 0) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for position in range(columns):
        table.add_column(no_wrap=position < columns - 1, overflow="fold")
    return table
