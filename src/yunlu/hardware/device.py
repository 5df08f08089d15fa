"""Device model: peak figures of an accelerator, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
