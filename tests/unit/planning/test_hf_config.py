"""Sizes from configurations against the modules that transformers builds from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from yunlu.core.errors import ModelError
from yunlu.planning.models.hf_config import FAMILIES, can_describe, shape_from_config
from yunlu.planning.models.known_models import own_transformer
from yunlu.planning.models.shape import Adapter, adapter_parameters, parameters, stages, tensor_ways
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.pipeline_stages import check, split, why_not_split
from yunlu.training.parallel.tensor_parallel_plans import why_not_tensor

PLAIN: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 512,
    "vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 4}
EXPERTS = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    **GROUPED, "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "kv_lora_rank": 64,
    "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_shared_experts": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
LABELS, PAIRED = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"
IMAGES, BARE = "AutoModelForImageClassification", "AutoModel"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", CAUSAL, GROUPED),
    ("llama", CAUSAL, {**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 48}),
    ("llama", CAUSAL, {**GROUPED, "tie_word_embeddings": True}),
    ("mistral", CAUSAL, GROUPED),
    ("mixtral", CAUSAL, {**GROUPED, "num_local_experts": 4}),
    ("qwen2", CAUSAL, GROUPED),
    ("qwen2_moe", CAUSAL, {**EXPERTS, "shared_expert_intermediate_size": 128}),
    ("qwen3", CAUSAL, GROUPED),
    ("qwen3_moe", CAUSAL, {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("deepseek_v2", CAUSAL, {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", CAUSAL, LATENT),
    ("gpt_oss", CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("llama4_text", CAUSAL, {
        **GROUPED, "intermediate_size_mlp": 1024, "num_local_experts": 8,
        "interleave_moe_layer_step": 2,
    }),
    ("gemma", CAUSAL, GROUPED),
    ("gemma2", CAUSAL, GROUPED),
    ("gemma3_text", CAUSAL, GROUPED),
    ("phi", CAUSAL, PLAIN),
    ("phi3", CAUSAL, GROUPED),
    ("olmo2", CAUSAL, GROUPED),
    ("nemotron", CAUSAL, GROUPED),
    ("starcoder2", CAUSAL, GROUPED),
    ("granitemoehybrid", CAUSAL, {
        **GROUPED, **MAMBA, "num_local_experts": 8, "num_experts_per_tok": 2, "mamba_expand": 2,
        "shared_intermediate_size": 256, "layer_types": ["mamba"] * 5 + ["attention"],
    }),
    ("gpt2", CAUSAL, {"n_embd": 96, "n_layer": 3, "n_head": 4}),
    ("gpt_neox", CAUSAL, PLAIN),
    ("gptj", CAUSAL, {"n_embd": 256, "n_layer": 4, "n_head": 8, "rotary_dim": 16}),
    ("bloom", CAUSAL, {"hidden_size": 256, "n_layer": 4, "n_head": 8, "vocab_size": 1000}),
    ("opt", CAUSAL, {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "ffn_dim": 512,
        "word_embed_proj_dim": 256, "vocab_size": 1000,
    }),
    ("falcon", CAUSAL, {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
        "new_decoder_architecture": True, "num_kv_heads": 4,
    }),
    ("mpt", CAUSAL, {"d_model": 256, "n_layers": 4, "n_heads": 8, "vocab_size": 1000}),
    ("bert", MASKED, PLAIN),
    ("bert", LABELS, PLAIN),
    ("bert", BARE, PLAIN),
    ("roberta", MASKED, PLAIN),
    ("distilbert", LABELS, {"dim": 96, "n_layers": 2, "n_heads": 4, "hidden_dim": 200}),
    ("vit", IMAGES, {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}),
    ("dinov2", IMAGES, {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}),
    ("t5", PAIRED, {"d_model": 96, "num_layers": 3, "num_decoder_layers": 2}),
    ("t5", PAIRED, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("bart", PAIRED, {"d_model": 64, "encoder_layers": 3, "decoder_layers": 2}),
]  # fmt: skip


def build(kind: str, auto: str, sizes: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    model.tie_weights()
    written = json.loads(config.to_json_string(use_diff=False))
    return model, {**written, "architectures": [type(model).__name__]}


@pytest.mark.parametrize(("kind", "auto", "sizes"), CASES, ids=lambda value: str(value)[:24])
def test_every_weight_is_counted(kind: str, auto: str, sizes: dict[str, Any]) -> None:
    model, config = build(kind, auto, sizes)
    assert parameters(shape_from_config(config)) == sum(w.numel() for w in model.parameters())


def test_a_short_file_means_what_its_family_leaves_out() -> None:
    model, _ = build("gpt2", CAUSAL, {"n_embd": 96, "n_layer": 3, "n_head": 4})
    short = {
        "model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 50257,
        "n_positions": 1024,
    }  # fmt: skip
    assert parameters(shape_from_config(short)) == sum(w.numel() for w in model.parameters())


@pytest.mark.parametrize("targets", ["attention", "linear"])
def test_adapters_are_counted_as_peft_adds_them(targets: Any) -> None:
    peft = pytest.importorskip("peft")
    model, config = build("llama", CAUSAL, GROUPED)
    names = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "linear": "all-linear"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=names[targets]))
    shape = shape_from_config(config).model_copy(
        update={"adapter": Adapter(rank=8, targets=targets)}
    )
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert adapter_parameters(shape) == trained


def test_the_job_may_ask_for_another_head() -> None:
    _, config = build("bert", MASKED, PLAIN)
    labelled, _ = build("bert", LABELS, PLAIN)
    shape = shape_from_config(config, head="labels")
    assert parameters(shape) == sum(weight.numel() for weight in labelled.parameters())
    assert shape.headless


def test_a_model_that_sees_is_its_language_model_and_the_weights_beside() -> None:
    _, text = build("llama", CAUSAL, GROUPED)
    seeing, vision = build("vit", BARE, {"hidden_size": 96, "num_attention_heads": 4})
    shape = shape_from_config({"model_type": "x", "text_config": text, "vision_config": vision})
    beside = sum(weight.numel() for weight in seeing.parameters())
    alone = shape_from_config(text)
    assert (shape.layers, shape.hidden) == (alone.layers, alone.hidden)
    assert parameters(shape) == parameters(alone) + beside


def test_an_unknown_architecture_with_the_usual_names_is_understood() -> None:
    model, config = build("llama", CAUSAL, GROUPED)
    shape = shape_from_config({**config, "model_type": "brand-new"})
    assert parameters(shape) == sum(weight.numel() for weight in model.parameters())


def test_windows_are_read_however_they_are_written() -> None:
    assert (
        shape_from_config({**GROUPED, "model_type": "mistral", "sliding_window": 64}).window == 64
    )
    mixed = shape_from_config({**GROUPED, "model_type": "gemma3_text", "sliding_window": 64})
    assert (mixed.window, mixed.unwindowed_layers) == (64, 1)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    listed = {**GROUPED, "model_type": "qwen3", "sliding_window": 64, "layer_types": kinds}
    assert shape_from_config(listed).unwindowed_layers == 2
    unused = {**GROUPED, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}
    assert shape_from_config(unused).window == 0


@pytest.mark.parametrize(
    ("field", "meaning"),
    [
        ("hidden_size", "width of the hidden state"),
        ("num_hidden_layers", "number of blocks"),
        ("num_attention_heads", "number of attention heads"),
        ("intermediate_size", "inner width of the MLP"),
        ("vocab_size", "tokens of the vocabulary"),
    ],
)
def test_a_missing_field_is_named_with_its_file(field: str, meaning: str) -> None:
    config = {key: value for key, value in GROUPED.items() if key != field}
    with pytest.raises(ModelError) as caught:
        shape_from_config({**config, "model_type": "llama"}, where="here/config.json")
    assert f"here/config.json: the field '{field}' is missing" in caught.value.message
    assert meaning in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "wide"}, "'hidden_size' is 'wide'; expected a whole number"),
        ({"num_hidden_layers": -2}, "'num_hidden_layers' is -2; expected at least 0"),
        ({"num_key_value_heads": 3}, "'num_attention_heads' 8 is not a multiple"),
        ({"hidden_size": 250}, "'hidden_size' 250 is not a multiple"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "is 5, but there are 4 experts"),
        ({"num_experts": 4}, "'num_experts_per_tok' is missing"),
    ],
)
def test_what_fits_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        shape_from_config({**GROUPED, "model_type": "llama", **changes})
    assert words in caught.value.message


def test_no_stack_of_like_blocks_is_no_shape() -> None:
    config = {**PLAIN, "model_type": "albert"}
    assert not can_describe(config)
    with pytest.raises(ModelError, match="share their weights"):
        shape_from_config(config)


TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 64, "n_embd": 64,
    "n_layer": 4, "n_head": 4, "n_positions": 64, "d_model": 64, "encoder_layers": 4,
    "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_layers": 4, "num_heads": 4, "d_kv": 16,
    "d_ff": 64, "num_decoder_layers": 4, "image_size": 32, "patch_size": 8, "ffn_dim": 64,
    "word_embed_proj_dim": 64, "head_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "dim": 64, "n_layers": 4,
    "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
}
AUTOS = {"decoder": CAUSAL, "encoder": LABELS, "encoder-decoder": PAIRED, "vision": IMAGES}
NOT_BUILT = {
    *("chatglm", "code_llama", "kimi_k2"),  # code of their own, or another family's
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),  # parts of others
    *("clip_vision_model", "deit"),
}


def make_tiny(kind: str, auto: str) -> torch.nn.Module:
    known = transformers.AutoConfig.for_model(kind)
    sizes = {key: value for key, value in TINY.items() if hasattr(known, key)}
    if kind == "falcon":
        del sizes["head_dim"]
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **OWN_SIZES.get(kind, {})})
    torch.manual_seed(0)
    return getattr(transformers, auto).from_config(config).eval()


def can_be_parted(model: torch.nn.Module, kind: str) -> bool:
    """As ``training.parallel.facts`` finds out."""
    if why_not_split(model, 2) is not None:
        return False
    inputs = {"input_ids": torch.randint(3, 100, (2, 12))}
    if kind == "vision":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    try:
        check(model, split(model, 2), inputs)
    except ModelError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - NOT_BUILT))
def test_plans_split_a_family_just_as_the_engine_does(kind: str) -> None:
    """Everything that is predicted can be trained, and nothing that can be is left out."""
    model: Any = make_tiny(kind, AUTOS[FAMILIES[kind].kind])
    written = json.loads(model.config.to_json_string(use_diff=False))
    shape = shape_from_config({**written, "architectures": [type(model).__name__]})
    ways = [size for size in (2, 3, 4) if why_not_tensor(model, size) is None]
    assert list(tensor_ways(shape, most=4)[1:]) == ways, shape.why_not_cut
    assert (stages(shape) > 1) == can_be_parted(model, FAMILIES[kind].kind), shape.why_not_parted


@pytest.mark.parametrize("kind", ["causal", "classifier", "seq2seq"])
def test_plans_split_our_own_transformers_as_the_engine_does(kind: Any) -> None:
    sizes: dict[str, Any] = {"vocabulary": 100, "max_length": 16, "layers": 3}
    model = {
        "causal": lambda: CausalTransformer(**sizes),
        "classifier": lambda: TransformerClassifier(**sizes, classes=2),
        "seq2seq": lambda: Seq2SeqTransformer(**sizes),
    }[kind]()
    shape = own_transformer(kind, **sizes)
    ways = [size for size in (2, 3, 4) if why_not_tensor(model, size, sequence=True) is None]
    assert list(tensor_ways(shape, most=4)[1:]) == ways
    most = max(size for size in (1, 2, 3, 4) if size == 1 or why_not_split(model, size) is None)
    assert stages(shape) == most


def test_what_nobody_has_heard_of_is_neither_cut_nor_parted() -> None:
    shape = shape_from_config({"model_type": "brand-new", **GROUPED})
    assert (tensor_ways(shape), stages(shape)) == ((1,), 1)
    seeing = {"model_type": "gemma3", "text_config": {"model_type": "llama", **GROUPED}}
    shape = shape_from_config(seeing)
    assert (tensor_ways(shape), stages(shape)) == ((1,), 1)
