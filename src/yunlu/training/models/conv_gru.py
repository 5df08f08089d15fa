"""Small recurrent speech model: convolutions over time, a bidirectional GRU, logits per frame."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

# Shapes: B batch, T frames, F features per frame, H hidden, K symbols.


class ConvGRU(nn.Module):
    """Two strided convolutions (a quarter of the frames remain), a bidirectional GRU, a linear layer.

    What a sample gets never depends on how far its batch is padded: padding is zeroed between
    layers, the GRU runs on packed sequences, and normalisation is per frame. So the objective is
    the same however a global batch is split.

    Args:
        features: Features per frame of the input.
        symbols: How many scores per frame to give, the blank among them.
        hidden: Width of the convolutions, and of the GRU in each direction.
        layers: GRU layers.
        dropout: Share of features dropped before the GRU, between its layers and after it.
    """

    def __init__(
        self,
        features: int,
        symbols: int,
        *,
        hidden: int = 96,
        layers: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, hidden, kernel_size=5, stride=2, padding=2)
            for width in (features, hidden)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in self.convolutions)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(
            hidden,
            hidden,
            num_layers=layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )
        self.score = nn.Linear(2 * hidden, symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(B, T / 4, K)`` of padded frames ``(B, T, F)``, of which ``lengths`` are real."""
        hidden = _silence(frames, lengths)
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            lengths = _halve(lengths)
            hidden = convolve(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = _silence(torch.relu(norm(hidden)), lengths)
        packed = pack_padded_sequence(
            self.dropout(hidden), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=hidden.shape[1]
        )
        return self.score(self.dropout(hidden))

    @staticmethod
    def output_lengths(lengths: Tensor) -> Tensor:
        """Number of output frames for inputs of these lengths."""
        return _halve(_halve(lengths))


def _halve(lengths: Tensor) -> Tensor:
    return (lengths + 1) // 2


def _silence(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Zero the padding."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden * (positions < lengths.to(hidden.device)[:, None])[:, :, None]
