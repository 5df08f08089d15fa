"""Device aliases: the names that clouds give to the same device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.hardware.catalog import Catalog

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
