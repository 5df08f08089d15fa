"""Model shape from a Hugging Face ``config.json``. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import ModelError
from yunlu.planning.models.hf_parts import (
    SEVERAL_MODELS,
    count_kv_heads,
    count_mixer_vectors,
    count_positions,
    find_experts,
    find_ffn,
    find_latent,
    find_mixers,
    find_pattern,
    find_windows,
    is_gated,
    longest_sequence,
    note_splits,
)
from yunlu.planning.models.shape import ModelShape, parameters

if TYPE_CHECKING:
    from collections.abc import Mapping


ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "n_embed"),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_dim"),
    "ffn": (
        "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim",
        "hidden_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": (
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
        "num_routed_experts",
    ),
    "active": (
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
        "top_k_experts", "moe_top_k",
    ),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size"),
    "shared_ffn": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "every": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"),
    "decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "mixer_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mixer_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "mixer_groups": ("mamba_n_groups", "n_groups"),
    "mixer_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
    "mixer_state": ("ssm_state_size", "mamba_d_state"),
}  # fmt: skip
"""Our name and those in configurations; the most common first."""


class Fields:
    """A configuration with its family's defaults and its source."""

    def __init__(
        self, config: Mapping[str, Any], *, where: str, defaults: Mapping[str, Any]
    ) -> None:
        self.config = config
        self.where = where
        self._defaults = defaults

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The field of this name, else the family's default, else ``otherwise``."""
        value = self.config.get(name)
        return self._defaults.get(name, otherwise) if value is None else value

    def flag(self, given: bool | str) -> bool:
        """A boolean, or the field that holds it."""
        return bool(self.get(given, otherwise=False)) if isinstance(given, str) else given

    def need(self, meaning: str, expected: str) -> int:
        """A required size of at least 1."""
        value = self.size(meaning, 0)
        if value == 0:
            names = ALIASES[meaning]
            raise ModelError(
                f"{self.where}: the field {names[0]!r} is missing: {expected}.",
                hint=f"add it (or {' or '.join(map(repr, names[1:]))})"
                if len(names) > 1
                else "add it",
            )
        return value

    def size(self, meaning: str, otherwise: int) -> int:
        """A size under any of its names; ``otherwise`` where absent, null or 0."""
        names = ALIASES[meaning]
        for source in (self.config, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return self._whole(name, source[name]) or otherwise
        return otherwise

    def number(self, name: str, otherwise: int) -> int:
        """An integer of this name."""
        value = self.get(name)
        return otherwise if value is None else self._whole(name, value)

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, list | tuple) and value and len(set(map(str, value))) == 1:
            value = value[0]  # one entry for each block, all equal
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ModelError(
                f"{self.where}: the field {name!r} is {value!r}; expected a whole number."
            )
        if value < 0:
            raise ModelError(f"{self.where}: the field {name!r} is {value}; expected at least 0.")
        return int(value)


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


Head = Literal["tokens", "labels", "none"]
"""What the model ends in: a product with the vocabulary for each token, a few numbers for each
sample, or hidden states."""

_NOT_LIKE_BLOCKS = {
    "electra": "its embedding has another width than its blocks",
    "albert": "its blocks share their weights",
    "swin": "its blocks differ in width",
    "mamba": "it has no attention",
    "mamba2": "it has no attention",
    "rwkv": "it has no attention",
    "clip": "it is two models in one",
    "siglip": "it is two models in one",
    "resnet": "it is no transformer",
    "convnext": "it is no transformer",
}
_SHARED_GATE = {"qwen2_moe", "qwen3_next", "qwen3_5_moe_text"}
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_LABEL_ENDS = ("Classification", "MultipleChoice", "QuestionAnswering")


