"""Dynamic loss scaling for FP16 (Micikevicius 2018, §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

SMALLEST, LARGEST = 2.0**-14, 2.0**24
"""Bounds: below, halving would end at zero; above, nothing is gained."""


class LossScale:
    """torch's ``GradScaler`` (doubles after 2000 good steps, halves on overflow), kept in bounds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type)
        self.value: float = self._scaler.get_scale()
        self.skips = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from; the same factor for all micro-batches of a step."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, and record whether one is not finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update unless a gradient overflowed, then adjust the scale; true if applied."""
        self._scaler.step(optimizer)
        self._scaler.update()
        # Only an overflow lowers the scale: reading it synchronises with the GPU only once.
        scale = self._scaler.get_scale()
        applied = scale >= self.value
        self.skips += not applied
        self.value = scale
        if not SMALLEST <= scale <= LARGEST:
            self.set(scale)
        return applied

    def set(self, value: float) -> None:
        """Set the scale."""
        self.value = min(max(value, SMALLEST), LARGEST)
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": self.value})

    def skip(self) -> None:
        """Reset the scaler after a skipped step; the scale stays."""
        self._scaler.scale(torch.zeros((), device=self._device))  # initialises the scaler if needed
        self._scaler.update(self.value)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {**self._scaler.state_dict(), "skips": self.skips}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        scaler_state = dict(state)
        self.skips = scaler_state.pop("skips", 0)
        self._scaler.load_state_dict(scaler_state)
        self.value = self._scaler.get_scale()
