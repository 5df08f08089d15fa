"""Parts of a Hugging Face block: attention, MLP, experts, mixers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import ModelError
from yunlu.planning.models.shape import Experts, Latent

if TYPE_CHECKING:
    from yunlu.planning.models.hf_config import Family, Fields
    from yunlu.planning.models.shape import ModelShape


def count_kv_heads(fields: Fields, heads: int) -> int:
    """Heads of keys and values."""
    if fields.get("new_decoder_architecture") or not fields.get("multi_query"):
        count = fields.size("kv_heads", heads)
    else:
        count = 1
    if heads % count:
        raise ModelError(
            f"{fields.where}: 'num_attention_heads' {heads} is not a multiple of "
            f"'num_key_value_heads' {count}."
        )
    return count


def find_ffn(fields: Fields, hidden: int, *, needed: bool) -> int:
    """Inner width of the MLP."""
    wide = fields.number("intermediate_size_mlp", 0) or fields.size("ffn", 0)
    if wide:
        return wide
    nested = fields.get("ffn_config")
    if isinstance(nested, dict) and "ffn_hidden_size" in nested:
        return int(nested["ffn_hidden_size"])
    if fields.get("expansion_ratio"):
        return int(fields.get("expansion_ratio") * hidden)
    # As in GPT-2 and its followers: four times the width, without a field.
    four = {"gpt2", "gpt_bigcode", "gptj", "gpt_neo", "openai-gpt", "bloom", "falcon"}
    if fields.get("model_type") in four:
        return 4 * hidden
    return fields.need("ffn", "expected the inner width of the MLP") if needed else 0


def is_gated(fields: Fields, family: Family) -> bool:
    """Whether the MLP is gated (three matrices)."""
    projection = str(fields.get("feed_forward_proj") or "")
    return projection.startswith("gated") if projection else family.gated


def count_positions(fields: Fields, family: Family) -> int:
    """Learned positions; 0: none."""
    if not family.positions:
        return 0
    count = fields.number(family.positions, 0)
    if not count:
        raise ModelError(
            f"{fields.where}: the field {family.positions!r} is missing: expected the number of "
            "learned positions."
        )
    return count + family.extra_positions


def longest_sequence(fields: Fields, family: Family) -> int:
    """Longest sequence with learned positions; 0: there are none, so no limit."""
    if not family.positions:
        return 0
    return fields.number(family.positions, 0) - family.reserved_positions


def find_latent(fields: Fields) -> Latent | None:
    """Latent attention, where present."""
    if not fields.get("kv_lora_rank"):
        return None
    return Latent(
        kv_rank=fields.number("kv_lora_rank", 0),
        q_rank=fields.number("q_lora_rank", 0),
        plain_dim=fields.number("qk_nope_head_dim", 128),
        rotary_dim=fields.number("qk_rope_head_dim", 64),
        value_dim=fields.number("v_head_dim", 128),
    )


def find_experts(fields: Fields, layers: int) -> Experts | None:
    """Mixture of experts, where present."""
    count = fields.size("experts", 0)
    if count <= 1:
        return None
    active = fields.need("active", "expected how many experts a token takes")
    if active > count:
        raise ModelError(
            f"{fields.where}: 'num_experts_per_tok' is {active}, but there are {count} experts."
        )
    ffn = fields.size("expert_ffn", 0) or fields.need("ffn", "expected the width of an expert")
    shared = fields.size("shared_ffn", 0)
    if not shared:
        shared = ffn * fields.size("shared_count", 0)
    if fields.get("model_type") == "llama4_text":
        shared = ffn
    return Experts(
        count=count,
        active=active,
        ffn=ffn,
        width=fields.number("moe_latent_size", 0),
        shared_ffn=shared,
        first_dense=min(fields.size("first_dense", 0), layers),
        every=_every(fields),
        layers=_expert_layers(fields, layers),
    )


def _every(fields: Fields) -> int:
    value = fields.get("moe_layer_freq")
    return 1 if isinstance(value, list) else fields.size("every", 1)


def _expert_layers(fields: Fields, layers: int) -> int:
    """Blocks with experts, where the configuration lists them; 0 where it does not."""
    frequency, kinds = fields.get("moe_layer_freq"), fields.get("mlp_layer_types")
    if isinstance(frequency, list):
        return sum(map(int, frequency))
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    if fields.get("moe_layers"):
        return len(fields.get("moe_layers"))
    if pattern := find_pattern(fields):
        return pattern.count("E")
    plain: set[int] = set(fields.get("mlp_only_layers") or ())
    every = _every(fields)
    return (
        sum(index not in plain and (index + 1) % every == 0 for index in range(layers))
        if plain
        else 0
    )


def find_windows(fields: Fields, family: Family, layers: int) -> tuple[int, int]:
    """Attention window of the blocks, and how many attend to all tokens."""
    size = fields.number("sliding_window", 0) or fields.number("attention_chunk_size", 0)
    size = size or fields.number("local_attention", 0)
    if not size or fields.get("use_sliding_window") is False:
        return 0, 0
    kinds = fields.get("layer_types")
    if kinds:
        whole = sum(kind in {"full_attention", "attention"} for kind in kinds)
        return (size, whole) if whole < layers else (0, 0)
    pattern = fields.number("sliding_window_pattern", family.window_every)
    pattern = fields.number("global_attn_every_n_layers", pattern)
    if fields.get("model_type") == "modernbert":  # the first of three, not the last
        return size, -(-layers // pattern)
    return (size, layers // pattern if pattern > 1 else 0)


def find_pattern(fields: Fields) -> str:
    """One letter per block: mixer (M), attention (*), MLP (-) or experts (E)."""
    if pattern := fields.get("hybrid_override_pattern"):
        return str(pattern)
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
    letters |= {"mlp": "-", "moe": "E"}
    kinds: list[str] = fields.get("layers_block_type") or []
    is_alone = fields.get("model_type") == "nemotron_h"
    return "".join(letters.get(kind, "-") for kind in kinds) if is_alone else ""


def find_mixers(fields: Fields, layers: int, hidden: int) -> dict[str, int]:
    """Blocks that have a state space (Dao and Gu 2024, arXiv 2405.21060) or linear attention."""
    kinds, pattern = fields.get("layer_types") or (), find_pattern(fields)
    if pattern:
        attending, mixing = pattern.count("*"), pattern.count("M")
        result = {"mlp_layers": layers - attending - mixing}
    else:
        mixing = sum(kind in {"mamba", "linear_attention"} for kind in kinds)
        attending, result = layers - mixing, {}
    if not mixing:
        return result
    weights, _ = _mixer_sizes(fields, hidden)
    return {
        **result,
        "attention_layers": attending,
        "mixer_layers": mixing,
        "mixer_weights": weights,
    }


def count_mixer_vectors(fields: Fields, hidden: int) -> int:
    """Non-matrix weights of one such block: short convolutions, rates, norms."""
    return _mixer_sizes(fields, hidden)[1]


def _mixer_sizes(fields: Fields, hidden: int) -> tuple[int, int]:
    heads = fields.size("mixer_heads", 0)
    kernel = fields.size("mixer_kernel", 4)
    if heads:
        inner = heads * fields.size("mixer_head_dim", 64)
        states = 2 * fields.size("mixer_groups", 1) * fields.size("mixer_state", 128)
        weights = hidden * (2 * inner + states + heads) + inner * hidden
        return weights, (kernel + 1) * (inner + states) + 3 * heads + inner
    values, width = (
        fields.number("linear_num_value_heads", 32),
        fields.number("linear_value_head_dim", 128),
    )
    inner = values * width
    keys = fields.number("linear_num_key_heads", 16) * fields.number("linear_key_head_dim", 128)
    weights = hidden * (2 * keys + 2 * inner + 2 * values) + inner * hidden
    return weights, kernel * (2 * keys + inner) + 2 * values + width


# fmt: off
_CUT = frozenset({
    "arcee", "code_llama", "cohere", "cohere2", "exaone4", "glm", "glm4", "gpt_neox", "granite",
    "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi",
    "phi3", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3", "starcoder2",
})
"""Model types whose transformers tensor-parallel plan uses only layers that we support."""
_PARTED = frozenset({
    *_CUT, "bert", "deepseek_v2", "deepseek_v3", "dinov2", "distilbert", "gemma", "gemma2",
    "gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_oss", "granitemoe", "granitemoeshared",
    "minimax_m2", "mixtral", "olmoe", "opt", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "roberta", "stablelm",
})
"""Model types whose blocks pass on one tensor, and are not accessed from outside."""
_UNPARTED = frozenset({
    "bloom", "camembert", "clip_vision_model", "deit", "falcon", "gpt_neo", "gptj",
    "granitemoehybrid", "llama4_text", "modernbert", "mpt", "nemotron_h", "openai-gpt", "vit",
    "xlm-roberta",
})
_SCALED = frozenset({"gemma", "gemma2", "gemma3_text"})
# fmt: on

SEVERAL_STACKS = "it has several stacks of layers, and only one can be split"
SEVERAL_MODELS = "it is several models in one"


def note_splits(shape: ModelShape, model_type: str) -> ModelShape:
    """The shape with the reasons why such a model cannot be split by tp or pp."""
    reasons = {
        "why_not_cut": _why_not_cut(shape, model_type),
        "why_not_parted": _why_not_parted(shape, model_type),
    }
    return shape.model_copy(update=reasons)


def _why_not_cut(shape: ModelShape, model_type: str) -> str:
    if shape.experts is not None:
        return "the weights of experts belong to no layer of their own, and only layers are cut"
    if model_type in _CUT:
        return ""
    if model_type in _SCALED:
        return "its embedding scales its output, and only a plain Embedding can be split"
    if model_type in _PARTED | _UNPARTED or shape.kind in {"encoder-decoder", "vision"}:
        return f"transformers has no tensor-parallel plan for {model_type}"
    return _nobody_knows(model_type)


def _why_not_parted(shape: ModelShape, model_type: str) -> str:
    if shape.kind == "encoder-decoder":
        return SEVERAL_STACKS
    if model_type in _PARTED:
        return ""
    if model_type in _UNPARTED:
        return "its forward fails in stages: its layers pass on more than one tensor"
    return _nobody_knows(model_type)


def _nobody_knows(model_type: str) -> str:
    return f"whether a model of type {model_type!r} can be is not known before it is built"
