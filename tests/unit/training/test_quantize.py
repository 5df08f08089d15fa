from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.checkpoints import Memory
from yunlu.core.errors import ModelError
from yunlu.training.quantize import (
    convert_int8,
    convert_to_fp8,
    fp8_problem,
    load_int8,
    prepare_int8,
)
from yunlu.training.tensor_slices import fill, weights_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if find_spec("torchao") is None:  # importing it takes a second or more
    pytest.skip("torchao is not installed", allow_module_level=True)

CPU = torch.device("cpu")
OUTLIER = 400.0


@pytest.fixture(autouse=True)
def _fast_path() -> Iterator[None]:
    yield
    torch.backends.mha.set_fastpath_enabled(value=True)


def classifier(hidden: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, hidden), nn.ReLU(), nn.Linear(hidden, 4))


def samples(seed: int) -> tuple[Tensor, Tensor]:
    """Labels that a small network gives to random features."""
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(
        requires_grad=False
    )
    for weight in teacher.parameters():
        weight.mul_(2)
    inputs = torch.randn(512, 24, generator=torch.Generator().manual_seed(seed))
    return inputs, teacher(inputs).argmax(-1)


def fit(model: nn.Module, inputs: Tensor, labels: Tensor, *, steps: int, lr: float) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        chosen = torch.randint(0, 512, (126,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return score(model, inputs, labels)


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return functional.cross_entropy(model(inputs), labels).item()


def as_int8(model: nn.Module, directory: Path) -> nn.Module:
    return load_int8(classifier(), convert_int8(model, directory))


def test_fine_tuning_for_int8_loses_less_than_rounding_afterwards(tmp_path: Path) -> None:
    inputs, labels = samples(1)
    model = classifier()
    fit(model, inputs, labels, steps=300, lr=5e-3)
    # The same function in FP32, with one weight in each row that leaves few INT8 steps for the rest.
    inputs[:, 0] /= OUTLIER
    model[0].weight.data[:, 0] *= OUTLIER
    whole = copy.deepcopy(model)
    fit(whole, inputs, labels, steps=150, lr=3e-3)
    rounded = score(as_int8(prepare_int8(whole), tmp_path), inputs, labels)
    aware = prepare_int8(model)
    fit(aware, inputs, labels, steps=150, lr=3e-3)
    assert score(as_int8(aware, tmp_path), inputs, labels) < 0.5 * rounded


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_the_int8_model_answers_as_the_one_that_was_trained_for_it(
    capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Integer products, or the same integers multiplied in FP32: both run on any CPU.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    inputs, _ = samples(1)
    prepared = prepare_int8(classifier())
    loaded = as_int8(prepared, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(inputs), prepared(inputs), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(loaded(inputs), classifier()(inputs), atol=1e-5)


def test_the_int8_file_is_a_quarter_of_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    size = convert_int8(prepare_int8(model), tmp_path).stat().st_size
    assert size < 0.3 * sum(4 * weight.numel() for weight in model.parameters())


def test_weights_keep_their_names_and_values_and_pass_through_a_checkpoint() -> None:
    plain = classifier()
    prepared = prepare_int8(classifier())
    assert list(prepared.state_dict()) == list(plain.state_dict())
    prepared(samples(1)[0]).square().sum().backward()  # what a step leaves behind is no state
    tensors = {name: piece.tensor.clone() for name, piece in weights_of([prepared]).items()}
    for name, value in plain.state_dict().items():
        assert torch.equal(tensors[name], value)
    other = prepare_int8(classifier().apply(_zero))
    fill(weights_of([other]).values(), Memory(tensors))
    inputs = samples(2)[0]
    assert torch.equal(other(inputs), prepared(inputs))
    assert torch.equal(copy.deepcopy(prepared)(inputs), prepared(inputs))


def _zero(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data.zero_()


class Tied(nn.Module):
    """A language model in small: the head is the embedding, and attention is torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


def test_tied_heads_and_attention_stay_whole_and_evaluation_rounds_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Tied()
    prepared = prepare_int8(copy.deepcopy(plain))
    assert type(prepared.head) is nn.Linear
    assert prepared.head.weight is prepared.embed.weight
    kinds = {name for name, module in prepared.named_modules() if "Fake" in type(module).__name__}
    assert {"layer.linear1", "layer.linear2"} <= kinds
    assert "layer.self_attn.out_proj" not in kinds
    tokens = torch.arange(12).view(2, 6)
    loaded = load_int8(copy.deepcopy(plain), convert_int8(prepared, tmp_path))
    with torch.no_grad():
        answers = prepared.eval()(tokens)
        torch.testing.assert_close(loaded.eval()(tokens), answers, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(plain.eval()(tokens), answers, atol=1e-4)


def test_a_model_that_is_one_linear_layer_is_prepared() -> None:
    assert list(prepare_int8(nn.Linear(8, 4)).state_dict()) == ["weight", "bias"]


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no plain linear layer"):
        prepare_int8(nn.Conv2d(1, 1, 3))


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = convert_int8(prepare_int8(classifier()), tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        load_int8(nn.Sequential(nn.Linear(24, 64)), path)
    with pytest.raises(ModelError, match="does not fit"):
        load_int8(classifier(hidden=32), path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="not an INT8 model"):
        load_int8(classifier(), path)


def test_fp8_products_train_near_the_fp32_loss() -> None:
    inputs, labels = samples(1)
    torch.manual_seed(0)
    low = nn.Sequential(
        nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    whole = copy.deepcopy(low)
    converted = convert_to_fp8(low, CPU, emulate=True)
    assert converted == ["2"]  # 24 and 4 are no multiples of 16
    assert list(low.state_dict()) == list(whole.state_dict())
    start = score(whole, inputs, labels)
    low_loss = fit(low, inputs, labels, steps=100, lr=5e-3)
    whole_loss = fit(whole, inputs, labels, steps=100, lr=5e-3)
    assert whole_loss < 0.7 * start
    assert low_loss == pytest.approx(whole_loss, rel=0.1)
    assert low_loss != whole_loss


def test_fp8_is_refused_where_the_device_has_none() -> None:
    problem = fp8_problem(CPU)
    assert problem is not None
    assert "8.9" in problem
    with pytest.raises(ModelError, match="this device is cpu"):
        convert_to_fp8(classifier(), CPU)
