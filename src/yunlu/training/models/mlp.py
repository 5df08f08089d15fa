"""A multilayer perceptron over one matrix of features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Linear layers with an activation between them.

    The last ``len(categories)`` columns of the features are category indices, which are embedded;
    each entry of ``categories`` is the number of indices of that column.
    """

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        categories: list[int] | None = None,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = categories or []
        widths = [min(32, round(2 * size**0.5)) for size in sizes]
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True)
        )
        width = inputs - len(sizes) + sum(widths)
        layers: list[nn.Module] = []
        for size in [128, 64] if hidden is None else hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm:
                layers.append(nn.BatchNorm1d(size))
            layers += [ACTIVATIONS[activation](), nn.Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, features: Tensor) -> Tensor:
        """``(samples, inputs)`` to ``(samples, outputs)``; more axes are flattened first."""
        features = features.flatten(1)
        if self.embeddings:
            numbers = features[:, -len(self.embeddings) :].long()
            embedded = [table(numbers[:, index]) for index, table in enumerate(self.embeddings)]
            features = torch.cat([features[:, : -len(self.embeddings)], *embedded], dim=1)
        return self.layers(features)
