"""Fleet: machines, links and nodes with their devices, and the placement of a run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from yunlu.core.value import Value


class Link(Value):
    """What carries the bytes between two workers."""

    name: str
    bytes_per_s: float
    """What one worker sends while it also receives."""
    message_s: float
    """Before the first byte: what even an empty exchange takes."""


LOOPBACK = Link(name="loopback", bytes_per_s=8e8, message_s=3e-4)
"""Two processes of one machine over TCP with gloo, measured once on two cores in a quiet moment."""

PCIE = Link(name="pcie", bytes_per_s=1.2e10, message_s=2e-5)
"""GPUs of one machine without a faster link of their own."""


Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class Device(Value):
    """One thing that computes."""

    kind: str
    """``cpu``, or torch's name of the kind of accelerator."""
    name: str
    memory_bytes: int
    """What a job may use: free memory when the machine was probed."""
    fast_precisions: tuple[Precision, ...] = ("fp32",)
    """Precisions with native arithmetic here."""


class PrecisionSpeed(Value):
    """Speed of a precision on a device."""

    precision: Precision
    relative_speed: float
    """Matrix products per second, as a multiple of fp32's."""
    is_worth_using: bool
    verdict: str
    """The same for people."""


class Machine(Value):
    """One node: its devices, cores and price."""

    hostname: str
    cores: int
    memory_bytes: int
    devices: tuple[Device, ...]
    dollars_per_hour: float | None = None

    @property
    def gpus(self) -> int:
        """How many accelerators it has that can train together."""
        return sum(device.kind not in {"cpu", "mps"} for device in self.devices)

    @property
    def best_device(self) -> Device:
        """An accelerator where there is one."""
        return max(self.devices, key=lambda device: device.kind != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with devices of one type."""

    name: str
    devices: int
    type: str = "device"
    domain: str = ""
    """What it shares a fast network with: a rack, a zone."""
    dollars_per_hour: float = 0.0
    is_spot: bool = False
    is_leaving: bool = False
    """Told to go, or not to be trusted: nothing new is put there."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices a job holds: so many on each node, in the order of its ranks."""

    shares: tuple[tuple[str, int], ...] = ()

    @property
    def devices(self) -> int:
        """How many in all."""
        return sum(count for _, count in self.shares)

    @property
    def nodes(self) -> int:
        """On how many machines."""
        return len(self.shares)

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self.shares)


NOTHING = Placement()
