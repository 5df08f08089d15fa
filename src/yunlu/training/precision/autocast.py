"""Mixed precision of a run: autocast, loss scaling, adaptive precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from yunlu.training.precision.adaptive import Adaptive, PrecisionChange
from yunlu.training.precision.modules import check_precision, keep_in_fp32
from yunlu.training.precision.policy import LossScale

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor, nn
    from torch.optim import Optimizer

# FP8 applies to converted products only; everything else runs in BF16.
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


_NOTHING = nullcontext()


class Precision:
    """Weights stay in FP32; autocast lowers the arithmetic; FP16 gradients are scaled.

    With ``adapt``, modules whose values exceed the range of BF16 or FP16 compute in FP32.
    """

    def __init__(self, name: str, device: torch.device, *, adapt: bool = False) -> None:
        check_precision(name, device)
        self.name, self.device = name, device
        self._type = _TYPES.get(name)
        self._scale = LossScale(device) if name == "fp16" else None
        self._adaptive = (
            Adaptive(name, _TYPES[name], device) if adapt and name in {"bf16", "fp16"} else None
        )
        self._applied, self._seen_at = True, 1.0
        if self._type is not None and device.type == "cpu":
            keep_in_fp32()

    def attach(self, model: nn.Module, *copies: nn.Module) -> None:
        """Attach to a model on its device; copies of it, such as a moving average, follow its changes."""
        if self._adaptive is not None:
            self._adaptive.attach(model, *copies)

    def detach(self) -> None:
        """Restore the attached models."""
        if self._adaptive is not None:
            self._adaptive.detach()

    def forward(self) -> AbstractContextManager[Any]:
        """Context of the forward pass."""
        if self.name == "tf32":
            return tf32_products()
        if self._type is None:
            return _NOTHING
        # Evaluations are not probed: they run as the model will be used.
        if self._adaptive is not None and self._adaptive.is_due and torch.is_grad_enabled():
            return self._adaptive.probe()
        return torch.autocast(self.device.type, dtype=self._type)

    def backward(self, loss: Tensor) -> None:
        """Backward pass, with loss scaling for FP16."""
        scaled = loss if self._scale is None else self._scale.scale(loss)
        with tf32_products() if self.name == "tf32" else _NOTHING:
            scaled.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, before clipping."""
        if self._scale is not None:
            self._scale.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights unless FP16 gradients overflowed; true if applied."""
        if self._adaptive is not None:
            self._adaptive.before_update()
        if self._scale is None:
            optimizer.step()
            return True
        self._seen_at = self._scale.value
        self._applied = self._scale.step(optimizer)
        return self._applied

    def skip(self) -> None:
        """Skip a step, instead of ``step``."""
        self._applied = False
        if self._scale is not None:
            self._seen_at = self._scale.value
            self._scale.skip()

    def observe(self, *, step: int, loss: float) -> list[PrecisionChange]:
        """Process a finished step; returns the precision changes it caused."""
        if self._adaptive is None:
            return []
        applied, self._applied = self._applied, True
        return self._adaptive.observe(
            step=step,
            loss=loss,
            applied=applied,
            seen_at=self._seen_at,
            scale=self._scale,
        )

    @property
    def skips_overflow(self) -> bool:
        """Whether an infinite gradient skips the step instead of being an error."""
        return self._scale is not None

    @property
    def scale(self) -> float | None:
        """The loss scale, if any."""
        return None if self._scale is None else self._scale.value

    @property
    def skips(self) -> int:
        """Steps skipped so far because a gradient overflowed."""
        return 0 if self._scale is None else self._scale.skips

    @property
    def low_share(self) -> float | None:
        """Share of the candidate parameters in low precision; None without adaptation."""
        return None if self._adaptive is None else self._adaptive.low_share

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        parts = {"scale": self._scale, "adaptive": self._adaptive}
        return {name: part.state() for name, part in parts.items() if part is not None}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if self._scale is not None and "scale" in state:
            self._scale.restore(state["scale"])
        if self._adaptive is not None and "adaptive" in state:
            self._adaptive.restore(state["adaptive"])


@contextmanager
def tf32_products() -> Generator[None]:
    """Allow TF32 in FP32 matrix products inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
