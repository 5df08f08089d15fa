"""Matrix factorisation: latent factors of users and items."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MatrixFactorization(nn.Module):
    """Biases and the product of two embeddings, plus an MLP over both if ``hidden`` is set.

    Row 0 of each table is for users or items not seen in training. It stays zero, so that an
    unknown user gets only the item's bias, and vice versa.
    """

    def __init__(
        self,
        *,
        users: int,
        items: int,
        dim: int = 16,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        init_std: float = 0.1,
    ) -> None:
        super().__init__()
        self.user_factors = _table(users, dim, init_std)
        self.item_factors = _table(items, dim, init_std)
        self.user_bias = _table(users, 1, 0.0)
        self.item_bias = _table(items, 1, 0.0)
        self.dropout = nn.Dropout(dropout)
        layers: list[nn.Module] = []
        width = 2 * dim
        for size in hidden or []:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.interaction = nn.Sequential(*layers, nn.Linear(width, 1)) if layers else None

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of pairs of user and item indices ``(samples,)``."""
        user, item = self.dropout(self.user_factors(users)), self.dropout(self.item_factors(items))
        score = (user * item).sum(dim=-1)
        if self.interaction is not None:
            score = score + self.interaction(torch.cat([user, item], dim=-1)).squeeze(-1)
        return score + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)


def _table(rows: int, dim: int, std: float) -> nn.Embedding:
    table = nn.Embedding(rows, dim, padding_idx=0)
    with torch.no_grad():
        table.weight.normal_(0.0, std)
        table.weight[0].zero_()
    return table
