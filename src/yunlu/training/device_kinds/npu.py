"""Ascend NPUs by torch_npu, which torch loads by itself and knows as ``npu``.

Not yet run on hardware: docs/ascend.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Precision


class NpuKind(DeviceKind):
    """Ascend 910 and its successors: cube units multiply in fp16 and bf16."""

    def fast_precisions(self, index: int) -> tuple[Precision, ...]:
        """Bfloat16 from the 910B on, which torch_npu answers."""
        return ("fp32", "bf16", "fp16") if self.has_bf16(index) else ("fp32", "fp16")
