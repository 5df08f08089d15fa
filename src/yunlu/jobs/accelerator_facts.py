"""What this machine says about its accelerators, without loading a driver: files, variables, packages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from yunlu.core.value import Value
from yunlu.hardware.accelerators import find_devices, find_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Maker = Literal["nvidia", "amd", "ascend", "intel"]
_ROOT = Path("/")


class DriverFacts(Value):
    """The accelerators of one maker and their driver."""

    maker: Maker
    title: str
    kind: str
    """Torch's name of the device type."""
    build: str
    """What a build of torch calls its part for them: AMD's devices are ``cuda`` in torch, too."""
    devices: int
    """Counted from the files of the driver."""
    on_bus: int = 0
    """Counted on the PCI bus, which needs no driver; 0 where graphics cards look the same."""
    version: str | None = None
    """Of the driver, where a file says it."""
    blocked: tuple[str, ...] = ()
    """Device files that this user may not read and write."""
    group: str | None = None
    """Group that owns the blocked files."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Those that restrict a process to some devices, where they are set."""
    visible: int = 0
    """Devices that these variables leave."""


class AscendFacts(Value):
    """Huawei's software above the driver."""

    torch_npu: str | None = None
    """Version of the package; None where it is not installed."""
    needs_torch: str | None = None
    """Version of torch that it is built for, such as ``2.13.0``."""
    cann_home: str | None = None
    """Where the environment says that CANN is."""
    cann: str | None = None
    """Version of that CANN."""
    scripts: tuple[str, ...] = ()
    """Scripts of installed CANNs that set the environment."""


class AcceleratorFacts(Value):
    """All accelerators of a machine, and what stands between them and torch."""

    drivers: tuple[DriverFacts, ...] = ()
    """Of the makers whose devices are there."""
    ascend: AscendFacts = AscendFacts()
    declared: str = ""
    """What ``YUNLU_ACCELERATORS`` says."""
    loads_plugins: bool = True
    """Whether torch loads packages such as torch_npu by itself."""
    torch: str | None = None
    """Version of the installed torch."""
    builds: tuple[str, ...] | None = None
    """Parts of this build of torch: ``cuda``, ``rocm``, ``npu``, ``xpu``, ``mps``; None if it could not say."""
    seen: int = 0
    """Accelerators that torch can use."""
    seen_kind: str | None = None
    """Their kind."""


@dataclass(frozen=True, slots=True)
class _Maker:
    """Where one maker's devices show in the file system."""

    name: Maker
    title: str
    kind: str
    build: str
    files: tuple[str, ...]
    """Device files that a process opens."""
    bus: tuple[str, tuple[str, ...]] | None = None
    """PCI vendor and classes of its accelerators."""
    version: tuple[str, str] | None = None
    """A file with the driver's version, and how to find it there."""


