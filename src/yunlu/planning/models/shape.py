"""Model shape: parameter counts and FLOPs, from which memory and communication follow. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from yunlu.core.errors import ModelError
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator


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


# NF4 keeps a scale for 64 numbers, itself in 8 bits with one FP32 for 256 of them (Dettmers et al.
# 2023, arXiv 2305.14314, section 3): 4.127 bits. INT8 keeps one FP32 for each row: next to nothing.
_BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 4.127 / 8}
_UNQUANTISED_BYTES = 2.0


class _Matrix(NamedTuple):
    """One matrix of the blocks."""

    rows: int
    columns: int
    part: Literal["attention", "mlp", "expert"]
    copies: int
    """Number of copies in the model."""
    met: int
    """Number of copies that one token is multiplied with."""

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def border(self) -> int:
        """Weights of a rank-one adapter."""
        return self.rows + self.columns


def parameters(shape: ModelShape) -> int:
    """All weights, adapters not counted."""
    if shape.kind == "measured":
        return shape.measured_parameters
    return _matrices_kept(shape) + _embedding(shape) + _others(shape)


def active_parameters(shape: ModelShape) -> int:
    """Weights used by one token, without embedding and position lookups."""
    if shape.kind == "measured":
        return shape.measured_parameters
    return met_matrices(shape) + _others(shape)


def adapter_parameters(shape: ModelShape) -> int:
    """Weights of the adapters: rows plus columns of each adapted matrix, times the rank."""
    if shape.adapter is None:
        return 0
    return shape.adapter.rank * sum(item.copies * item.border for item in _adapted(shape))


def trainable(shape: ModelShape) -> int:
    """Weights that the optimiser updates."""
    if shape.kind == "measured":
        return shape.measured_trainable
    return parameters(shape) if shape.adapter is None else adapter_parameters(shape)


def base_bytes(shape: ModelShape) -> float:
    """Mean bytes of a frozen weight: only the matrices of the blocks are quantised."""
    if shape.kind == "measured":
        return _BASE_BYTES["fp32"]  # as our engine stores weights it did not create
    if shape.adapter is None or shape.adapter.base in {"fp32", "bf16"}:
        return _BASE_BYTES[shape.adapter.base] if shape.adapter else _UNQUANTISED_BYTES
    whole = parameters(shape)
    quantised = sum(matrix.size * matrix.copies for matrix in _block_matrices(shape))
    saved = _UNQUANTISED_BYTES - _BASE_BYTES[shape.adapter.base]
    return _UNQUANTISED_BYTES - saved * quantised / whole


def met_matrices(shape: ModelShape) -> int:
    """Entries of all matrices that one token is multiplied with; of experts, only the active ones."""
    blocks = sum(matrix.size * matrix.met for matrix in _block_matrices(shape))
    return blocks + _routers(shape) + _mixers(shape) + shape.other_matrices + _head(shape)


def flops_per_token(shape: ModelShape, seq: int) -> float:
    """Forward and backward of one token in a sequence of ``seq``, without recomputation.

    Of an encoder-decoder, a token is one of the source with one of the target: both have ``seq``.
    """
    if seq < 1:
        raise ModelError(f"seq: {seq} is not a length of a sequence; expected at least 1.")
    if shape.kind == "measured":
        return shape.measured_flops / (shape.tokens_per_sample or seq)
    if shape.adapter is None:
        # Nothing is trained before an image: the first matrix needs no input gradient.
        raw = shape.other_matrices if shape.kind == "vision" else 0
        return 6.0 * met_matrices(shape) - 2.0 * raw + attention_flops_per_token(shape, seq)
    added = shape.adapter.rank * sum(item.met * item.border for item in _adapted(shape))
    return 4.0 * met_matrices(shape) + 6.0 * added + attention_flops_per_token(shape, seq)


def attention_flops_per_token(shape: ModelShape, seq: int) -> float:
    """Of scores and weighted sums alone, forward and backward."""
    attending = shape.attending
    if shape.kind == "encoder-decoder":  # the decoder attends to itself and to the whole source
        looking_back = shape.decoder_layers
        seen = attending * seq + looking_back * visible(seq, causal=True)
    else:
        whole = shape.unwindowed_layers if shape.window else attending
        seen = whole * visible(seq, causal=shape.causal)
        seen += (attending - whole) * visible(seq, causal=shape.causal, window=shape.window)
    return 12.0 * shape.heads * shape.width_per_head * seen


def visible(seq: float, *, causal: bool, window: int = 0) -> float:
    """Mean number of tokens that attention sees over a sequence."""
    if not window or window >= seq:
        return seq / 2 if causal else float(seq)
    return window * (1 - window / (2 * seq)) if causal else float(window)


def columns_of(shape: ModelShape, seq: int) -> dict[str, float]:
    """Model columns of ``predict.query_batch.QueryBatch``."""
    experts = shape.experts
    measured = {"activation_bytes": shape.measured_activation_bytes}
    return {
        **(measured if shape.kind == "measured" else {}),
        "layers": float(shape.layers),
        "hidden": float(shape.hidden),
        "heads": float(shape.heads),
        "kv_heads": float(shape.kv_heads),
        "head_dim": float(shape.width_per_head),
        "ffn": _mean_ffn(shape),
        "gated": float(shape.gated),
        "vocab": 0.0 if shape.headless else float(shape.vocab),
        "tied": float(shape.tied),
        "causal": float(shape.causal),
        "experts": 1.0 if experts is None else float(experts.count),
        "active_experts": 1.0 if experts is None else float(experts.active),
        "parameters": float(parameters(shape)),
        "active_parameters": float(active_parameters(shape)),
        "trainable": float(trainable(shape)),
        "base_bytes": base_bytes(shape),
        "flops_per_token": flops_per_token(shape, seq),
    }


MOST_WAYS = 64
"""Limit of our engine: no model is split further."""


def tensor_ways(shape: ModelShape, most: int = MOST_WAYS) -> tuple[int, ...]:
    """Sizes of ``tp`` that divide the heads and widths of every block, 1 first; only 1 if it cannot be split."""
    if shape.why_not_cut:
        return (1,)
    if shape.kind == "measured":
        return tuple(ways for ways in shape.measured_ways if ways <= most)
    widths = [shape.heads, shape.heads if shape.latent else shape.kv_heads]
    if shape.experts is not None:
        widths += [shape.experts.ffn, shape.experts.shared_ffn]
    if shape.experts is None or shape.expert_layers < shape.widening:
        widths.append(shape.ffn)
    return tuple(ways for ways in range(1, most + 1) if all(width % ways == 0 for width in widths))


def stages(shape: ModelShape) -> int:
    """Most pipeline stages: blocks in a row."""
    if shape.why_not_parted:
        return 1
    layers = shape.measured_stages if shape.kind == "measured" else shape.layers
    return min(max(layers, 1), MOST_WAYS)


def _block_matrices(shape: ModelShape) -> Iterator[_Matrix]:
    attentions = shape.attending + shape.decoder_layers
    for rows, columns in _attention(shape):
        yield _Matrix(rows, columns, "attention", attentions, attentions)
    dense = shape.widening - shape.expert_layers
    for rows, columns in _mlp(shape, shape.ffn):
        yield _Matrix(rows, columns, "mlp", dense, dense)
    if shape.experts is None:
        return
    times = shape.expert_layers
    for rows, columns in _mlp(shape, shape.experts.shared_ffn):
        yield _Matrix(rows, columns, "mlp", times, times)
    retained, met = times * shape.experts.count, times * shape.experts.active
    for rows, columns in _mlp(shape, shape.experts.ffn, width=shape.experts.width):
        yield _Matrix(rows, columns, "expert", retained, met)


def _attention(shape: ModelShape) -> list[tuple[int, int]]:
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        own, common = heads * shape.width_per_head, shape.kv_heads * shape.width_per_head
        return [(hidden, own), (hidden, common), (hidden, common), (own, hidden)]
    keys = heads * (latent.plain_dim + latent.rotary_dim)
    rank = latent.q_rank
    queries = [(hidden, rank), (rank, keys)] if rank else [(hidden, keys)]
    return [
        *queries,
        (hidden, latent.kv_rank + latent.rotary_dim),
        (latent.kv_rank, heads * (latent.plain_dim + latent.value_dim)),
        (heads * latent.value_dim, hidden),
    ]


def _mlp(shape: ModelShape, ffn: int, *, width: int = 0) -> list[tuple[int, int]]:
    if not ffn:
        return []
    outer = width or shape.hidden
    return [(outer, ffn)] * (2 if shape.gated else 1) + [(ffn, outer)]


def _adapted(shape: ModelShape) -> Iterator[_Matrix]:
    if shape.adapter is None:
        return
    parts = {"attention"} if shape.adapter.targets == "attention" else {"attention", "mlp"}
    if shape.adapter.targets == "linear" and shape.adapter.experts:
        parts.add("expert")
    yield from (matrix for matrix in _block_matrices(shape) if matrix.part in parts)


def _routers(shape: ModelShape) -> int:
    """Router, and projections of tokens to and from the experts' width."""
    if shape.experts is None:
        return 0
    return shape.expert_layers * shape.hidden * (shape.experts.count + 2 * shape.experts.width)


def _mixers(shape: ModelShape) -> int:
    return shape.mixer_layers * shape.mixer_weights


def _head(shape: ModelShape) -> int:
    return 0 if shape.headless else shape.vocab * shape.hidden


def _matrices_kept(shape: ModelShape) -> int:
    """Entries of all stored matrices; a tied head is the embedding."""
    blocks = sum(matrix.size * matrix.copies for matrix in _block_matrices(shape))
    head = 0 if shape.tied else _head(shape)
    return blocks + _routers(shape) + _mixers(shape) + shape.other_matrices + head


def _embedding(shape: ModelShape) -> int:
    return (shape.vocab + shape.positions) * shape.hidden


def _others(shape: ModelShape) -> int:
    if shape.other_parameters is not None:
        return shape.other_parameters
    return (2 * shape.layers + shape.decoder_layers + 1) * shape.hidden


def _mean_ffn(shape: ModelShape) -> float:
    experts, layers = shape.experts, shape.widening
    if experts is None:
        return shape.ffn * layers / max(shape.layers, 1)
    chosen = experts.active * experts.ffn + experts.shared_ffn
    dense = layers - shape.expert_layers
    return (dense * shape.ffn + shape.expert_layers * chosen) / max(shape.layers, 1)