def shape_from_config(
    config: Mapping[str, Any], *, where: str = "config.json", head: Head | None = None
) -> ModelShape:
    """The shape that a configuration describes.

    Of a model that sees and reads, the shape is the language model's; the weights of the rest are
    counted, its arithmetic is not: it depends on how many images there are.

    Args:
        config: What ``config.json`` holds.
        where: Its name in errors.
        head: What the job makes the model end in; None: what the configuration says.
    """
    for part in _TEXT_PARTS:
        if config.get(part):
            return _shape_within(config, part, where=where, head=head)
    model_type = str(config.get("model_type") or "")
    if not can_describe(config):
        raise ModelError(
            f"{where}: model_type is {model_type!r}: {_NOT_LIKE_BLOCKS[model_type]}, which a plan "
            "from sizes alone does not understand.",
            hint="expected a stack of like transformer blocks; such a model can be measured",
        )
    family = find_family(model_type)
    fields = Fields(config, where=where, defaults=family.defaults if family else {})
    family = family or _guess_family(fields)
    if family.kind == "encoder-decoder":
        shape = _encoder_decoder(fields, family)
    else:
        make = _vision if family.kind == "vision" else _stack
        shape = make(fields, family, head or _head_of(config, family))
    return note_splits(shape, model_type)


def can_describe(config: Mapping[str, Any]) -> bool:
    """Whether such a model is a stack of identical blocks, so that its sizes define its shape."""
    return str(config.get("model_type") or "") not in _NOT_LIKE_BLOCKS


def _shape_within(
    config: Mapping[str, Any], part: str, *, where: str, head: Head | None
) -> ModelShape:
    inner = config[part]
    if not isinstance(inner, dict):
        raise ModelError(f"{where}: the field {part!r} is not an object; expected a configuration.")
    shared = {
        key: config[key]
        for key in ("tie_word_embeddings", "architectures", "_name_or_path")
        if key in config
    }
    whole = {"why_not_cut": SEVERAL_MODELS, "why_not_parted": SEVERAL_MODELS}
    shape = shape_from_config({**shared, **inner}, where=f"{where}: {part}", head=head)
    shape = shape.model_copy(update=whole)
    seeing = config.get("vision_config")
    if not isinstance(seeing, dict):
        return shape
    try:
        beside = parameters(shape_from_config(seeing, where=f"{where}: vision_config"))
    except ModelError:
        return shape  # a plan depends on the language model
    own = shape.other_parameters or 0
    return shape.model_copy(update={"other_parameters": own + beside})


def _guess_family(fields: Fields) -> Family:
    """An unknown architecture, by the names of its fields."""
    if fields.get("is_encoder_decoder") or fields.size("decoder_layers", 0):
        return Family(kind="encoder-decoder", gated=False, norm_vectors=2, out_bias=True)
    if fields.get("image_size") and fields.get("patch_size") and not fields.size("vocab", 0):
        return Family(
            kind="vision", gated=False, norm_vectors=2, qkv_bias=True, out_bias=True, mlp_bias=True,
            defaults={"num_channels": 3},
        )  # fmt: skip
    names = " ".join(fields.get("architectures") or ())
    gated = "gelu" not in str(fields.get("hidden_act") or fields.get("activation_function") or "")
    kind = "encoder" if "MaskedLM" in names or "position_embedding_type" in fields.config else None
    return Family(
        kind=kind or "decoder",
        gated=gated,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        head_norms="head" if fields.get("qk_norm") or fields.get("use_qk_norm") else "",
    )


def _head_of(config: Mapping[str, Any], family: Family) -> Head:
    names: Any = config.get("architectures") or ()
    name = str(names[0]) if names else ""
    if any(end in name for end in _LABEL_ENDS):
        return "labels"
    if not name:
        return "none" if family.kind == "encoder" else "tokens"
    return "none" if name.endswith("Model") and not name.endswith("LMHeadModel") else "tokens"


