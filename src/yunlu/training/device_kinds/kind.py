"""What differs between kinds of devices; by default what any accelerator of torch can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.hardware.fleet import Precision


class DeviceKind:
    """Any accelerator that torch knows; a known kind overrides what it does otherwise."""

    has_pinned_memory = True
    has_groups = True
    """Whether its devices can form process groups."""
    connects_at_once = False
    """Whether its backend takes the device of a group, connects when the group is formed, and splits it."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def module(self) -> Any:
        """Torch's module of this kind, such as ``torch.xpu``."""
        return torch.get_device_module(self.name)

    def describe(self, index: int) -> str:
        """Name of a device, for people."""
        name: Callable[[int], str] | None = getattr(self.module, "get_device_name", None)
        return name(index) if name is not None else f"{self.name} {index}"

    def memory_bytes(self, index: int) -> int:
        """Free memory of a device. Asked by the process that uses it: the answer opens a context there."""
        free, _ = torch.accelerator.get_memory_info(index)
        return free

    def fast_precisions(self, index: int) -> tuple[Precision, ...]:
        """Precisions with native arithmetic; what is faster is measured."""
        return ("fp32", "bf16") if self.has_bf16(index) else ("fp32",)

    def has_bf16(self, index: int) -> bool:  # noqa: ARG002
        """Whether it computes in bfloat16 itself, without emulation."""
        ask: Callable[..., bool] | None = getattr(self.module, "is_bf16_supported", None)
        return ask() if ask is not None else torch.amp.is_autocast_available(self.name)

    def has_tf32(self, index: int) -> bool:  # noqa: ARG002
        """Whether FP32 products may take TF32."""
        return False

    def fp8_problem(self, index: int) -> str | None:  # noqa: ARG002
        """Why it cannot multiply in FP8; None if it can."""
        return f"this device is {self.name}"

    def compiler_problem(self) -> str | None:
        """Why torch.compile cannot make kernels for it; None if it can."""
        return f"no compiler for {self.name} is known."

    @property
    def profiler_activities(self) -> tuple[ProfilerActivity, ...]:
        """What a trace records of it."""
        return (ProfilerActivity.PrivateUse1,)

    def max_memory_bytes(self, device: torch.device) -> int | None:
        """Most bytes of tensors so far; None where nobody counts."""
        return torch.accelerator.max_memory_allocated(device)

    def abort(self, backend: Any) -> None:
        """End the pending collectives of a process group's backend; called by another thread."""
        for name in ("abort", "_abort"):
            end: Callable[[], object] | None = getattr(backend, name, None)
            if end is not None:
                end()
                return
