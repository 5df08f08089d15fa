from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from yunlu.training.data import text
from yunlu.training.data.text import HFPacking, call_packed, can_pack_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "num_labels": 3,
}
ELECTRA: dict[str, Any] = {**SIZES, "embedding_size": 16}
LENGTHS = [9, 2, 17, 1, 6]


def bert(**changes: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**{**SIZES, **changes})
    )


def distilbert() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 60, "num_labels": 3, "dim": 16, "hidden_dim": 32}
    config = transformers.DistilBertConfig(n_layers=2, n_heads=2, **sizes)
    return transformers.DistilBertForSequenceClassification(config)


ENCODERS = {
    "bert": bert,
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES)
    ),
    "electra": lambda: transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(**ELECTRA)
    ),
    "distilbert": distilbert,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def padded_inputs(model: Any, lengths: Sequence[int] = LENGTHS) -> dict[str, Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, 60, mask.shape).masked_fill(~mask, model.config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask.long()}


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    targets = torch.arange(len(logits)) % 3
    nn.functional.cross_entropy(logits, targets).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_and_gradients_are_those_of_padding(name: str) -> None:
    model = ENCODERS[name]().eval()
    inputs = padded_inputs(model)
    assert can_pack_hf(model)
    plain = model(**inputs).logits
    expected = gradients(model, plain)
    packed = call_packed(model, inputs, LENGTHS).logits
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-6)
    found = gradients(model, packed)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_changed_sample_changes_no_other() -> None:
    model = bert().eval()
    inputs = padded_inputs(model)
    before = call_packed(model, inputs, LENGTHS).logits
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][2, :17] = 59 - changed["input_ids"][2, :17] % 50
    after = call_packed(model, changed, LENGTHS).logits
    others = [0, 1, 3, 4]
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[2], after[2])


def test_a_packed_model_still_answers_padded_batches_and_is_exported_as_it_was(
    tmp_path: Path,
) -> None:
    model: Any = bert().eval()
    inputs = padded_inputs(model)
    before = model(**inputs).logits
    call_packed(model, inputs, LENGTHS)
    assert torch.equal(model(**inputs).logits, before)
    twin = copy.deepcopy(model)  # as a moving average of the weights is
    torch.testing.assert_close(twin(**inputs).logits, before)
    model.save_pretrained(tmp_path)
    assert "yunlu" not in (tmp_path / "config.json").read_text()
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**inputs).logits, before)


def test_layers_computed_again_in_the_backward_pass_stay_packed() -> None:
    model: Any = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    inputs = padded_inputs(model)
    expected = gradients(model, call_packed(model, inputs, LENGTHS).logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = gradients(model, call_packed(model, inputs, LENGTHS).logits)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_training_drops_attention_in_packed_samples_too() -> None:
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5, classifier_dropout=0.0)
    model.train()
    inputs = padded_inputs(model)
    first, second = (call_packed(model, inputs, LENGTHS).logits for _ in range(2))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(
                vocab_size=60,
                n_embd=16,
                n_layer=1,
                n_head=2,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
            )
        ),
        lambda: transformers.AlbertForSequenceClassification(
            transformers.AlbertConfig(**SIZES, embedding_size=8)
        ),
        lambda: bert(attn_implementation="eager"),
        lambda: nn.Linear(2, 2),
    ],
    ids=["no-encoder", "shared-layers", "own-attention", "not-hugging-face"],
)
def test_what_cannot_be_packed_says_so_and_stays_as_it_was(model: Any) -> None:
    made = model()
    before = getattr(getattr(made, "config", None), "_attn_implementation", None)
    assert not can_pack_hf(made)
    assert getattr(getattr(made, "config", None), "_attn_implementation", None) == before


def test_attention_that_mixes_samples_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = text.attend_apart

    def mixing(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
        together = [sum(lengths[0])]
        return honest(q, k, v, together, together, **options)

    model = bert()
    assert can_pack_hf(model)
    monkeypatch.setattr(text, "attend_apart", mixing)
    assert not can_pack_hf(model)


def test_the_probe_leaves_nothing_behind() -> None:
    model: Any = bert().train()
    state = torch.get_rng_state()
    assert can_pack_hf(model)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_an_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="no encoder"):
        HFPacking(nn.Linear(2, 2))
