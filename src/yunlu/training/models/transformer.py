"""Compact pre-norm transformers: causal, classifier, encoder–decoder; with µP initialisation.

Maximal-update parametrisation (µP) of the built-in transformers: one learning rate for all widths.
In a wider model each step of Adam changes the output of a matrix more, since more inputs change together.
µP compensates (Yang et al. 2022, arXiv 2203.03466, table 8): the learning rate of matrices between hidden
layers falls with the width, the logits are divided by it, and attention divides by the width of a head
instead of its root. Hyperparameters tuned on a narrow model then transfer to a wide one.

Here all weights keep one learning rate. Adam is invariant to the scale of a gradient, so a matrix that is
``ratio`` times larger and whose input is divided by ``ratio`` behaves as with a ``ratio`` times smaller
rate (ibid., lemma J.1). Schedules, sharding, servers and checkpoints are not affected, and AdamW's decay
takes the same share of a weight at each width (Wang and Aitchison 2024, arXiv 2405.13698). Valid for Adam
and AdamW only.

Shapes: B batch, L length, S length of the memory attended to, D width, H heads, K width of a head,
V vocabulary, C classes. A mask is true where a token is real.

Samples can also come packed: laid end to end in one row of T tokens without a batch axis, with their
lengths instead of a mask. All layers but attention work on each token by itself and never notice;
attention is computed for each sample alone, so none can see another.

The encoder–decoder transformer.
Shapes: B batch, S source length, T target length, D width, V vocabulary. Packed samples have no
batch axis: see the transformer.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthRule:
    """Scaling relative to the base width; none by default."""

    ratio: float = 1.0
    """Width over the base width."""
    attention_scale: float | None = None
    """Scale of attention scores; None for one over the root of the head width."""

    @property
    def gain(self) -> float:
        """Factor on the input of each matrix."""
        return 1 / self.ratio


STANDARD = WidthRule()


def find_width_rule(
    width: int, heads: int, *, mup_base: int | None, mup_heads: int | None
) -> WidthRule:
    """The scaling of a model tuned at width ``mup_base`` with ``mup_heads`` heads.

    Without ``mup_heads`` the base has as many heads as the model.
    """
    if mup_base is None:
        if mup_heads is not None:
            raise ModelError(
                "model.args.mup_heads is the number of heads of the base, but there is no base.",
                hint="set model.args.mup_base to its width, or remove mup_heads",
            )
        return STANDARD
    if mup_base < 1 or (mup_heads is not None and mup_heads < 1):
        raise ModelError(
            f"model.args: mup_base {mup_base} and mup_heads {mup_heads} must be at least 1."
        )
    head_width, base_head_width = width / heads, mup_base / (mup_heads or heads)
    # At the base's own sizes the model is bit-equal.
    scale = None if head_width == base_head_width else base_head_width**0.5 / head_width
    return WidthRule(ratio=width / mup_base, attention_scale=scale)


class ScaledNorm(nn.LayerNorm):
    """A layer norm with a fixed gain."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__(width)
        self.gain = gain

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, times the gain."""
        return super().forward(input) * self.gain


def make_norm(width: int, rule: WidthRule) -> nn.LayerNorm:
    """The norm before matrices: torch's own without a gain."""
    return nn.LayerNorm(width) if rule.ratio == 1 else ScaledNorm(width, rule.gain)


def scale_input(x: Tensor, rule: WidthRule) -> Tensor:
    """Scale the input of a matrix that has no norm before it."""
    return x if rule.ratio == 1 else x * rule.gain


Positions = Literal["rotary", "learned"]


class Attention(nn.Module):
    """Attention of each position to the sequence itself, or to a memory."""

    def __init__(self, width: int, heads: int, rule: WidthRule = STANDARD) -> None:
        super().__init__()
        self.head_width = width // heads
        self.rule = rule
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x_BLD: Tensor,
        memory_BSD: Tensor,
        *,
        mask_BS: Tensor | None = None,
        causal: bool = False,
        rotation: Tensor | None = None,
        packed: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Tensor:
        """``rotation`` holds the rotary angles; without it positions carry no order of their own.

        ``packed`` holds the lengths of the samples in ``x``, then in the memory.
        """
        q_BHLK = self._split(self.query(x_BLD))
        k_BHSK = self._split(self.key(memory_BSD))
        v_BHSK = self._split(self.value(memory_BSD))
        if rotation is not None:
            q_BHLK, k_BHSK = rotate(q_BHLK, rotation), rotate(k_BHSK, rotation)
        if packed is not None:
            y_THK = attend_apart(
                q_BHLK, k_BHSK, v_BHSK, *packed, causal=causal, scale=self.rule.attention_scale
            )
            return self.out(scale_input(y_THK.flatten(1), self.rule))
        mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :]
        y_BHLK = functional.scaled_dot_product_attention(
            q_BHLK,
            k_BHSK,
            v_BHSK,
            attn_mask=mask_B11S,
            is_causal=causal,
            scale=self.rule.attention_scale,
        )
        return self.out(scale_input(y_BHLK.transpose(1, 2).flatten(2), self.rule))

    def _split(self, x_BLD: Tensor) -> Tensor:
        # By width, not by number: a worker may hold some of the heads only.
        return x_BLD.unflatten(-1, (-1, self.head_width)).transpose(-3, -2)


