"""Defaults of Hugging Face model families: norms, biases, sizes that configurations omit.

Facts about the architectures, as their papers and the modules of transformers have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Bias = bool | str
"""Whether there is one; a string names the field of the configuration that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one ``model_type``."""

    kind: Literal["decoder", "encoder", "encoder-decoder", "vision"] = "decoder"
    gated: bool = True
    norm_vectors: int = 1
    """1: only scales (RMSNorm); 2: shifts too (LayerNorm)."""
    norms: int = 2
    """Norms per block."""
    final_norm: bool = True
    embedding_norm: bool = False
    qkv_bias: Bias = False
    out_bias: Bias = False
    mlp_bias: Bias = False
    head_bias: Bias = False
    head_norms: Literal["", "head", "width"] = ""
    """Norms of queries and keys: one for all heads, or over all of them together."""
    positions: str = ""
    """The field with the number of learned positions."""
    extra_positions: int = 0
    """Learned positions besides, such as an offset for padding."""
    reserved_positions: int = 0
    """Positions of the field that no text token uses."""
    window_every: int = 1
    """In every so many blocks the last attends to all tokens; 1: every block has the window."""
    block_scales: int = 0
    """Further vectors of a block, such as a scale of each branch."""
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of fields that configurations omit."""


_LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_GPT = Family(
    gated=False, norm_vectors=2, qkv_bias=True, out_bias=True, mlp_bias=True,
    defaults={"tie_word_embeddings": True},
)  # fmt: skip
_BERT = Family(
    kind="encoder", gated=False, norm_vectors=2, final_norm=False, embedding_norm=True,
    qkv_bias=True, out_bias=True, mlp_bias=True, positions="max_position_embeddings",
    defaults={"tie_word_embeddings": True, "type_vocab_size": 2},
)  # fmt: skip
_ROBERTA = replace(_BERT, reserved_positions=2)
_VIT = Family(
    kind="vision", gated=False, norm_vectors=2, qkv_bias="qkv_bias", out_bias=True, mlp_bias=True,
    defaults={"qkv_bias": True, "image_size": 224, "patch_size": 16, "num_channels": 3},
)  # fmt: skip
_BART = Family(
    kind="encoder-decoder", gated=False, norm_vectors=2, final_norm=False, embedding_norm=True,
    qkv_bias=True, out_bias=True, mlp_bias=True, positions="max_position_embeddings",
    extra_positions=2, defaults={"tie_word_embeddings": True},
)  # fmt: skip
_T5 = Family(
    kind="encoder-decoder", gated=False,
    defaults={"tie_word_embeddings": True, "relative_attention_num_buckets": 32},
)  # fmt: skip
_QWEN3 = replace(_LLAMA, mlp_bias=False, head_norms="head")
_GEMMA = replace(_LLAMA, mlp_bias=False, defaults={"tie_word_embeddings": True, "head_dim": 256})
_MISTRAL = Family(defaults={"num_key_value_heads": 8})
_OLMO = replace(_LLAMA, mlp_bias=False)
_DEEPSEEK = Family(
    out_bias="attention_bias", defaults={"n_shared_experts": 1, "first_k_dense_replace": 0}
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "code_llama": _LLAMA,
    "smollm3": _LLAMA,
    "arcee": replace(_LLAMA, gated=False),
    "exaone4": Family(head_norms="head"),
    "seed_oss": Family(qkv_bias="attention_bias", out_bias="attention_out_bias"),
    "minimax_m2": Family(head_norms="width"),
    "qwen3_next": replace(_QWEN3, mlp_bias=False),
    "qwen3_5_text": replace(_QWEN3, mlp_bias=False),
    "qwen3_5_moe_text": replace(_QWEN3, mlp_bias=False),
    "granite": replace(_LLAMA, defaults={"tie_word_embeddings": False}),
    "granitemoe": replace(_LLAMA, mlp_bias=False),
    "granitemoeshared": replace(_LLAMA, mlp_bias=False),
    "granitemoehybrid": replace(_LLAMA, mlp_bias=False),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL,
    "mixtral": _MISTRAL,
    "phi3": Family(),
    "phimoe": Family(
        norm_vectors=2, qkv_bias="attention_bias", out_bias="attention_bias", head_bias="lm_head_bias"
    ),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias="qkv_bias", defaults={"qkv_bias": True}),
    "qwen2_vl_text": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "olmo": replace(_OLMO, norm_vectors=0),
    "olmo2": replace(_OLMO, head_norms="width"),
    "olmo3": replace(_OLMO, head_norms="width", window_every=4),
    "olmoe": replace(_OLMO, head_norms="width"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, window_every=2),
    "gemma3_text": replace(_GEMMA, norms=4, head_norms="head", window_every=6),
    "glm": Family(qkv_bias="attention_bias"),
    "glm4": Family(qkv_bias="attention_bias", norms=4),
    "glm4_moe": Family(qkv_bias="attention_bias"),
    "chatglm": Family(qkv_bias="add_qkv_bias", defaults={"tie_word_embeddings": False}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", window_every=2,
        defaults={"attention_bias": True, "head_dim": 64},
    ),
    "llama4_text": _LLAMA,
    "nemotron": Family(
        gated=False, norm_vectors=2, qkv_bias="attention_bias", out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "nemotron_h": Family(
        gated=False, norms=1, qkv_bias="attention_bias", out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "cohere": Family(norms=1, defaults={"tie_word_embeddings": True}),
    "cohere2": Family(norms=1, window_every=4, defaults={"tie_word_embeddings": True}),
    "stablelm": Family(norm_vectors=2, qkv_bias="use_qkv_bias"),
    "starcoder2": Family(
        gated=False, norm_vectors=2, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias",
        defaults={"use_bias": True, "tie_word_embeddings": True},
    ),
    "phi": replace(
        _GPT, norms=1, head_bias=True, defaults={"tie_word_embeddings": False}
    ),
    "gpt2": replace(_GPT, positions="n_positions"),
    "gpt_bigcode": replace(_GPT, positions="n_positions"),
    "openai-gpt": replace(_GPT, positions="n_positions", final_norm=False),
    "gpt_neo": replace(_GPT, qkv_bias=False, positions="max_position_embeddings"),
    "gpt_neox": replace(
        _GPT, qkv_bias="attention_bias", out_bias="attention_bias",
        defaults={"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gptj": replace(
        _GPT, norms=1, qkv_bias=False, out_bias=False, head_bias=True,
        defaults={"tie_word_embeddings": False},
    ),
    "opt": replace(_GPT, positions="max_position_embeddings", extra_positions=2),
    "bloom": replace(_GPT, embedding_norm=True),
    "falcon": replace(
        _GPT, qkv_bias="bias", out_bias="bias", mlp_bias="bias",
        defaults={"tie_word_embeddings": True, "bias": False},
    ),
    "mpt": replace(
        _GPT, norm_vectors=1, qkv_bias=False, out_bias=False, mlp_bias=False,
        defaults={"tie_word_embeddings": True, "expansion_ratio": 4},
    ),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": replace(
        _BERT, defaults={"tie_word_embeddings": True, "type_vocab_size": 0}
    ),
    "modernbert": Family(
        kind="encoder", embedding_norm=True, qkv_bias="attention_bias", out_bias="attention_bias",
        mlp_bias="mlp_bias", window_every=3, defaults={"tie_word_embeddings": True},
    ),
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": replace(_VIT, block_scales=2, defaults={**_VIT.defaults, "patch_size": 14}),
    "clip_vision_model": replace(_VIT, embedding_norm=True, defaults={**_VIT.defaults}),
    "bart": _BART,
    "mbart": replace(_BART, final_norm=True),
    "pegasus": replace(_BART, final_norm=True, embedding_norm=False, extra_positions=0),
    "marian": replace(_BART, embedding_norm=False, extra_positions=0),
    "t5": _T5,
    "mt5": replace(_T5, defaults={**_T5.defaults, "tie_word_embeddings": False}),
    "umt5": replace(_T5, defaults={**_T5.defaults, "tie_word_embeddings": False}),
}  # fmt: skip
"""By ``model_type``."""


def find_family(model_type: str) -> Family | None:
    """The family, if known."""
    return FAMILIES.get(model_type)
