"""The factor on an FP16 loss that keeps small gradients from vanishing (Micikevicius 2018, §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

SMALLEST, LARGEST = 2.0**-14, 2.0**24
"""Below, halving goes on to zero, from where no gradient comes back; above, nothing is gained."""


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
        """Bring the gradients back to their true size, and note whether one is not finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update unless a gradient overflowed, then adjust the factor; whether it was applied."""
        self._scaler.step(optimizer)
        self._scaler.update()
        # Only an overflow lowers it: one number says both, so that a GPU is waited for once.
        found = self._scaler.get_scale()
        applied = found >= self.value
        self.skips += not applied
        self.value = found
        if not SMALLEST <= found <= LARGEST:
            self.set(found)
        return applied

    def set(self, value: float) -> None:
        """Go on with another factor."""
        self.value = min(max(value, SMALLEST), LARGEST)
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": self.value})

    def skip(self) -> None:
        """Take back the gradients of a step that someone else left out; the factor stays."""
        self._scaler.scale(torch.zeros((), device=self._device))  # it may not have begun yet
        self._scaler.update(self.value)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self._scaler.state_dict(), "skips": self.skips}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        kept = dict(state)
        self.skips = kept.pop("skips", 0)
        self._scaler.load_state_dict(kept)
        self.value = self._scaler.get_scale()
