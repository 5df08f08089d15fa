"""Kinds of accelerators, without torch: how they are counted, chosen and configured by environment.

What only torch can answer is in ``training/device.py``. Each kind is named as torch names its devices;
ROCm's GPUs are torch's ``cuda``, too. Kinds that are not listed here (any PrivateUse1 device) train as
well; nothing can be counted, hidden or configured for them before torch is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SYSTEM = Path("/")
_DECLARED = re.compile(r"([a-z][a-z0-9_]*)(?::([1-9][0-9]{0,3}))?")
_INTEL, _COMPUTE_CLASSES = "0x8086", ("0x0380", "0x0302")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorKind:
    """One kind of accelerator as processes outside of torch see it."""

    name: str
    """Torch's name of the device type."""
    title: str
    count: Callable[[Path], int]
    """Number of devices, from the file system below this root: no driver is loaded for it."""
    visible: tuple[str, ...]
    """Variables that restrict a process to some devices; a later one goes before an earlier one."""
    prefixes: tuple[str, ...]
    """Beginnings of the variables that configure its libraries: workers elsewhere get them, too."""
    worker: Mapping[str, str] = field(default_factory=dict[str, str])
    """Defaults for workers: asking for devices must not load the driver, since it does not survive a
    fork; freed memory is reused whatever its size."""
    deterministic: Mapping[str, str] = field(default_factory=dict[str, str])
    """What deterministic training needs before the libraries load."""
    resource: str = "gpu"
    """What Slurm's GRES and, in capitals, Ray's resources call it."""
    renumbering: tuple[str, ...] = ()
    """Variables that hide devices below those of ``visible``, which then count the others from 0."""


def _count_nvidia(root: Path) -> int:
    return _count(root, "proc/driver/nvidia/gpus", "*")


def _count_amd(root: Path) -> int:
    """Nodes of AMD's topology that have compute units: processors are nodes, too."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    return sum(_has_compute_units(path) for path in nodes.glob("*/properties"))


def _has_compute_units(properties: Path) -> bool:
    try:
        lines = properties.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("simd_count ") and line.split()[1] != "0" for line in lines)


def _count_ascend(root: Path) -> int:
    return _count(root, "dev", "davinci[0-9]*")


def _count_intel(root: Path) -> int:
    """Intel's compute accelerators: those that drive no screen."""
    cards = (root / "sys/class/drm").glob("renderD*/device")
    return sum(
        _read(card / "vendor") == _INTEL and _read(card / "class").startswith(_COMPUTE_CLASSES)
        for card in cards
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""


def _count(root: Path, directory: str, pattern: str) -> int:
    return sum(1 for _ in (root / directory).glob(pattern))


ACCELERATORS: tuple[AcceleratorKind, ...] = (
    AcceleratorKind(
        name="cuda",
        title="NVIDIA or AMD GPU",
        count=lambda root: _count_nvidia(root) or _count_amd(root),
        visible=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        renumbering=("ROCR_VISIBLE_DEVICES",),
        prefixes=("NCCL_", "RCCL_", "PYTORCH_CUDA_", "PYTORCH_HIP_"),
        worker={
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        },
        deterministic={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    AcceleratorKind(
        name="npu",
        title="Ascend NPU",
        count=_count_ascend,
        visible=("ASCEND_RT_VISIBLE_DEVICES",),
        prefixes=("HCCL_", "ASCEND_", "TORCH_HCCL_", "PYTORCH_NPU_", "TASK_QUEUE_ENABLE"),
        worker={
            "PYTORCH_HAL_BASED_NPU_CHECK": "1",
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        },
        deterministic={"HCCL_DETERMINISTIC": "true"},
        resource="npu",
    ),
    AcceleratorKind(
        name="xpu",
        title="Intel GPU",
        count=_count_intel,
        visible=("ZE_AFFINITY_MASK",),
        prefixes=("CCL_", "ZE_", "ONEAPI_"),
    ),
)
COLLECTIVE_LIBRARIES = ("nccl", "rccl", "hccl", "xccl")
"""Names in the messages of errors that a lost worker causes."""
_PREFIXES = tuple(prefix for kind in ACCELERATORS for prefix in kind.prefixes)
_HIDING = {name for kind in ACCELERATORS for name in (*kind.visible, *kind.renumbering)}
RESOURCES = tuple(dict.fromkeys(kind.resource for kind in ACCELERATORS))
"""How schedulers call accelerators, the most usual first."""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """Accelerators that a process on this machine may use: all of one kind."""

    kind: str = "cpu"
    names: tuple[str, ...] = ()
    """What the variable of the kind calls each: a number, or an identifier that the user gave."""

    def __len__(self) -> int:
        """Number of devices."""
        return len(self.names)

    def hide_all_but(self, slots: tuple[int, ...]) -> dict[str, str]:
        """Environment of a process that gets only these, by position."""
        kind = find_kind(self.kind)
        if kind is None or not slots:
            return {}
        # Each of them: a later one, which the process may inherit, goes before an earlier one.
        return dict.fromkeys(kind.visible, ",".join(self.names[slot] for slot in slots))


def is_shared_variable(name: str) -> bool:
    """Whether workers on other machines need this variable, too: not which devices are seen here."""
    return name.startswith(_PREFIXES) and name not in _HIDING


def find_kind(name: str) -> AcceleratorKind | None:
    """A kind by torch's name for it; None for the CPU, and for kinds that are not listed."""
    return next((kind for kind in ACCELERATORS if kind.name == name), None)


def find_devices(
    environment: Mapping[str, str], *, declared: str = "", root: Path = _SYSTEM
) -> VisibleDevices:
    """The accelerators that this machine shows to a process with this environment.

    ``declared`` replaces counting (``npu:8``, or ``cpu``): some containers hide the files that count.
    """
    if declared:
        match = _DECLARED.fullmatch(declared.strip())
        if match is None:
            raise YunluError(
                f"YUNLU_ACCELERATORS is {declared!r}, not a kind of accelerator and a number.",
                hint="Set it to such as npu:8, to cpu for none, or unset it.",
            )
        name, count = match.groups(default="1")
        return VisibleDevices() if name == "cpu" else _visible(name, int(count), environment)
    for kind in ACCELERATORS:
        if count := kind.count(root):
            return _visible(kind.name, count, environment)
    return VisibleDevices()


def _visible(name: str, count: int, environment: Mapping[str, str]) -> VisibleDevices:
    kind = find_kind(name)
    names = every = tuple(map(str, range(count)))
    for variable in kind.renumbering if kind else ():
        if variable in environment:
            names = every = every[: len(_listed(environment[variable], every))]
    for variable in kind.visible if kind else ():
        if variable in environment:
            names = _listed(environment[variable], every)
    return VisibleDevices(name, names) if names else VisibleDevices()


def _listed(text: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The devices that a variable lists; drivers stop reading at the first that there is not."""
    listed: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        is_number = word.lstrip("-").isdigit()
        if not word or (is_number and word not in names):
            break
        listed.append(word)
    return tuple(listed)


def worker_defaults() -> dict[str, str]:
    """Variables that every worker starts with unless the user set them."""
    return {name: value for kind in ACCELERATORS for name, value in kind.worker.items()}


def deterministic_defaults() -> dict[str, str]:
    """Variables that deterministic training needs, for all kinds."""
    return {name: value for kind in ACCELERATORS for name, value in kind.deterministic.items()}