def _stack(fields: Fields, family: Family, head: Head) -> ModelShape:
    layers = len(find_pattern(fields)) or fields.need("layers", "expected the number of blocks")
    hidden = fields.need("hidden", "expected the width of the hidden state")
    heads = fields.need("heads", "expected the number of attention heads")
    latent = find_latent(fields)
    head_dim = fields.size("head_dim", 0)
    if not head_dim and latent is None and hidden % heads:
        raise ModelError(
            f"{fields.where}: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' "
            f"{heads}, and there is no 'head_dim'."
        )
    experts = find_experts(fields, layers)
    ffn = find_ffn(fields, hidden, needed=experts is None)
    window, unwindowed = find_windows(fields, family, layers)
    shape = ModelShape(
        name=str(fields.get("_name_or_path") or fields.get("model_type") or "model"),
        kind="encoder" if family.kind == "encoder" else "decoder",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else count_kv_heads(fields, heads),
        head_dim=0 if latent else head_dim,
        latent=latent,
        ffn=ffn,
        gated=is_gated(fields, family),
        vocab=fields.need("vocab", "expected the number of tokens of the vocabulary"),
        tied=bool(fields.get("tie_word_embeddings", otherwise=False)) and head == "tokens",
        headless=head != "tokens",
        positions=count_positions(fields, family),
        longest=longest_sequence(fields, family),
        experts=experts,
        causal=family.kind == "decoder",
        window=window,
        unwindowed_layers=unwindowed,
    ).model_copy(update=find_mixers(fields, layers, hidden))
    others = _block_vectors(fields, family, shape) + _outer_vectors(fields, family, shape, head)
    besides = hidden * hidden if family.kind == "encoder" and head == "tokens" else 0
    if str(fields.get("model_type")).startswith(("qwen3_next", "qwen3_5")):  # attention has a gate
        besides += shape.attending * hidden * heads * shape.width_per_head
    return shape.model_copy(update={"other_parameters": others, "other_matrices": besides})


def _block_vectors(fields: Fields, family: Family, shape: ModelShape) -> int:
    """Norms and biases of all blocks."""
    own, common = shape.heads * shape.width_per_head, shape.kv_heads * shape.width_per_head
    norms = _norms(fields, family)
    total = shape.layers * (norms * family.norm_vectors + family.block_scales) * shape.hidden
    attending = shape.attending
    if shape.latent is None:
        total += attending * fields.flag(family.qkv_bias) * (own + 2 * common)
    else:
        total += attending * (shape.latent.kv_rank + shape.latent.q_rank)
    total += attending * fields.flag(family.out_bias) * shape.hidden
    if family.head_norms:
        total += attending * (
            2 * shape.width_per_head if family.head_norms == "head" else own + common
        )
    inner = shape.ffn * (2 if shape.gated else 1) + shape.hidden
    total += (shape.widening - shape.expert_layers) * fields.flag(family.mlp_bias) * inner
    if shape.mixer_layers:
        total += shape.mixer_layers * count_mixer_vectors(fields, shape.hidden)
    return total + _expert_vectors(fields, shape)


def _norms(fields: Fields, family: Family) -> int:
    if fields.get("model_type") != "falcon":
        return family.norms
    if fields.get("new_decoder_architecture"):
        return fields.number("num_ln_in_parallel_attn", 2)
    return 1 if fields.get("parallel_attn", otherwise=True) else 2


def _expert_vectors(fields: Fields, shape: ModelShape) -> int:
    if shape.experts is None:
        return 0
    model_type = fields.get("model_type")
    if model_type == "gpt_oss":  # biases of router and experts, and a sink for each head
        item = 2 * shape.experts.ffn + shape.hidden + 1
        return shape.expert_layers * shape.experts.count * item + shape.layers * shape.heads
    # A token's share of the shared expert comes from a product with one vector.
    return shape.expert_layers * shape.hidden if model_type in _SHARED_GATE else 0


