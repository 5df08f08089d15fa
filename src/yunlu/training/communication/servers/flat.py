"""Trained weights of a model as one flat tensor: decayed weights first, then vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class FlatWeights:
    """Copies weights and gradients to and from one flat tensor, in the order of the servers."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        matrices = [weight for weight in weights if weight.ndim >= 2]
        self.weights = [*matrices, *(weight for weight in weights if weight.ndim < 2)]
        self.length = sum(weight.numel() for weight in self.weights)
        self.decayed = sum(weight.numel() for weight in matrices)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The weights."""
        flat = torch.empty(self.length)
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            part.copy_(weight.reshape(-1))
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the weights."""
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            weight.copy_(part.view(weight.shape))

    def read_gradients(self) -> Tensor:
        """Gradients; zeros for weights without one."""
        flat = torch.empty(self.length)
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            if weight.grad is None:
                part.zero_()
            else:
                part.copy_(weight.grad.reshape(-1))
        return flat

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split([weight.numel() for weight in self.weights])
