"""An adapter trains alone, merges to the same answers, and loads in PEFT itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.unit.training import tiny_hf
from yunlu.core.errors import ModelError
from yunlu.spec.job import AdapterSpec
from yunlu.training.models.adapter import (
    add_adapter,
    find_head,
    has_adapter,
    merge_adapter,
    save_adapter,
)
from yunlu.training.models.networks import MLP, ConvGRU, ConvNet, MatrixFactorization
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)

if find_spec("peft") is None:  # importing it takes a second or more
    pytest.skip("peft is not installed", allow_module_level=True)

IDS = torch.arange(24).reshape(3, 8) % 20
MASK = torch.ones(3, 8, dtype=torch.bool)
SMALL: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2, "dropout": 0.0}


def classifier() -> nn.Module:
    return TransformerClassifier(vocabulary=20, classes=3, max_length=8, **SMALL)


def torch_encoder() -> nn.Module:
    """torch's own layers have a fast path in eval mode that reads weights directly."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "classifier": (classifier, (IDS, MASK)),
    "causal": (lambda: CausalTransformer(vocabulary=20, max_length=8, **SMALL), (IDS,)),
    "seq2seq": (
        lambda: Seq2SeqTransformer(vocabulary=20, max_length=8, **SMALL),
        (IDS, MASK, IDS),
    ),
    "mlp": (lambda: MLP(inputs=8, outputs=2, hidden=[16, 16]), (IDS.float(),)),
    "torch": (torch_encoder, (IDS,)),
}


