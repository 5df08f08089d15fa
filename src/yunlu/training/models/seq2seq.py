"""The encoder–decoder transformer.

Shapes: B batch, S source length, T target length, D width, V vocabulary. Packed samples have no
batch axis: see the transformer.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.training.models.transformer import Block, Embedding, Positions, check_sizes, initialize

if TYPE_CHECKING:
    from collections.abc import Sequence


class Seq2SeqTransformer(nn.Module):
    """Encoder-decoder transformer: logits of each next token of the target."""

    def __init__(
        self,
        *,
        vocabulary: int,
        max_length: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        positions: Positions = "rotary",
    ) -> None:
        """``layers``: number of encoder layers, and of decoder layers."""
        super().__init__()
        check_sizes(width=width, layers=layers, heads=heads, dropout=dropout)
        # One embedding for both sides and the output: what is copied need not be translated.
        self.embedding = Embedding(
            vocabulary, width, heads, max_length=max_length, positions=positions, dropout=dropout
        )
        self.encoder = nn.ModuleList(Block(width, heads, dropout=dropout) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            Block(width, heads, dropout=dropout, crossed=True) for _ in range(layers)
        )
        self.decoder_norm = nn.LayerNorm(width)
        initialize(self, residuals=3 * layers)

    def forward(
        self,
        source_BS: Tensor,
        source_mask_BS: Tensor,
        target_BT: Tensor,
        target_lengths_B: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(B, T, V)`` for the token after each of ``target_BT``, which begins with ``bos``.

        Packed sources come with their lengths in the place of the mask, packed targets with theirs.
        """
        if target_lengths_B is not None:
            lengths, target_lengths = source_mask_BS.tolist(), target_lengths_B.tolist()
            memory_SD = self.encode(source_BS, None, lengths)
            return self.decode(target_BT, memory_SD, None, (target_lengths, lengths))
        source_mask_BS = source_mask_BS.bool()
        return self.decode(target_BT, self.encode(source_BS, source_mask_BS), source_mask_BS)

    def encode(
        self,
        source_BS: Tensor,
        source_mask_BS: Tensor | None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """The memory ``(B, S, D)`` that the decoder attends to."""
        x_BSD, rotation = self.embedding(source_BS, lengths)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, mask_BL=source_mask_BS, rotation=rotation, lengths=lengths)
        return self.encoder_norm(x_BSD)

    def decode(
        self,
        target_BT: Tensor,
        memory_BSD: Tensor,
        source_mask_BS: Tensor | None,
        packed: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    ) -> Tensor:
        """Logits of the next token at each position of the target so far."""
        lengths, memory_lengths = packed
        x_BTD, rotation = self.embedding(target_BT, lengths)
        for layer in self.decoder:
            x_BTD = layer(
                x_BTD,
                causal=True,
                rotation=rotation,
                memory_BSD=memory_BSD,
                memory_mask_BS=source_mask_BS,
                lengths=lengths,
                memory_lengths=memory_lengths,
            )
        return functional.linear(self.decoder_norm(x_BTD), self.embedding.token.weight)

    @torch.no_grad()
    def generate(
        self,
        source_BS: Tensor,
        source_mask_BS: Tensor,
        *,
        bos: int,
        eos: int,
        max_length: int,
    ) -> Tensor:
        """Greedy decoding: ``(B, ≤ max_length)``, ``eos`` after each end."""
        source_mask_BS = source_mask_BS.bool()
        memory_BSD = self.encode(source_BS, source_mask_BS)
        target_BT = source_BS.new_full((len(source_BS), 1), bos)
        ended_B = torch.zeros(len(source_BS), dtype=torch.bool, device=source_BS.device)
        for _ in range(min(max_length, self.embedding.max_length)):
            next_B = self.decode(target_BT, memory_BSD, source_mask_BS)[:, -1].argmax(dim=-1)
            next_B = next_B.masked_fill(ended_B, eos)
            target_BT = torch.cat((target_BT, next_B[:, None]), dim=1)
            ended_B |= next_B == eos
            if bool(ended_B.all()):
                break
        return target_BT[:, 1:]
