"""Apple's GPUs: one device that shares the memory of the machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from yunlu.training.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

    from yunlu.hardware.fleet import Precision


class MpsKind(DeviceKind):
    """Metal performance shaders."""

    has_pinned_memory = False
    has_groups = False

    def describe(self, index: int) -> str:  # noqa: ARG002
        """Name of the machine's chip."""
        return platform.processor() or "Apple"

    def memory_bytes(self, index: int) -> int:  # noqa: ARG002
        """What Metal recommends to use at most."""
        return torch.mps.recommended_max_memory()

    def fast_precisions(self, index: int) -> tuple[Precision, ...]:
        """As Metal has them."""
        return ("fp32", "bf16", "fp16") if self.has_bf16(index) else ("fp32", "fp16")

    def has_bf16(self, index: int) -> bool:  # noqa: ARG002
        """From macOS 14 on."""
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def compiler_problem(self) -> str | None:
        """Inductor writes Metal kernels."""
        return None

    @property
    def profiler_activities(self) -> tuple[ProfilerActivity, ...]:
        """Only the CPU's part can be traced."""
        return ()

    def max_memory_bytes(self, device: torch.device) -> int | None:  # noqa: ARG002
        """Metal does not keep the maximum."""
        return None