def _outer_vectors(fields: Fields, family: Family, shape: ModelShape, head: Head) -> int:
    """Norms and biases outside the blocks, token types, poolers and heads for labels."""
    hidden = shape.hidden
    norm = family.norm_vectors * hidden
    total = norm * (family.final_norm + family.embedding_norm)
    if head == "tokens" and fields.flag(family.head_bias):
        total += shape.vocab
    if family.kind != "encoder":
        return total
    total += fields.number("type_vocab_size", 0) * hidden
    if head == "tokens":  # a transformation before the product with the vocabulary
        bias = 0 if fields.get("model_type") == "modernbert" else hidden
        return total + bias + norm + shape.vocab
    has_pooler = head == "labels" or fields.get("model_type") != "distilbert"
    pooler = hidden * (hidden + 1) * has_pooler
    labels = len(fields.get("id2label") or ()) or fields.number("num_labels", 2)
    return total + pooler + (labels * (hidden + 1) if head == "labels" else 0)


def _vision(fields: Fields, family: Family, head: Head) -> ModelShape:
    hidden = fields.need("hidden", "expected the width of the hidden state")
    heads = fields.need("heads", "expected the number of attention heads")
    layers = fields.need("layers", "expected the number of blocks")
    patch, image = fields.number("patch_size", 0), fields.number("image_size", 0)
    if not patch or not image or image < patch:
        raise ModelError(
            f"{fields.where}: 'image_size' is {image} and 'patch_size' {patch}; expected the sides "
            "of an image and of its patches, in pixels."
        )
    classes = len(fields.get("id2label") or ()) or fields.number("num_labels", 2)
    patches = (image // patch) ** 2
    ratio = fields.number("mlp_ratio", 4)
    shape = ModelShape(
        name=str(fields.get("_name_or_path") or fields.get("model_type") or "vision"),
        kind="vision",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=fields.size("ffn", ratio * hidden),
        gated=family.gated,
        headless=True,
        positions=patches + 1,
        other_matrices=fields.number("num_channels", 3) * patch * patch * hidden,
        tokens_per_sample=patches + 1,
        causal=False,
    )
    others = _block_vectors(fields, family, shape)
    norm = family.norm_vectors * hidden
    others += norm * (family.final_norm + family.embedding_norm)
    others += 2 * hidden  # the first token, and the bias of the patches
    is_dino = fields.get("model_type") == "dinov2"  # its head sees the mean of the patches too
    others += is_dino * hidden
    if head == "none":
        others += 0 if is_dino else hidden * (hidden + 1)
    else:
        others += classes * ((1 + is_dino) * hidden + 1)
    return shape.model_copy(update={"other_parameters": others})


def _encoder_decoder(fields: Fields, family: Family) -> ModelShape:
    encoder = fields.need("layers", "expected the number of blocks of the encoder")
    decoder = fields.size("decoder_layers", encoder)
    hidden = fields.need("hidden", "expected the width of the hidden state")
    heads = fields.need("heads", "expected the number of attention heads")
    tied = bool(fields.get("tie_word_embeddings", otherwise=False))
    shape = ModelShape(
        name=str(fields.get("_name_or_path") or fields.get("model_type") or "model"),
        kind="encoder-decoder",
        layers=encoder + decoder,
        decoder_layers=decoder,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.size("head_dim", 0),
        ffn=fields.need("ffn", "expected the inner width of the MLP"),
        gated=is_gated(fields, family),
        vocab=fields.need("vocab", "expected the number of tokens of the vocabulary"),
        tied=tied,
        positions=2 * count_positions(fields, family),
        longest=longest_sequence(fields, family),
    )
    others = _block_vectors(fields, family, shape)
    width, norm = shape.heads * shape.width_per_head, family.norm_vectors * hidden
    across = norm + fields.flag(family.qkv_bias) * 3 * width + fields.flag(family.out_bias) * hidden
    others += decoder * across
    others += 2 * norm * (family.final_norm + family.embedding_norm)
    others += 2 * fields.number("relative_attention_num_buckets", 0) * heads
    return shape.model_copy(update={"other_parameters": others})
