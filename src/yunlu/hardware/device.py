"""Device model: peak figures of an accelerator, each with its source, and the names clouds give it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from yunlu.hardware.catalog import Catalog

Kind = Literal["cuda", "rocm", "tpu", "neuron", "gaudi", "ascend", "cpu", "mps"]
KINDS: tuple[Kind, ...] = ("cuda", "rocm", "tpu", "neuron", "gaudi", "ascend", "cpu", "mps")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One kind of device. Rates are peaks, per device; never with sparsity."""

    name: str
    kind: Kind
    memory_bytes: int
    """What the driver reports, not what the name says."""
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """Dense matrix products, FLOP/s by precision; what the device cannot do is absent."""
    link_bytes_per_s: float
    """To the other devices of its node together, one direction."""
    node_devices: int
    """How many usually share a node."""
    fabric_devices: int
    """How many that link joins; more than a node where it leaves the node (NVL72, TPU pods)."""
    network_bytes_per_s: float
    """To other nodes (of other fabrics), one direction, its share of the node's usual network."""
    reachable: float | None = None
    """Share of the bf16 peak measured in large matrix products."""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where each figure comes from, by field name; ``peak_flops.bf16`` before ``peak_flops``."""

    def source(self, name: str) -> str:
        """Where one figure comes from."""
        return self.sources.get(name) or self.sources.get(name.split(".", 1)[0], "")

    @property
    def names(self) -> tuple[str, ...]:
        """All it answers to."""
        return (self.name, *self.aliases)

    @property
    def leaves_node(self) -> bool:
        """Whether its fast link joins devices of several nodes."""
        return self.fabric_devices > self.node_devices


def read_devices(
    figures: Iterable[Mapping[str, str]], sources: Iterable[Mapping[str, str]]
) -> list[DeviceModel]:
    """Devices from the rows of ``devices.csv`` and ``sources.csv``."""
    result: dict[str, dict[str, str]] = {}
    for row in sources:
        result.setdefault(row["device"], {})[row["field"]] = row["source"]
    return [_read_device(row, result.get(row["name"], {})) for row in figures]


def _read_device(row: Mapping[str, str], sources: dict[str, str]) -> DeviceModel:
    return DeviceModel(
        name=row["name"],
        kind=cast("Kind", row["kind"]),
        memory_bytes=int(row["memory_mib"]) * MIB,
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        peak_flops={
            precision: float(row[f"{precision}_tflops"]) * 1e12
            for precision in PRECISIONS
            if row[f"{precision}_tflops"]
        },
        link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
        node_devices=int(row["node_devices"]),
        fabric_devices=int(row["fabric_devices"]),
        network_bytes_per_s=float(row["network_gb_per_s"]) * 1e9,
        reachable=float(row["reachable"]) if row["reachable"] else None,
        aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
        sources=sources,
    )


_BY_MEMORY = {
    "V100": {16: "V100-16GB", 32: "V100-32GB"},
    "A100": {40: "A100-40GB", 80: "A100-80GB"},
    # Three generations of one name: Turing, Ada, Blackwell.
    "RTX6000": {24: "Quadro-RTX6000", 48: "RTX6000-Ada", 96: "RTXPRO6000"},
    "H100": {80: "H100", 94: "H100-NVL"},
}
_CARDS = {
    "A100-40GB": "A100-40GB-PCIe",
    "A100-80GB": "A100-80GB-PCIe",
    "H100": "H100-PCIe",
}
# Clouds whose plain "A100" and "H100" are cards, and markets that do not say (cards are the
# cautious answer: the same arithmetic or less, a slower link).
_CARD_CLOUDS = {"runpod", "ovhcloud", "scaleway", "seeweb", "primeintellect", "shadeform"}
_CARD_INSTANCES = (
    ("azure", re.compile(r"Standard_NC\d+ads_A100_v4")),
    ("lambda", re.compile(r"gpu_[124]x_a100$")),
)
_NVL_INSTANCES = (("azure", re.compile(r"Standard_NC\d+adi?s_H100_v5")),)
_SUMS_MEMORY = {"vast", "primeintellect"}
"""They tell the memory of all devices together."""
_TPU = re.compile(r"tpu-(v\w+?)(?:litepod)?-(\d+)$")
_CORES_EACH = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5": 1, "v6e": 1}
"""In how many parts a chip is counted in the name of a slice."""


def name_device(
    catalog: Catalog,
    *,
    cloud: str,
    instance: str,
    accelerator: str,
    count: float,
    memory_mib: float | None = None,
) -> str | None:
    """The name in the catalog; None for what it does not know (parts of a GPU, graphics, FPGAs)."""
    if "MIG" in accelerator:
        return None
    memory_gb = _memory_gb(cloud, count, memory_mib)
    choices = _BY_MEMORY.get(accelerator.upper())
    if choices and memory_gb is not None:
        size = min(choices, key=lambda known: abs(known - memory_gb))
        name: str | None = choices[size]
    else:
        name = catalog.device(accelerator).name if catalog.has_device(accelerator) else None
    return _form(name, cloud=cloud, instance=instance, accelerator=accelerator)


def split_slice(accelerator: str) -> tuple[str, int] | None:
    """``tpu-v5p-16`` → ``("TPU-v5p", 8)``: the device, and chips; None for what is no TPU."""
    match = _TPU.match(accelerator)
    if not match:
        return None
    version, parts = match[1], int(match[2])
    name = "TPU-v5e" if "litepod" in accelerator else f"TPU-{version}"
    return name, max(1, parts // _CORES_EACH.get(version, 1))


def _memory_gb(cloud: str, count: float, memory_mib: float | None) -> float | None:
    if not memory_mib:
        return None
    # RunPod and Shadeform write gigabytes where MiB belong.
    memory_gb = memory_mib if memory_mib < 1024 else memory_mib / 1024
    return memory_gb / count if cloud in _SUMS_MEMORY else memory_gb


def _form(name: str | None, *, cloud: str, instance: str, accelerator: str) -> str | None:
    """The card or the module: prices tell them apart by the instance's name only."""
    if name not in _CARDS:
        return name
    result = f"{instance} {accelerator}".lower()
    if name == "H100" and (
        re.search(r"nvl(?!ink)", result) or _matches(_NVL_INSTANCES, cloud, instance)
    ):
        return "H100-NVL"
    if "pcie" in result or _matches(_CARD_INSTANCES, cloud, instance):
        return _CARDS[name]
    if cloud in _CARD_CLOUDS and "sxm" not in result and "nvlink" not in result:
        return _CARDS[name]
    return name


def _matches(table: tuple[tuple[str, re.Pattern[str]], ...], cloud: str, instance: str) -> bool:
    return any(cloud == known and pattern.match(instance) for known, pattern in table)
