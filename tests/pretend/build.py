"""Build the pretend accelerator once, and run programs on it.

A program finds it by its environment alone: `environment` puts the built folder on PYTHONPATH, and torch
loads it when it is imported, there and in all processes that inherit the environment. The process of the
tests itself never loads it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".pytest_cache" / "yunlu" / "pretend"
# Most of the time goes into torch's headers: in one unit they are read once. -O1 takes 34 s of CPU where -O0
# takes 28, and a small kernel then takes 6 us where it took 44.
UNIT = HERE / "device" / "pretend.cpp"
FLAGS = (
    *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wno-interference-size"),
    *("-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
)


def why_not() -> str:
    """Say why it cannot be built here; nothing if it can."""
    if not sys.platform.startswith("linux"):
        return "the pretend accelerator needs Linux"
    if shutil.which("g++") is None:
        return "the pretend accelerator needs a C++ compiler (g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the pretend accelerator needs Python's headers"
    return ""


def digest_of(folder: Path) -> str:
    """Name a version of the sources in a folder, with the compiler's flags and the torch they meet."""
    used = (FLAGS, importlib.metadata.version("torch"), sys.version)
    digest = hashlib.sha256(repr(used).encode())
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if "__pycache__" not in file.parts:
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def build() -> Path:
    """Return the folder to put on PYTHONPATH. Processes that come together build it once."""
    compiled = CACHE / f"device-{digest_of(HERE / 'device')}.so"
    built = CACHE / f"{compiled.stem}-{digest_of(HERE / 'package')}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            for old in CACHE.iterdir():
                if old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
                elif old.suffix == ".so" and old != compiled:
                    old.unlink()
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                made = Path(folder, "made")
                shutil.copytree(
                    HERE / "package", made, ignore=shutil.ignore_patterns("__pycache__")
                )
                if not compiled.exists():
                    compile_device(Path(folder, "device.so"))
                    Path(folder, "device.so").rename(compiled)
                shutil.copy(compiled, made / "pretend_accelerator" / "_device.so")
                made.rename(built)
    return built


def compile_device(target: Path) -> None:
    """Compile the C++ part, with the headers and libraries of the torch that is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    headers = (torch / "include", torch / "include/torch/csrc/api/include")
    included = [f"-isystem{path}" for path in (*headers, sysconfig.get_path("include"))]
    libraries = [f"-l{name}" for name in ("torch_python", "torch_cpu", "torch", "c10")]
    linked = ["-shared", "-s", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", *libraries]
    compiler = ["g++", *FLAGS, *included, str(UNIT), "-o", str(target), *linked]
    made = subprocess.run(compiler, capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"the pretend accelerator does not compile:\n{made.stderr[-5000:]}"


def environment(
    *, devices: int = 2, memory: int = 1 << 30, name: str = "npu", **settings: str
) -> dict[str, str]:
    """Return the environment of a program on pretend devices; settings are as PRETEND_RACES="warn"."""
    path = [str(build()), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PRETEND_")},
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
        "PRETEND_NAME": name,
        "PRETEND_DEVICES": str(devices),
        "PRETEND_MEMORY": str(memory),
        **settings,
    }


def run_on_pretend(
    program: str | Sequence[str | Path],
    *,
    devices: int = 2,
    memory: int = 1 << 30,
    name: str = "npu",
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on pretend devices: Python code, or the arguments of the interpreter."""
    arguments = ["-c", program] if isinstance(program, str) else [str(part) for part in program]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment(devices=devices, memory=memory, name=name, **settings), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
