"""Machine and its devices. Values only."""

from __future__ import annotations

from typing import Literal

from yunlu.core.value import Value


class Device(Value):
    """One thing that computes."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    memory_bytes: int
    """What a job may use: free memory when the machine was probed."""
    fast_precisions: tuple[Literal["fp32", "tf32", "bf16", "fp16", "fp8"], ...] = ("fp32",)
    """Precisions with native arithmetic here."""


class PrecisionSpeed(Value):
    """Speed of a precision on a device."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
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
        """How many GPUs it has that torch can train on."""
        return sum(device.kind == "cuda" for device in self.devices)

    @property
    def best_device(self) -> Device:
        """An accelerator where there is one."""
        return max(self.devices, key=lambda device: device.kind != "cpu")