class FeedForward(nn.Module):
    """Two layers applied to each position."""

    def __init__(self, width: int, rule: WidthRule = STANDARD) -> None:
        super().__init__()
        self.rule = rule
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Up-projection, GELU, down-projection."""
        return self.down(scale_input(functional.gelu(self.up(x_BLD)), self.rule))


class Block(nn.Module):
    """One layer: self-attention, cross-attention if there is a memory, feed-forward."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float,
        crossed: bool = False,
        rule: WidthRule = STANDARD,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(width, rule)
        self.attention = Attention(width, heads, rule)
        self.cross_norm = make_norm(width, rule) if crossed else None
        self.cross = Attention(width, heads, rule) if crossed else None
        self.feed_norm = make_norm(width, rule)
        self.feed = FeedForward(width, rule)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BLD: Tensor,
        *,
        mask_BL: Tensor | None = None,
        causal: bool = False,
        rotation: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        memory_mask_BS: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        memory_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Residual branches with pre-normalisation."""
        h_BLD = self.attention_norm(x_BLD)
        packed = None if lengths is None else (lengths, lengths)
        attended_BLD = self.attention(
            h_BLD, h_BLD, mask_BS=mask_BL, causal=causal, rotation=rotation, packed=packed
        )
        x_BLD = x_BLD + self.dropout(attended_BLD)
        if self.cross is not None and self.cross_norm is not None:
            assert memory_BSD is not None
            across = (
                None if lengths is None or memory_lengths is None else (lengths, memory_lengths)
            )
            found_BLD = self.cross(
                self.cross_norm(x_BLD), memory_BSD, mask_BS=memory_mask_BS, packed=across
            )
            x_BLD = x_BLD + self.dropout(found_BLD)
        return x_BLD + self.dropout(self.feed(self.feed_norm(x_BLD)))


class Embedding(nn.Module):
    """Token embedding with learned or rotary positions."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        *,
        max_length: int,
        positions: Positions,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(max_length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        angles = rotary_angles(max_length, width // heads) if positions == "rotary" else None
        self.angles: Tensor | None
        self.register_buffer("angles", angles, persistent=False)
        self.max_length = max_length
        # Not on a later stage of a pipeline: vectors come from the stage before, angles from here.
        self.makes_vectors = True

    def forward(
        self, ids_BL: Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The embeddings, and the rotary angles for attention."""
        longest = ids_BL.shape[1] if lengths is None else max(lengths)
        if longest > self.max_length:
            raise ModelError(
                f"A sequence of {longest} tokens is longer than the model's {self.max_length}."
            )
        positions = slice(longest)
        if lengths is not None:
            steps = torch.arange(longest, device=ids_BL.device)
            positions = torch.cat([steps[:length] for length in lengths])
        rotation = None if self.angles is None else self.angles[positions]
        if not self.makes_vectors:
            return ids_BL, rotation
        x_BLD = self.token(ids_BL)
        if self.position is not None:
            at = self.position.weight[positions] if lengths is None else self.position(positions)
            x_BLD = x_BLD + at
        return self.dropout(x_BLD), rotation


class CausalTransformer(nn.Module):
    """Causal language model: logits of the next token at each position."""

    def __init__(
        self,
        *,
        vocabulary: int,
        max_length: int,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
        positions: Positions = "rotary",
        mup_base: int | None = None,
        mup_heads: int | None = None,
    ) -> None:
        """``tied`` uses the embedding as the output layer too.

        ``mup_base`` is the width that the learning rate is meant for (and ``mup_heads`` the heads it
        has there): under µP it suits this one too.
        """
        super().__init__()
        check_sizes(width=width, layers=layers, heads=heads, dropout=dropout)
        rule = find_width_rule(width, heads, mup_base=mup_base, mup_heads=mup_heads)
        self.embedding = Embedding(
            vocabulary, width, heads, max_length=max_length, positions=positions, dropout=dropout
        )
        self.layers = nn.ModuleList(
            Block(width, heads, dropout=dropout, rule=rule) for _ in range(layers)
        )
        self.norm = make_norm(width, rule)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        initialize(self, residuals=2 * layers, rule=rule)

    def forward(self, ids_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Logits ``(B, L, V)``; ``(T, V)`` for documents packed in one row ``(T,)``."""
        lengths = None if lengths_B is None else lengths_B.tolist()
        x_BLD, rotation = self.embedding(ids_BL, lengths)
        for layer in self.layers:
            x_BLD = layer(x_BLD, causal=True, rotation=rotation, lengths=lengths)
        x_BLD = self.norm(x_BLD)
        # Not a shared parameter: exported weights hold each tensor once.
        weight_VD = self.embedding.token.weight if self.head is None else self.head.weight
        return functional.linear(x_BLD, weight_VD)

    @property
    def lent_weights(self) -> tuple[str, ...]:
        """Names of embedding weights that are tied to the output layer."""
        return ("embedding.token.weight",) if self.head is None else ()


class TransformerClassifier(nn.Module):
    """Encoder with mean pooling over the real tokens and a linear head."""

    def __init__(
        self,
        *,
        vocabulary: int,
        classes: int,
        max_length: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        positions: Positions = "learned",
        mup_base: int | None = None,
        mup_heads: int | None = None,
    ) -> None:
        super().__init__()
        check_sizes(width=width, layers=layers, heads=heads, dropout=dropout)
        rule = find_width_rule(width, heads, mup_base=mup_base, mup_heads=mup_heads)
        self.embedding = Embedding(
            vocabulary, width, heads, max_length=max_length, positions=positions, dropout=dropout
        )
        self.layers = nn.ModuleList(
            Block(width, heads, dropout=dropout, rule=rule) for _ in range(layers)
        )
        self.norm = make_norm(width, rule)
        self.head = nn.Linear(width, classes)
        initialize(self, residuals=2 * layers, rule=rule)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Logits ``(B, C)``; padding has no influence.

        Packed samples are ids ``(T,)`` with lengths ``(B,)`` in the place of the mask.
        """
        if ids_BL.ndim == 1:
            return self._classify_packed(ids_BL, mask_BL.tolist())
        mask_BL = mask_BL.bool()
        x_BLD, rotation = self.embedding(ids_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask_BL=mask_BL, rotation=rotation)
        weight_BL1 = mask_BL.unsqueeze(2).to(x_BLD.dtype)
        total_BD = (self.norm(x_BLD) * weight_BL1).sum(dim=1)
        return self.head(total_BD / weight_BL1.sum(dim=1))

    def _classify_packed(self, ids_T: Tensor, lengths: list[int]) -> Tensor:
        x_TD, rotation = self.embedding(ids_T, lengths)
        for layer in self.layers:
            x_TD = layer(x_TD, rotation=rotation, lengths=lengths)
        means = [sample_LD.mean(dim=0) for sample_LD in self.norm(x_TD).split(lengths)]
        return self.head(torch.stack(means))


def attend_apart(
    q_HTK: Tensor,
    k_HSK: Tensor,
    v_HSK: Tensor,
    lengths: Sequence[int],
    memory_lengths: Sequence[int],
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention ``(T, H, K)`` of packed samples, computed per sample.

    Eight texts of 61 tokens in the mean, 4 heads of 64, forward and backward on a CPU: 6 ms this
    way, 16 padded for attention alone, 19 under a block-diagonal mask, 40 as nested tensors.
    """
    outputs = [
        functional.scaled_dot_product_attention(
            q_HLK[None],
            k_HMK[None],
            v_HMK[None],
            is_causal=causal,
            dropout_p=dropout,
            scale=scale,
        )[0].transpose(0, 1)
        for q_HLK, k_HMK, v_HMK in zip(
            q_HTK.split(list(lengths), dim=1),
            k_HSK.split(list(memory_lengths), dim=1),
            v_HSK.split(list(memory_lengths), dim=1),
            strict=True,
        )
    ]
    return torch.cat(outputs)


def rotary_angles(length: int, width: int) -> Tensor:
    """Angle of each position and pair of components (Su et al. 2021, equation 15)."""
    rates_k = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(length), rates_k)


def rotate(x_BHLK: Tensor, angles_Lk: Tensor) -> Tensor:
    """Rotate each pair of components by its angle; in float32, since angles grow with position."""
    first, second = x_BHLK.float().chunk(2, dim=-1)
    cos, sin = angles_Lk.cos(), angles_Lk.sin()
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x_BHLK.dtype)


def initialize(model: nn.Module, *, residuals: int, rule: WidthRule = STANDARD) -> None:
    """Weights that keep the variance of what passes through them, whatever the width.

    The last layer of each branch is smaller, so that a stream of many branches keeps it too
    (Radford et al. 2019, section 2.3). Embeddings and the head are small: a model begins unsure.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            # Between hidden layers as much larger as what the matrix reads is smaller.
            spread = 0.02 if name == "head" else module.in_features**-0.5 * rule.ratio
            last = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=spread / residuals**0.5 if last else spread)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison] - torch types it as never None
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def check_sizes(*, width: int, layers: int, heads: int, dropout: float) -> None:
    """Check the sizes; errors name the argument."""
    if layers < 1 or heads < 1 or width < 1:
        raise ModelError(
            f"model.args: width {width}, layers {layers} and heads {heads} must be at least 1."
        )
    if width % (2 * heads):
        raise ModelError(
            f"model.args.width: {width} does not divide into {heads} heads of even width.",
            hint=f"use a multiple of {2 * heads}, such as {max(1, round(width / (2 * heads))) * 2 * heads}",
        )
    if not 0 <= dropout < 1:
        raise ModelError(f"model.args.dropout: {dropout} is not in [0, 1).")


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