_MAKERS = (
    _Maker(
        name="nvidia",
        title="NVIDIA GPU",
        kind="cuda",
        build="cuda",
        files=("dev/nvidia[0-9]*", "dev/nvidiactl", "dev/nvidia-uvm"),
        bus=("0x10de", ("0x0300", "0x0302")),
        version=("proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+(?:\.\d+)+)"),
    ),
    _Maker(
        name="amd",
        title="AMD GPU",
        kind="cuda",
        build="rocm",
        files=("dev/kfd",),
        bus=("0x1002", ("0x1200",)),
        version=("sys/module/amdgpu/version", r"(\d+(?:\.\d+)+)"),
    ),
    _Maker(
        name="ascend",
        title="Ascend NPU",
        kind="npu",
        build="npu",
        files=("dev/davinci[0-9]*", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"),
        bus=("0x19e5", ("0x1200",)),
        version=("usr/local/Ascend/driver/version.info", r"(?m)^Version=(\S+)"),
    ),
    _Maker(name="intel", title="Intel GPU", kind="xpu", build="xpu", files=("dev/dri/renderD*",)),
)
_CANN_SCRIPTS = ("usr/local/Ascend/cann/set_env.sh", "usr/local/Ascend/ascend-toolkit/set_env.sh")
_CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


def read_accelerator_facts(
    environment: Mapping[str, str],
    *,
    declared: str = "",
    torch: str | None = None,
    builds: tuple[str, ...] | None = None,
    seen: Sequence[str] = (),
    root: Path = _ROOT,
) -> AcceleratorFacts:
    """Read what is below a root directory and in an environment; torch is asked by the caller.

    Args:
        environment: Variables of the process that would train.
        declared: What ``YUNLU_ACCELERATORS`` says.
        torch: Version of torch; that of the installed package where torch could not say.
        builds: As in ``AcceleratorFacts``.
        seen: Kind of each accelerator that torch can use.
        root: Root of the file system.
    """
    drivers = (_read_driver(maker, environment, root) for maker in _MAKERS)
    return AcceleratorFacts(
        drivers=tuple(driver for driver in drivers if driver.devices or driver.on_bus),
        ascend=_read_ascend(environment, root),
        declared=declared,
        loads_plugins=environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0",
        torch=torch or _version_of("torch"),
        builds=builds,
        seen=len(seen),
        seen_kind=seen[0] if seen else None,
    )


def _read_driver(maker: _Maker, environment: Mapping[str, str], root: Path) -> DriverFacts:
    kind = find_kind(maker.kind)
    assert kind is not None
    devices = _count(maker, root)
    files = [path for pattern in maker.files for path in sorted(root.glob(pattern))]
    blocked = [path for path in files if not os.access(path, os.R_OK | os.W_OK)] if devices else []
    variables = {name: environment[name] for name in kind.visible if name in environment}
    left = find_devices(environment, declared=f"{maker.kind}:{devices}") if devices else ()
    return DriverFacts(
        maker=maker.name,
        title=maker.title,
        kind=maker.kind,
        build=maker.build,
        devices=devices,
        on_bus=_count_on_bus(maker, root),
        version=_read_version(maker, root),
        blocked=tuple(f"/{path.relative_to(root)}" for path in blocked),
        group=_group_of(blocked[0]) if blocked else None,
        variables=variables,
        visible=len(left),
    )


def _count(maker: _Maker, root: Path) -> int:
    kind = find_kind(maker.kind)
    assert kind is not None
    if maker.name == "nvidia":  # a container shows the device files, not always the driver's
        nodes = sum(path.name[6:].isdigit() for path in root.glob("dev/nvidia[0-9]*"))
        return nodes or sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*"))
    if maker.name == "amd" and any(root.glob("proc/driver/nvidia/gpus/*")):
        return 0
    return kind.count(root)


def _count_on_bus(maker: _Maker, root: Path) -> int:
    if maker.bus is None:
        return 0
    vendor, classes = maker.bus
    return sum(
        _read(path / "vendor").strip() == vendor and _read(path / "class").startswith(classes)
        for path in root.glob("sys/bus/pci/devices/*")
    )


def _read_version(maker: _Maker, root: Path) -> str | None:
    if maker.version is None:
        return None
    file, pattern = maker.version
    match = re.search(pattern, _read(root / file))
    return match[1] if match else None


def _read_ascend(environment: Mapping[str, str], root: Path) -> AscendFacts:
    home = next((environment[name] for name in _CANN_HOMES if environment.get(name)), None)
    return AscendFacts(
        torch_npu=_version_of("torch_npu"),
        needs_torch=_needed_torch(_requirements_of("torch_npu")),
        cann_home=home,
        cann=_read_cann(root / home.lstrip("/")) if home else None,
        scripts=tuple(f"/{script}" for script in _CANN_SCRIPTS if (root / script).exists()),
    )


def _read_cann(home: Path) -> str | None:
    for file in sorted(home.glob("*/ascend_*_install.info")):
        if match := re.search(r"(?m)^version=(\S+)", _read(file)):
            return match[1]
    return None


def _needed_torch(requirements: Iterable[str]) -> str | None:
    """``2.13.0`` of ``torch==2.13.0.*``."""
    for requirement in requirements:
        if match := re.match(r"torch\s*==\s*([\d.]*\d)", requirement):
            return match[1]
    return None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements_of(package: str) -> Iterator[str]:
    try:
        yield from metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _group_of(path: Path) -> str | None:
    try:
        return path.group()
    except (OSError, KeyError):  # a group without a name, as in a container
        return None
