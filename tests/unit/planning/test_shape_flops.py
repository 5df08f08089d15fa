"""Formulas against what torch counts while real models compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from yunlu.planning.models.hf_config import shape_from_config
from yunlu.planning.models.shape import Adapter, flops_per_token

SEQ, BATCH = 48, 2
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160,
    "vocab_size": 200,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 200, "n_positions": 64},
    "gpt_neox": SIZES,
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **SIZES, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


def count(model: torch.nn.Module, **inputs: torch.Tensor) -> int:
    counter = FlopCounterMode(display=False)
    # Plain attention: what fused kernels compute again in the backward pass is no work of the model.
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(**inputs).logits.float().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
def test_decoders_compute_what_the_formula_says(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    # Torch does not count the products of many experts at once: one after another here.
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **how)
    # Torch computes all scores and hides half of them.
    shape = shape_from_config(config.to_dict()).model_copy(update={"causal": False})
    counted = count(model, input_ids=torch.randint(0, 200, (BATCH, SEQ))) / (BATCH * SEQ)
    assert flops_per_token(shape, SEQ) == pytest.approx(counted, rel=0.02)


def test_an_adapted_model_computes_less() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **MODELS["llama"])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))
    update = {"causal": False, "adapter": Adapter(rank=4)}
    shape = shape_from_config(config.to_dict()).model_copy(update=update)
    counted = count(adapted, input_ids=torch.randint(0, 200, (BATCH, SEQ))) / (BATCH * SEQ)
    assert flops_per_token(shape, SEQ) == pytest.approx(counted, rel=0.02)


def test_an_encoder_decoder_computes_what_the_formula_says() -> None:
    config = transformers.AutoConfig.for_model(
        "t5", d_model=64, d_kv=16, d_ff=160, num_layers=3, num_heads=4, vocab_size=200
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    ids = torch.randint(0, 200, (BATCH, SEQ))
    counted = count(model, input_ids=ids, decoder_input_ids=ids) / (BATCH * SEQ)
    shape = shape_from_config(config.to_dict())
    hidden_half = 6 * 3 * 64 * SEQ  # scores that the decoder computes and hides
    assert flops_per_token(shape, SEQ) + hidden_half == pytest.approx(counted, rel=0.02)


def test_a_vision_model_computes_what_the_formula_says() -> None:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160,
        image_size=56, patch_size=8,
    )  # fmt: skip
    counted = (
        count(
            transformers.ViTForImageClassification(config),
            pixel_values=torch.randn(BATCH, 3, 56, 56),
        )
        / BATCH
    )
    shape = shape_from_config(config.to_dict())
    assert shape.tokens_per_sample == 50
    assert 50 * flops_per_token(shape, 50) == pytest.approx(counted, rel=0.02)
