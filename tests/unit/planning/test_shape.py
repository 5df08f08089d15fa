from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.errors import ModelError
from yunlu.planning.models.shape import (
    Adapter,
    Experts,
    Latent,
    ModelShape,
    active_parameters,
    adapter_parameters,
    attention_flops_per_token,
    base_bytes,
    columns_of,
    flops_per_token,
    met_matrices,
    parameters,
    stages,
    tensor_ways,
    trainable,
    visible,
)
from yunlu.planning.predict.query_batch import QueryBatch, concatenate, make_queries

LLAMA3_8B = ModelShape(
    name="llama3-8b",
    kind="decoder",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    vocab=128256,
)
DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    kind="decoder",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    latent=Latent(kv_rank=512, q_rank=1536, plain_dim=128, rotary_dim=64, value_dim=128),
    ffn=18432,
    gated=True,
    vocab=129280,
    experts=Experts(count=256, active=8, ffn=2048, shared_ffn=2048, first_dense=3),
)
MEASURED = ModelShape(
    name="net",
    kind="measured",
    layers=3,
    hidden=64,
    measured_parameters=1000,
    measured_trainable=900,
    measured_flops=1e6,
    measured_activation_bytes=2e4,
    measured_ways=(1, 2, 32),
    measured_stages=3,
)


def test_published_counts_are_met() -> None:
    assert parameters(LLAMA3_8B) == 8_030_261_248
    assert parameters(DEEPSEEK_V3) / 1e9 == pytest.approx(671.03, abs=0.01)
    # 36.6 with the head, as its authors count (README_WEIGHTS of DeepSeek-V3).
    assert active_parameters(DEEPSEEK_V3) / 1e9 == pytest.approx(36.6, abs=0.05)


def test_flops_are_six_for_each_weight_and_attention() -> None:
    causal = 6 * 32 * 4096 * 8192  # 6 L h s: what NVIDIA counts
    assert flops_per_token(LLAMA3_8B, 8192) == 6 * met_matrices(LLAMA3_8B) + causal
    whole = LLAMA3_8B.model_copy(update={"causal": False})
    assert attention_flops_per_token(whole, 8192) == 2 * causal


@given(st.integers(1, 300), st.integers(1, 400), st.booleans())
def test_a_window_shows_as_many_tokens_as_counting_says(
    seq: int, window: int, causal: bool
) -> None:
    if causal:
        seen = sum(min(place, window) for place in range(1, seq + 1)) / seq
        assert visible(seq, causal=True, window=window) == pytest.approx(seen, abs=0.51)
    assert visible(seq, causal=causal, window=window) <= visible(seq, causal=causal)


def test_some_blocks_may_look_further_than_the_window() -> None:
    every = LLAMA3_8B.model_copy(update={"window": 1024})
    some = LLAMA3_8B.model_copy(update={"window": 1024, "unwindowed_layers": 16})
    none = attention_flops_per_token(LLAMA3_8B, 8192)
    mean = (attention_flops_per_token(every, 8192) + none) / 2
    assert attention_flops_per_token(some, 8192) == pytest.approx(mean)


def test_an_adapter_trains_little_and_spares_a_third_of_the_products() -> None:
    adapted = LLAMA3_8B.model_copy(update={"adapter": Adapter(rank=16, targets="attention")})
    border = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    assert trainable(adapted) == adapter_parameters(adapted) == 32 * 16 * border
    assert parameters(adapted) == parameters(LLAMA3_8B)
    attention = attention_flops_per_token(LLAMA3_8B, 512)
    products = flops_per_token(adapted, 512) - attention - 6 * trainable(adapted)
    assert products == 4 * met_matrices(LLAMA3_8B)


def test_routed_experts_get_adapters_only_if_asked() -> None:
    plain = DEEPSEEK_V3.model_copy(update={"adapter": Adapter(rank=8)})
    every = DEEPSEEK_V3.model_copy(update={"adapter": Adapter(rank=8, experts=True)})
    each = 58 * 256 * 3 * (7168 + 2048) * 8
    assert adapter_parameters(every) - adapter_parameters(plain) == each


def test_quantised_weights_take_half_a_byte_but_embeddings_do_not() -> None:
    adapted = LLAMA3_8B.model_copy(update={"adapter": Adapter(rank=8, base="int4")})
    # Head and embedding stay in 16 bits: 1.05e9 of 8.03e9 weights.
    assert base_bytes(adapted) * 8.03e9 == pytest.approx(1.05e9 * 2 + 6.98e9 * 0.516, rel=0.01)
    assert base_bytes(LLAMA3_8B.model_copy(update={"adapter": Adapter(rank=8)})) == 2


def test_heads_and_widths_decide_how_far_tensors_are_cut() -> None:
    assert tensor_ways(LLAMA3_8B) == (1, 2, 4, 8)
    assert tensor_ways(LLAMA3_8B, most=4) == (1, 2, 4)
    assert tensor_ways(DEEPSEEK_V3) == (1, 2, 4, 8, 16, 32, 64)
    odd = LLAMA3_8B.model_copy(update={"heads": 9, "kv_heads": 3, "ffn": 1536})
    assert tensor_ways(odd) == (1, 3)
    assert stages(LLAMA3_8B) == 32
    assert (tensor_ways(MEASURED, most=8), stages(MEASURED)) == ((1, 2), 3)


def test_columns_make_points_and_measured_models_bring_their_activations() -> None:
    told = columns_of(DEEPSEEK_V3, 4096)
    rest = {
        field.name: 1.0
        for field in fields(QueryBatch)
        if field.default is MISSING and field.name not in told
    }
    one = make_queries(2, **told, **rest)
    other = make_queries(1, **columns_of(MEASURED, 1), **rest)
    assert one.ffn[0] == 18432  # eight of 2048 and the shared one, as wide as the dense blocks
    assert (one.experts[0], one.active_experts[0], one.activation_bytes) == (256, 8, None)
    both = concatenate([one, other])
    assert both.activation_bytes is not None
    assert both.activation_bytes[2] == 2e4
    assert both.activation_bytes[0] != both.activation_bytes[0]
    assert both.take(both.layers == 3).parameters.tolist() == [1000]


def test_no_sequence_has_no_length() -> None:
    with pytest.raises(ModelError, match=r"seq: 0 .*at least 1"):
        flops_per_token(LLAMA3_8B, 0)
