"""Lower precision with FP32 master weights: what wraps the forward pass, and the scaled step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Weights stay in FP32; autocast lowers the arithmetic; FP16 gradients are scaled."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass."""
        if self.name not in _TYPES:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])

    def backward(self, loss: Tensor) -> None:
        """Backward, scaled where small gradients would vanish."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to their true size, before clipping."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """One update, or none if FP16 gradients overflowed."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    @property
    def skips_overflow(self) -> bool:
        """Whether a gradient that is not finite is a skipped step rather than an error."""
        return self._scaler is not None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
