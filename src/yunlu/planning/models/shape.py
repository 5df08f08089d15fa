"""Model shape: what memory, FLOPs and communication volume follow from. Pure."""

from __future__ import annotations

from typing import Literal

from yunlu.core.value import Value


class Adapter(Value):
    """Low-rank adapter beside frozen weights (LoRA; QLoRA with 4-bit frozen weights)."""

    rank: int
    targets: Literal["attention", "linear"] = "linear"
    """Adapted matrices: the four of attention, or every matrix of a block."""
    base: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    """Storage of the frozen weights."""
    experts: bool = False
    """Whether each routed expert is adapted; most software does not."""


class Experts(Value):
    """Mixture of experts instead of the MLP of a block."""

    count: int
    """Routed experts per block."""
    active: int
    """Active experts per token."""
    ffn: int
    """Inner width of one."""
    width: int = 0
    """Input and output width of an expert; 0: the hidden width."""
    shared_ffn: int = 0
    """Total inner width of shared experts."""
    first_dense: int = 0
    """Leading blocks with a plain MLP."""
    every: int = 1
    """Of the other blocks, every so many have experts."""
    layers: int = 0
    """Blocks with experts, where the two above do not define them; 0: they do."""


class Latent(Value):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    kv_rank: int
    """Latent width of keys and values."""
    q_rank: int = 0
    """Latent width of queries; 0: computed from the hidden state."""
    plain_dim: int
    """Width per head of queries and keys without position."""
    rotary_dim: int
    """Width per head of queries and keys with rotary position; shared by all heads for keys."""
    value_dim: int


class ModelShape(Value):
    """A stack of identical blocks between an embedding and a head."""

    name: str
    kind: Literal["decoder", "encoder", "encoder-decoder", "vision", "measured"]
    layers: int
    """Number of blocks, of encoder and decoder together."""
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0
    """0: ``hidden / heads``."""
    latent: Latent | None = None
    """Latent attention, where present."""
    ffn: int = 0
    gated: bool = False
    """Gated MLP: three matrices instead of two."""
    vocab: int = 0
    tied: bool = False
    """Embedding and head share one matrix."""
    headless: bool = False
    """No product with the vocabulary: ends in hidden states, or a few numbers per sample."""
    decoder_layers: int = 0
    """Blocks of the decoder with cross-attention, of an encoder-decoder."""
    positions: int = 0
    """Learned positions."""
    longest: int = 0
    """Longest sequence with learned positions; 0: any length."""
    attention_layers: int | None = None
    """Blocks with attention, where some have another mixer; None: all."""
    mlp_layers: int | None = None
    """Blocks with an MLP or experts; None: all."""
    mixer_layers: int = 0
    """Blocks with a state space or linear attention."""
    mixer_weights: int = 0
    """Matrix entries of one such mixer."""
    other_matrices: int = 0
    """Entries of further matrices that every token is multiplied with: patch embedding, projections."""
    other_parameters: int | None = None
    """Non-matrix weights: norms, biases, a pooler; None: only norms."""
    experts: Experts | None = None
    adapter: Adapter | None = None
    tokens_per_sample: int = 0
    """Tokens per sample if the model fixes it (image patches); else 0, and the job defines the length."""
    causal: bool = True
    window: int = 0
    """Attention window in tokens; 0: all."""
    unwindowed_layers: int = 0
    """Blocks with full attention although others have a window."""
    why_not_cut: str = ""
    """Why our engine cannot split its matrices (``tp``); empty where it can."""
    why_not_parted: str = ""
    """Why our engine cannot divide its blocks into stages (``pp``); empty where it can."""
    # Of a model that was measured rather than described: its figures per sample.
    measured_parameters: int = 0
    measured_trainable: int = 0
    measured_flops: float = 0.0
    """Forward and backward of one sample."""
    measured_activation_bytes: float = 0.0
    """Activations of one sample for the backward pass, in FP32."""
    measured_ways: tuple[int, ...] = (1,)
    """Sizes of ``tp`` that the measured module can be split into."""
    measured_stages: int = 1
    """Pipeline stages that the measured module can be divided into."""

    @property
    def width_per_head(self) -> int:
        """Width of keys and queries per head; of latent attention, the mean cost of a score and a sum."""
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
