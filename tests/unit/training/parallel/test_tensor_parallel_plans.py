"""Which models can be sharded, and the reasons of a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from torch import nn

from yunlu.core.errors import ModelError
from yunlu.spec.job import AdapterSpec
from yunlu.training.models.adapter import add_adapter
from yunlu.training.models.networks import MLP, ConvNet
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.tensor_parallel_plans import (
    find_head,
    find_styles,
    why_not_tensor,
)

SIZES: dict[str, Any] = {"max_length": 8, "width": 24, "layers": 1, "heads": 6}


def _language(**changes: Any) -> CausalTransformer:
    return CausalTransformer(**{"vocabulary": 12, **SIZES, **changes})


def _llama(**changes: Any) -> nn.Module:
    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def test_built_in_transformers_are_sharded_by_their_heads() -> None:
    for model in (
        _language(),
        TransformerClassifier(vocabulary=12, classes=2, **SIZES),
        Seq2SeqTransformer(vocabulary=12, **SIZES),
    ):
        assert why_not_tensor(model, 2, sequence=True) is None
        assert why_not_tensor(model, 6) is None
        assert why_not_tensor(model, 4) == "6 heads cannot be divided among 4 workers"


def test_a_vocabulary_that_does_not_divide_is_replicated() -> None:
    model = _language(vocabulary=13, tied=False)
    styles = find_styles(model, 2)
    assert "embedding.token" not in styles
    assert "head" not in styles
    assert find_head(model, styles) is None


@pytest.mark.parametrize(("tied", "head"), [(True, "embedding.token"), (False, "head")])
def test_the_head_is_the_layer_that_makes_the_scores(tied: bool, head: str) -> None:
    model = _language(tied=tied)
    assert find_head(model, find_styles(model, 2)) == head


def test_a_classifier_has_no_vocabulary_to_shard() -> None:
    model = TransformerClassifier(vocabulary=12, classes=2, **SIZES)
    assert find_head(model, find_styles(model, 2)) is None


def test_layers_of_an_mlp_are_sharded_in_pairs_that_divide() -> None:
    model = MLP(inputs=3, outputs=2, hidden=[5, 8, 4])
    assert find_styles(model, 4) == {"layers.3": "colwise", "layers.6": "rowwise"}
    assert find_styles(model, 5) == {"layers.0": "colwise", "layers.3": "rowwise"}
    assert "divides by 3" in (why_not_tensor(model, 3) or "")
    assert "divides by 2" in (why_not_tensor(MLP(inputs=4, outputs=2, hidden=[]), 2) or "")


def test_columns_under_batch_norm_are_not_sharded() -> None:
    model = MLP(inputs=3, outputs=2, hidden=[8], batch_norm=True)
    assert why_not_tensor(model, 2) is not None


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    assert why_not_tensor(ConvNet(1, 2), 2) == ("there is no tensor-parallel plan for a ConvNet")
    with pytest.raises(ModelError, match="Sequential"):
        find_styles(nn.Sequential(nn.Linear(2, 2)), 2)


def test_replaced_layers_are_not_sharded() -> None:
    class Other(nn.Linear):
        pass

    model = _language()
    model.layers[0].feed.up = Other(24, 96)  # type: ignore[union-attr]
    assert "layers.0.feed.up is a Other" in (why_not_tensor(model, 2) or "")


def test_adapters_are_refused() -> None:
    pytest.importorskip("peft")
    model = add_adapter(_language(), AdapterSpec())
    assert why_not_tensor(model, 2) == "layers with an adapter cannot be split"


def test_plans_of_transformers_are_taken_over() -> None:
    model = _llama()
    styles = find_styles(model, 2)
    assert styles["model.layers.0.self_attn.q_proj"] == "colwise"
    assert styles["model.layers.0.mlp.down_proj"] == "rowwise"
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    assert find_head(model, styles) == "lm_head"


def test_key_value_heads_must_divide_too() -> None:
    assert why_not_tensor(_llama(), 4) == "2 key-value heads cannot be divided among 4 workers"
    assert why_not_tensor(_llama(), 3) == "4 heads cannot be divided among 3 workers"


def test_a_width_that_does_not_divide_is_named() -> None:
    reason = why_not_tensor(_llama(intermediate_size=33), 2)
    assert reason is not None
    assert "mlp.gate_proj has a width of 33" in reason


def test_tied_weights_are_sharded_together_or_not_at_all() -> None:
    model = _llama(tie_word_embeddings=True, vocab_size=25)
    styles = find_styles(model, 2)
    assert "model.embed_tokens" not in styles
    assert "lm_head" not in styles


def test_sequence_parallelism_needs_a_built_in_transformer() -> None:
    assert "sequence" in (why_not_tensor(_llama(), 2, sequence=True) or "")


def test_a_plan_that_names_the_head_alone_is_refused() -> None:
    """GPT-OSS in training: its experts' weights are bare, and its plan leaves every block whole."""
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    )
    assert why_not_tensor(model, 2) == (
        "the tensor-parallel plan of GptOssForCausalLM shards none of its blocks: the weights of its "
        "experts belong to no layer of their own"
    )


def test_models_without_a_plan_and_unknown_styles_are_refused() -> None:
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )
    assert "no tensor-parallel plan for GPT2LMHeadModel" in (why_not_tensor(gpt2, 2) or "")
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
        )
    )
    reason = why_not_tensor(experts, 2)
    assert reason is not None
    assert "not supported" in reason