def disturb(model: nn.Module, seed: int = 0) -> None:
    """As training would: an adapter begins as nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data.normal_(0, 0.3, generator=generator)


@pytest.mark.parametrize("kind", MODELS)
def test_merged_answers_are_the_adapted_ones_and_the_class_stays(kind: str) -> None:
    make, inputs = MODELS[kind]
    model = make().eval()
    names, kind_before = list(model.state_dict()), type(model)
    with torch.no_grad():
        plain = model(*inputs)
        adapted = add_adapter(model, AdapterSpec(rank=2))
        assert adapted is model
        torch.testing.assert_close(model(*inputs), plain, atol=1e-6, rtol=0)
        disturb(model)
        before = model(*inputs)
        assert not torch.allclose(before, plain, atol=1e-3)
        merged = merge_adapter(copy.deepcopy(model))
        torch.testing.assert_close(merged(*inputs), before, atol=1e-5, rtol=1e-5)
    assert type(merged) is kind_before
    assert list(merged.state_dict()) == names
    assert not has_adapter(merged)
    assert has_adapter(model)


@given(rank=st.integers(1, 8), alpha=st.floats(0.5, 64), seed=st.integers(0, 100))
def test_any_rank_and_scale_merges(rank: int, alpha: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = MLP(inputs=6, outputs=2, hidden=[9, 7])
    x = torch.randn(4, 6)
    add_adapter(model, AdapterSpec(rank=rank, alpha=alpha))
    disturb(model, seed)
    with torch.no_grad():
        adapted = model(x)
        merged = merge_adapter(model)(x)
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)


def test_only_the_adapter_and_the_head_are_trained() -> None:
    model = TransformerClassifier(vocabulary=200, classes=3, max_length=32, width=64, layers=2)
    add_adapter(model, AdapterSpec(rank=2))
    frozen = {
        name: weight.detach().clone()
        for name, weight in model.named_parameters()
        if not weight.requires_grad
    }
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"head.weight", "head.bias"}
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert count < 0.06 * sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=0.05
    )
    for _ in range(3):
        nn.functional.cross_entropy(model(IDS, MASK), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in model.named_parameters():
        if name in frozen:
            assert torch.equal(weight, frozen[name]), name
        elif "lora_B" in name or name.startswith("head"):
            assert weight.abs().max() > 0


def test_a_layer_with_new_weights_is_fully_trained() -> None:
    model = classifier()
    add_adapter(model, AdapterSpec(rank=2), new=["layers.1.feed.up.weight"])
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {"layers.1.feed.up.weight", "layers.1.feed.up.bias"} <= trained
    assert not any(name.startswith("layers.1.feed.up.lora") for name in trained)


def test_names_are_stable_and_a_copy_goes_on_alone() -> None:
    models = [add_adapter(classifier(), AdapterSpec(rank=2)) for _ in range(2)]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    average = AveragedModel(models[0])
    disturb(models[0])
    average.update_parameters(models[0])
    assert list(average.module.state_dict()) == list(models[0].state_dict())
    merged = merge_adapter(average.module)
    assert not has_adapter(merged)
    assert has_adapter(models[0])


@pytest.mark.parametrize("save", [tiny_hf.save_bert, tiny_hf.save_gpt2, tiny_hf.save_t5])
def test_a_hugging_face_model_is_adapted_but_for_its_head(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers import AutoModelForSequenceClassification as Classifier

    kinds: Any = {"bert": Classifier, "gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}
    name = save.__name__.removeprefix("save_")
    model = kinds[name].from_pretrained(save(tmp_path / "hf")).eval()
    given: dict[str, Tensor] = {"input_ids": IDS, "attention_mask": MASK.long()}
    given |= {"decoder_input_ids": IDS} if name == "t5" else {}
    add_adapter(model, AdapterSpec(rank=2))
    disturb(model)
    trained = [key for key, weight in model.named_parameters() if weight.requires_grad]
    whole = {key for key in trained if ".lora_" not in key}
    assert whole == ({"classifier.weight", "classifier.bias"} if name == "bert" else set())
    assert not any("lm_head" in key for key in trained)
    with torch.no_grad():
        adapted = model(**given).logits
        merge_adapter(model)
        torch.testing.assert_close(model(**given).logits, adapted, atol=1e-5, rtol=1e-5)
        model.save_pretrained(tmp_path / "merged")
        again = kinds[name].from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(again(**given).logits, adapted, atol=1e-5, rtol=1e-5)


def test_the_adapter_alone_is_small_and_peft_puts_it_on_the_base(tmp_path: Path) -> None:
    model = classifier().eval()
    base = copy.deepcopy(model)
    add_adapter(model, AdapterSpec(rank=2))
    disturb(model)
    with torch.no_grad():
        model.get_parameter("head.bias").add_(1.0)
        expected = model(IDS, MASK)
    save_adapter(model, tmp_path / "adapter", base="the-base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["modules_to_save"]) == (2, ["head"])
    assert config["base_model_name_or_path"] == "the-base"
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size < sum(weight.numel() * 4 for weight in base.parameters())
    peft: Any = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS, MASK), expected, atol=1e-6, rtol=0)


def test_named_layers_or_their_ends_are_the_targets() -> None:
    model = add_adapter(classifier(), AdapterSpec(targets=["query", "layers.1.feed.up"]))
    adapted = {name.split(".lora_")[0] for name in model.state_dict() if ".lora_" in name}
    assert adapted == {"layers.0.attention.query", "layers.1.attention.query", "layers.1.feed.up"}


def test_convolutions_are_adapted_when_they_are_named() -> None:
    model = ConvNet(1, 4, channels=[4, 8]).eval()
    images = torch.randn(2, 1, 8, 8)
    add_adapter(model, AdapterSpec(rank=2, targets=["features.0", "features.3"]))
    disturb(model)
    with torch.no_grad():
        adapted = model(images)
        torch.testing.assert_close(merge_adapter(model)(images), adapted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (classifier, ["querry"], r"no layer 'querry'.*\n.*did you mean 'query'"),
        (classifier, ["layers.0.feed.upp"], r"did you mean 'layers.0.feed.up'"),
        (classifier, ["norm"], r"norm is a LayerNorm; lora adapts"),
        (lambda: ConvNet(1, 3), "auto", r"ConvNet has no linear layers to adapt"),
        (
            lambda: MatrixFactorization(users=3, items=4),
            "auto",
            r"MatrixFactorization has no linear layers",
        ),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    model: Callable[[], nn.Module], targets: Any, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        add_adapter(model(), AdapterSpec(targets=targets))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (classifier(), "head"),
        (CausalTransformer(vocabulary=20, max_length=8, **SMALL), None),
        (CausalTransformer(vocabulary=20, max_length=8, tied=False, **SMALL), "head"),
        (Seq2SeqTransformer(vocabulary=20, max_length=8, **SMALL), None),
        (MLP(inputs=3, outputs=2, hidden=[4], dropout=0.1), "layers.3"),
        (ConvNet(1, 3), "classify"),
        (ConvGRU(4, 5), "score"),
        (MatrixFactorization(users=3, items=4), None),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "0"),
    ],
)
def test_the_head_is_the_linear_layer_that_a_model_ends_in(
    model: nn.Module, head: str | None
) -> None:
    assert find_head(model) == head
