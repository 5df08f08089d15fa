"""Models cut into stages: the same weights under the same names, and the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from yunlu.core.errors import ModelError
from yunlu.training.models.networks import MLP, ConvNet
from yunlu.training.models.transformer import (
    Block,
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.pipeline_stages import (
    PipelineStage,
    check,
    shared_names,
    split,
    why_not_split,
)

Inputs = tuple[Tensor, ...] | dict[str, Tensor]


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, 40, shape)


def _padded() -> dict[str, Tensor]:
    ids, mask = _tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    ids[1, 4:], mask[1, 4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _causal(**args: Any) -> CausalTransformer:
    sizes = {"vocabulary": 40, "max_length": 16, "width": 16, "layers": 3, "heads": 2}
    return CausalTransformer(**{**sizes, **args})


def _classifier(**args: Any) -> TransformerClassifier:
    return TransformerClassifier(
        vocabulary=40, classes=3, max_length=16, width=16, layers=3, heads=2, **args
    )


_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_GPT2 = transformers.GPT2Config(
    vocab_size=40, n_positions=32, n_embd=16, n_layer=3, n_head=2, pad_token_id=0
)
_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
_SLIDING = {"sliding_window": 3, "layer_types": ["full_attention", *["sliding_attention"] * 2]}
_LAYERS = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]

CASES: dict[str, tuple[Any, Inputs]] = {
    "causal": (_causal, (_tokens(2, 7),)),
    "causal, learned": (lambda: _causal(positions="learned"), (_tokens(2, 7),)),
    "causal, untied": (lambda: _causal(tied=False), (_tokens(2, 7),)),
    "causal, packed": (_causal, (_tokens(9), torch.tensor([4, 2, 3]))),
    "classifier": (_classifier, (_tokens(2, 5), _MASK)),
    "classifier, packed": (_classifier, (_tokens(9), torch.tensor([4, 2, 3]))),
    "mlp": (lambda: MLP(inputs=4, outputs=2, hidden=[8, 8]), (torch.randn(3, 4),)),
    "mlp, categories": (
        lambda: MLP(inputs=4, outputs=2, hidden=[8, 8], categories=[3, 5], batch_norm=True),
        (torch.ones(3, 4),),
    ),
    "sequential": (lambda: nn.Sequential(*_LAYERS), (torch.randn(3, 4),)),
    "cnn": (lambda: ConvNet(1, 3, channels=[4, 8]), (torch.randn(2, 1, 8, 8),)),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
        _padded(),
    ),
    "llama, tied": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True)
        ),
        _padded(),
    ),
    "llama classifier": (
        lambda: transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**_GROUPED, num_labels=3)
        ),
        _padded(),
    ),
    "qwen2, sliding": (
        lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**_GROUPED, **_SLIDING, use_sliding_window=True)
        ),
        _padded(),
    ),
    "mistral": (
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED)),
        _padded(),
    ),
    "gemma2": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_GROUPED, head_dim=8)),
        _padded(),
    ),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(_GPT2), _padded()),
    "gpt2 classifier": (lambda: transformers.GPT2ForSequenceClassification(_GPT2), _padded()),
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES)),
        _padded(),
    ),
    "bert, masked": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES)),
        _padded(),
    ),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_stages_one_after_the_other_are_the_model(case: str, count: int) -> None:
    make, inputs = CASES[case]
    model = make()
    stages = split(model, count)
    check(model, stages, inputs)
    whole, parts = model.state_dict(), [stage.state_dict() for stage in stages]
    assert set().union(*parts) == set(whole)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for number, stage in enumerate(stages):
        assert set(parts[number]) - set().union(*parts[:number], *parts[number + 1 :])
        for name, weight in stage.named_parameters():
            assert weight is weights[name]


@pytest.mark.parametrize("case", CASES)
def test_gradients_through_stages_are_those_of_the_model(case: str) -> None:
    make, inputs = CASES[case]
    model = make().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    expected = _gradients(
        model, lambda: model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    )
    stages = split(model, 2)
    got = _gradients(model, lambda: stages[1](inputs, stages[0](inputs)))
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6)


def _gradients(model: nn.Module, call: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    output = call()
    logits = getattr(output, "logits", output)
    (logits.float() ** 2).sum().backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("case", ["causal", "llama, tied", "gpt2", "bert, masked"])
def test_a_tied_weight_has_one_name_on_both_ends(case: str) -> None:
    model = CASES[case][0]()
    stages = split(model, 3)
    (name,) = shared_names(stages)
    assert shared_names(stages)[name] == [0, 2]
    assert name in dict(model.named_parameters())
    assert not any(".token." in name or "embed" in name for name in stages[1].state_dict())


def test_untied_stages_share_nothing() -> None:
    stages = split(_causal(tied=False), 3)
    assert shared_names(stages) == {}
    names = [set(stage.state_dict()) for stage in stages]
    assert sum(map(len, names)) == len(set().union(*names))


def test_work_is_shared_out_evenly() -> None:
    def layers(stages: list[PipelineStage]) -> list[int]:
        return [sum(isinstance(part, Block) for part in stage.modules()) for stage in stages]

    assert layers(split(_causal(layers=8), 4)) == [2, 2, 2, 2]
    assert layers(split(_causal(layers=7), 2)) == [4, 3]
    # The output layer is work too.
    assert layers(split(_causal(layers=8, vocabulary=1000), 2)) == [6, 2]


def test_modes_and_modules_of_the_model_stay_as_they_were() -> None:
    model = _classifier()
    before = {name: id(module) for name, module in model.named_modules()}
    model.layers[1].eval()
    stages = split(model, 2)
    check(model, stages, (_tokens(2, 5), _MASK))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert model.training
    assert not model.layers[1].training
    stages[0].eval()
    assert not model.layers[0].training


class _Skipping(nn.Module):
    """Uses what the layers got once more after them."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x + start


def test_a_model_whose_layers_are_not_a_chain_is_refused() -> None:
    model = _Skipping()
    with pytest.raises(ModelError, match="pass on more than one tensor"):
        check(model, split(model, 2), (torch.randn(3, 4),))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer, nn.Linear(8, 8), layer])
        self.layers[2] = nn.Linear(8, 8)
        self.layers[2].weight = layer.weight


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_causal(layers=3), "3 layers are fewer than 4 stages"),
        (nn.Linear(3, 3), "no list of layers"),
        (
            Seq2SeqTransformer(vocabulary=40, max_length=8, width=16, heads=2),
            "several stacks of layers",
        ),
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
                )
            ),
            "several stacks of layers",
        ),
        (_Twice(), "one weight in different layers"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_a_reason(
    model: nn.Module, reason: str
) -> None:
    assert reason in (why_not_split(model, 4) or "")
    with pytest.raises(ModelError, match=reason):
        split(model, 4)
