"""Shapes of the built-in transformers, from their arguments. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from yunlu.core.errors import ModelError
from yunlu.planning.models.hf_splits import SEVERAL_STACKS
from yunlu.planning.models.shape import Adapter, ModelShape

if TYPE_CHECKING:
    from yunlu.spec.job import AdapterSpec

Own = Literal["causal", "classifier", "seq2seq"]
_KINDS: dict[Own, Literal["decoder", "encoder", "encoder-decoder"]] = {
    "causal": "decoder",
    "classifier": "encoder",
    "seq2seq": "encoder-decoder",
}
_LAYERS: dict[Own, int] = {"causal": 4, "classifier": 2, "seq2seq": 2}
_ATTENTION_NAMES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "query",
    "key",
    "value",
    "out",
    "c_attn",
)
_POSITIONS: dict[Own, str] = {"causal": "rotary", "classifier": "learned", "seq2seq": "rotary"}


def own_transformer(
    kind: Own,
    *,
    vocabulary: int,
    max_length: int,
    classes: int = 0,
    width: int = 128,
    layers: int | None = None,
    heads: int = 4,
    tied: bool = True,
    positions: str | None = None,
    dropout: float = 0.0,
    mup_base: int | None = None,
    mup_heads: int | None = None,
) -> ModelShape:
    """Shape of the modules in ``training.models.transformer`` and ``seq2seq`` with these arguments."""
    del dropout, mup_base, mup_heads  # change no shapes
    depth = _LAYERS[kind] if layers is None else layers
    if min(width, depth, heads) < 1 or width % (2 * heads):
        raise ModelError(
            f"model.args: width {width}, layers {depth} and heads {heads} make no transformer.",
            hint=f"layers and heads of at least 1, and a width that is a multiple of {2 * max(heads, 1)}",
        )
    blocks = 2 * depth if kind == "seq2seq" else depth
    crossed = depth if kind == "seq2seq" else 0
    # A block's norms have 4 widths and its MLP's biases 5; a norm stands at the end of each stack.
    others = 9 * width * blocks + 2 * width * crossed + 2 * width * (2 if crossed else 1)
    if kind == "classifier":
        others += classes * (width + 1)
    return ModelShape(
        name="transformer",
        kind=_KINDS[kind],
        layers=blocks,
        decoder_layers=crossed,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocab=vocabulary,
        tied=tied and kind != "classifier",
        headless=kind == "classifier",
        positions=max_length if (positions or _POSITIONS[kind]) == "learned" else 0,
        other_parameters=others,
        causal=kind != "classifier",
        why_not_parted=SEVERAL_STACKS if crossed else "",
    )


def own_adapter(spec: AdapterSpec | None) -> Adapter | None:
    """Adapter of a job; frozen weights stay in FP32, as in our engine."""
    if spec is None:
        return None
    ends = {target.rpartition(".")[2] for target in spec.targets}
    is_attention = spec.targets != "auto" and ends <= set(_ATTENTION_NAMES)
    return Adapter(rank=spec.rank, targets="attention" if is_attention else "linear", base="fp32")
