"""Hugging Face models that support tensor and pipeline parallelism, by ``model_type``. Pure.

Facts about the modules of transformers and about ``training.parallel``, which looks at a model itself
before it trains; a test holds the two together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.planning.models.shape import ModelShape

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
