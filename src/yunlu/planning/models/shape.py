"""Model shape: what memory, FLOPs and communication volume follow from. Pure."""

from __future__ import annotations

from typing import Literal

from yunlu.core.value import Value


class Adapter(Value):
    """A few trained weights beside frozen ones (LoRA; QLoRA where the frozen ones are 4 bits wide)."""

    rank: int
    targets: Literal["attention", "linear"] = "linear"
    """Which matrices get one: the four of attention, or every matrix of a block."""
    base: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    """How the frozen weights are kept."""
    experts: bool = False
    """Whether each routed expert gets its own; most software leaves these as they are."""


class Experts(Value):
    """Alternatives to the MLP of a block, of which each token takes a few."""

    count: int
    """Routed ones, of a block that has them."""
    active: int
    """Of these, how many a token takes."""
    ffn: int
    """Inner width of one."""
    width: int = 0
    """What one takes and gives, where tokens are narrowed for the experts; 0: the hidden width."""
    shared_ffn: int = 0
    """Inner width of those that every token takes, together."""
    first_dense: int = 0
    """Blocks at the start that have a plain MLP instead."""
    every: int = 1
    """Of the others, every so many have experts."""
    layers: int = 0
    """Blocks with experts, where the two above do not tell; 0: they do."""


class Latent(Value):
    """Attention through narrow vectors (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    kv_rank: int
    """Width of what keys and values are made from."""
    q_rank: int = 0
    """Width of what queries are made from; 0: from the hidden state itself."""
    plain_dim: int
    """Of each head of queries and keys, without a position."""
    rotary_dim: int
    """Of each head of queries and keys, with a position; the keys' is common to all heads."""
    value_dim: int


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
    latent: Latent | None = None
    """Where attention is not of the usual form."""
    ffn: int = 0
    gated: bool = False
    """Three matrices in the MLP instead of two."""
    vocab: int = 0
    tied: bool = False
    """Embedding and head are one matrix."""
    headless: bool = False
    """Ends in hidden states, or in a few numbers for each sample: no product with the vocabulary."""
    decoder_layers: int = 0
    """Of an encoder-decoder: those with a second attention, over the encoder's output."""
    positions: int = 0
    """Learned positions."""
    longest: int = 0
    """Tokens of the longest sequence that these reach; 0: any length."""
    attention_layers: int | None = None
    """Blocks with attention, where some have another mixer instead; None: all."""
    mlp_layers: int | None = None
    """Blocks with an MLP or experts; None: all."""
    mixer_layers: int = 0
    """Blocks with a state space or linear attention instead."""
    mixer_weights: int = 0
    """Matrix entries of one such mixer."""
    other_matrices: int = 0
    """Entries of further matrices that every token is multiplied with: patches to vectors, projections."""
    other_parameters: int | None = None
    """Weights no token is multiplied with as a matrix: norms, biases, a pooler; None: only norms."""
    experts: Experts | None = None
    adapter: Adapter | None = None
    tokens_per_sample: int = 0
    """Where the model fixes it: patches of an image; else 0, and the job says the length."""
    causal: bool = True
    window: int = 0
    """Tokens that attention looks back at most; 0: all."""
    unwindowed_layers: int = 0
    """Blocks whose attention looks at all tokens although others have a window."""
    why_not_cut: str = ""
    """Why our engine cannot cut its matrices (``tp``); empty where it can."""
    why_not_parted: str = ""
    """Why our engine cannot part its blocks into stages (``pp``); empty where it can."""
    # Of a model that was measured rather than described: its figures per sample.
    measured_parameters: int = 0
    measured_trainable: int = 0
    measured_flops: float = 0.0
    """Forward and backward of one sample."""
    measured_activation_bytes: float = 0.0
    """Kept for the backward pass of one sample, in FP32."""
    measured_ways: tuple[int, ...] = (1,)
    """Sizes of ``tp`` that the measured module can be split into."""
    measured_stages: int = 1
    """Stages that a pipeline may part the measured module into."""

    @property
    def width_per_head(self) -> int:
        """Of keys and queries; of a latent attention, as much as one score and one sum cost."""
        if self.latent is not None:
            both = self.latent.plain_dim + self.latent.rotary_dim + self.latent.value_dim
            return both // 2
        return self.head_dim or self.hidden // max(self.heads, 1)

    @property
    def attending(self) -> int:
        """Blocks with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def widening(self) -> int:
        """Blocks with an MLP or experts."""
        return self.layers if self.mlp_layers is None else self.mlp_layers

    @property
    def expert_layers(self) -> int:
        """Blocks that have experts."""
        if self.experts is None:
            return 0
        if self.experts.layers:
            return self.experts.layers
        return (self.layers - self.experts.first_dense) // self.experts.every
