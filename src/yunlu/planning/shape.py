"""The shape of a model: what its memory, its arithmetic and its messages follow from. Pure."""

from __future__ import annotations

from typing import Literal

from yunlu.core.value import Value

BaseFormat = Literal["trained", "bf16", "int8", "int4"]


class Adapter(Value):
    """A few trained weights beside frozen ones (LoRA; QLoRA where the frozen ones are 4 bits wide)."""

    rank: int
    targets: Literal["attention", "linear"] = "linear"
    """Which matrices get one: the four of attention, or every matrix of a block."""
    base: Literal["bf16", "int8", "int4"] = "bf16"
    """How the frozen weights are kept."""


class Experts(Value):
    """Alternatives to the MLP of a block, of which each token takes a few."""

    count: int
    """Routed ones, of a block that has them."""
    active: int
    """Of these, how many a token takes."""
    ffn: int
    """Inner width of one."""
    shared_ffn: int = 0
    """Inner width of those that every token takes, together."""
    first_dense: int = 0
    """Blocks at the start that have a plain MLP instead."""
    every: int = 1
    """Of the others, every so many have experts."""


class ModelShape(Value):
    """A stack of like blocks between an embedding and a head."""

    name: str
    kind: Literal["decoder", "encoder", "encoder-decoder", "vision", "measured"]
    layers: int
    """Blocks in a row, of encoder and decoder together."""
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0
    """0: ``hidden / heads``."""
    ffn: int = 0
    gated: bool = False
    """Three matrices in the MLP instead of two."""
    vocab: int = 0
    tied: bool = False
    """Embedding and head are one matrix."""
    decoder_layers: int = 0
    """Of an encoder-decoder: those with a second attention, over the encoder's output."""
    positions: int = 0
    """Learned positions."""
    experts: Experts | None = None
    adapter: Adapter | None = None
    tokens_per_sample: int = 0
    """Where the model fixes it: patches of an image; else 0, and the job says the length."""
    causal: bool = True
    window: int = 0
    """Tokens that attention looks back at most; 0: all."""
    # Of a model that was measured rather than described: its figures per sample.
    measured_parameters: int = 0
    measured_trainable: int = 0
    measured_flops: float = 0.0
    """Forward and backward of one sample."""
    measured_activation_bytes: float = 0.0
    """Kept for the backward pass of one sample, in FP32."""
