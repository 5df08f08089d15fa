"""Intel GPUs. Not yet run on hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity

from yunlu.training.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Precision


class XpuKind(DeviceKind):
    """Data-centre and Arc GPUs: matrix engines multiply in bf16 and fp16."""

    def fast_precisions(self, index: int) -> tuple[Precision, ...]:
        """Both 16-bit types wherever there are matrix engines."""
        return ("fp32", "bf16", "fp16") if self.has_bf16(index) else ("fp32", "fp16")

    def has_bf16(self, index: int) -> bool:
        """Torch also answers yes where it emulates."""
        return self.module.get_device_properties(index).has_bfloat16_conversions

    def compiler_problem(self) -> str | None:
        """Inductor writes its kernels in Triton."""
        from torch.utils._triton import has_triton  # noqa: PLC0415 - slow to import

        return None if has_triton() else "Inductor needs Triton to compile for this GPU."

    @property
    def profiler_activities(self) -> tuple[ProfilerActivity, ...]:
        """Kernels and copies."""
        return (ProfilerActivity.XPU,)
