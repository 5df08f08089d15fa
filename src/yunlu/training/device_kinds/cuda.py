"""CUDA: NVIDIA's GPUs, and AMD's by ROCm, which torch calls by the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity

from yunlu.training.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Precision

_AMD_WITH_FP8 = ("gfx94", "gfx95")


class CudaKind(DeviceKind):
    """NVIDIA and AMD GPUs."""

    @property
    def connects_at_once(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - asked once
        """NCCL does; nobody has told us of RCCL."""
        return not _is_amd()

    def fast_precisions(self, index: int) -> tuple[Precision, ...]:
        """Tensor cores: fp16 from Volta (7.0) on, tf32 and bf16 from Ampere (8.0), fp8 from Ada (8.9)."""
        version = torch.cuda.get_device_capability(index)
        has: dict[Precision, bool] = {
            "fp32": True,
            "tf32": self.has_tf32(index),
            "bf16": self.has_bf16(index),
            "fp16": _is_amd() or version >= (7, 0),
            "fp8": self.fp8_problem(index) is None,
        }
        return tuple(name for name, is_there in has.items() if is_there)

    def describe(self, index: int) -> str:
        """Name of a device, for people."""
        return torch.cuda.get_device_name(index)

    def has_bf16(self, index: int) -> bool:
        """Torch also answers yes where it emulates (Volta, Turing)."""
        return _is_amd() or torch.cuda.get_device_capability(index) >= (8, 0)

    def has_tf32(self, index: int) -> bool:
        """From Ampere on."""
        return not _is_amd() and torch.cuda.get_device_capability(index) >= (8, 0)

    def fp8_problem(self, index: int) -> str | None:
        """From Ada, or MI300, on."""
        if _is_amd():
            name: str = torch.cuda.get_device_properties(index).gcnArchName
            return None if name.startswith(_AMD_WITH_FP8) else f"this one is {name}"
        major, minor = torch.cuda.get_device_capability(index)
        return None if (major, minor) >= (8, 9) else f"this one has {major}.{minor}"

    def compiler_problem(self) -> str | None:
        """Inductor writes its kernels in Triton."""
        from torch.utils._triton import has_triton  # noqa: PLC0415 - slow to import

        return None if has_triton() else "Inductor needs Triton to compile for this GPU."

    @property
    def profiler_activities(self) -> tuple[ProfilerActivity, ...]:
        """Kernels and copies by CUPTI or roctracer."""
        return (ProfilerActivity.CUDA,)


def _is_amd() -> bool:
    return torch.version.hip is not None
