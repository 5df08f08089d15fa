from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.core.errors import ModelError
from yunlu.planning.models.known_models import own_transformer
from yunlu.planning.models.shape import flops_per_token, parameters, stages, tensor_ways
from yunlu.spec.job import Job
from yunlu.training.model_profiler import describe, main, measure_job, measure_model
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.tasks.task import Batch

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, CLASSES, SAMPLES = 16, 3, 4


class Scores:
    """The least of a task that is measured: a loss over classes."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        assert isinstance(batch.inputs, tuple)
        scores = model(*batch.inputs)
        return functional.cross_entropy(scores, batch.targets, reduction="sum"), scores


def batch_of(*shape: int) -> Batch:
    inputs, targets = torch.randn(SAMPLES, *shape), torch.randint(0, CLASSES, (SAMPLES,))
    return Batch(inputs=(inputs,), targets=targets, samples=SAMPLES, items=SAMPLES)


def measure(build: Any, batch: Batch) -> Any:
    return measure_model(build, Scores(), batch, name="net")  # pyright: ignore[reportArgumentType]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def test_a_perceptron_is_what_one_counts_by_hand() -> None:
    found = measure(perceptron, batch_of(WIDTH))
    shape = found.shape
    assert (found.how, found.note, found.seq) == ("fake", "", 1)
    assert shape.measured_parameters == shape.measured_trainable == 17 * 64 + 65 * CLASSES
    # Nobody asks for the gradient of the inputs: four for the first matrix, six for the second.
    assert shape.measured_flops == 4 * WIDTH * 64 + 6 * 64 * CLASSES
    # Input, rectified numbers (kept once for two layers), log-probabilities, and a target of 8 bytes.
    kept = 4 * (WIDTH + 64 + CLASSES) + 8
    assert shape.measured_activation_bytes == pytest.approx(kept, abs=8)


def test_nothing_is_allocated() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(WIDTH, 10**11)  # 1.6 TB
            self.narrow = nn.Linear(10**11, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x))

    found = measure(Huge, batch_of(WIDTH))
    assert (found.how, found.shape.measured_parameters > 10**12) == ("fake", True)


def test_frozen_weights_are_not_trained_and_cost_less() -> None:
    def frozen() -> nn.Module:
        model = perceptron()
        model.get_submodule("0").requires_grad_(False)
        return model

    shape = measure(frozen, batch_of(WIDTH)).shape
    assert shape.measured_trainable == 65 * CLASSES
    assert shape.measured_flops == 2 * WIDTH * 64 + 6 * 64 * CLASSES - 2 * 64 * CLASSES


class Choosy(nn.Module):
    """Does what the numbers tell it to."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if float(x.sum()) < 1e9 else x


def test_where_numbers_decide_a_real_pass_says_the_same_and_says_so() -> None:
    found = measure(Choosy, batch_of(WIDTH))
    assert found.how == "real"
    assert "fake tensors failed" in found.note
    assert found.shape.measured_flops == 4 * WIDTH * CLASSES


def test_fake_and_real_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def image_net() -> nn.Module:
        body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(8 * 8 * 8, CLASSES))

    batch = batch_of(3, 12, 12)
    fake = measure(image_net, batch)

    def refuse() -> None:
        raise RuntimeError("no pretending")

    monkeypatch.setattr("yunlu.training.model_profiler.FakeTensorMode", refuse)
    real = measure(image_net, batch)
    assert (fake.how, real.how) == ("fake", "real")
    assert fake.shape == real.shape


def test_attention_counts_half_where_it_looks_back() -> None:
    class Reader(nn.Module):
        def __init__(self, *, causal: bool) -> None:
            super().__init__()
            self.make = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, CLASSES)
            self.causal = causal

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.make(x)[:, None].chunk(3, dim=-1)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return self.head(y[:, 0, -1])

    length = 32
    batch = batch_of(length, WIDTH)
    products = 4 * length * WIDTH * 3 * WIDTH + 6 * WIDTH * CLASSES
    for causal, times in ((False, 12), (True, 6)):
        flops = measure(lambda causal=causal: Reader(causal=causal), batch).shape.measured_flops
        assert flops == products + times * length * length * WIDTH


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_our_transformers_are_described_exactly(positions: Any) -> None:
    sizes: dict[str, Any] = {"vocabulary": 50, "max_length": 24, "width": 32, "heads": 2}
    sizes |= {"positions": positions, "layers": 3}
    models = {
        "causal": CausalTransformer(**sizes, tied=False),
        "classifier": TransformerClassifier(**sizes, classes=5),
        "seq2seq": Seq2SeqTransformer(**sizes),
    }
    more: dict[str, dict[str, Any]] = {"causal": {"tied": False}, "classifier": {"classes": 5}}
    for kind, model in models.items():
        shape = describe(model)
        assert shape is not None
        assert parameters(shape) == sum(weight.numel() for weight in model.parameters())
        assert shape == own_transformer(kind, **sizes, **more.get(kind, {}))  # pyright: ignore[reportArgumentType]


def test_our_transformer_computes_what_its_shape_says() -> None:
    class Hidden(nn.Module):
        """The same model under another name: it is measured, not described."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = CausalTransformer(vocabulary=50, max_length=24, width=32, heads=2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)[:, -1]

    ids = torch.randint(0, 50, (SAMPLES, 24))
    batch = replace(batch_of(WIDTH), inputs=(ids,))
    found = measure(Hidden, batch)
    told = own_transformer("causal", vocabulary=50, max_length=24, width=32, heads=2)
    assert found.seq == 24
    assert found.shape.measured_flops == pytest.approx(24 * flops_per_token(told, 24), rel=0.02)
    assert (found.shape.layers, found.shape.hidden) == (4, 32)


def job(**parts: Any) -> Job:
    given = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
    return Job.model_validate({**given, **parts})


def test_a_job_is_measured_on_its_own_data() -> None:
    found = measure_job(job(model={"name": "mlp", "args": {"hidden": [32, 32]}}))
    assert found.shape.measured_parameters == 5 * 32 + 33 * 32 + 33 * 3
    assert found.train_samples == 120
    assert (stages(found.shape), tensor_ways(found.shape)[:3]) == (3, (1, 2, 4))


def test_samples_of_typical_length_are_measured() -> None:
    found = measure_job(job(task="seq2seq", model="transformer", data="synthetic:dates"))
    assert (found.how, found.shape.kind) == ("fake", "encoder-decoder")
    assert 20 < found.seq < 40
    texts = measure_job(
        job(task="text-classification", model="transformer", data="synthetic:reviews")
    )
    assert (texts.shape.kind, texts.shape.headless) == ("encoder", True)


def test_no_weights_are_read(tmp_path: Path) -> None:
    from tests.unit.training.tiny_hf import save_gpt2

    directory = save_gpt2(tmp_path / "gpt2")
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    text = tmp_path / "text.txt"
    text.write_text("the lamp is good\n" * 200)
    found = measure_job(
        job(task="language-modeling", model=f"hf:{directory}", data={"train": str(text)})
    )
    assert (found.shape.kind, found.shape.layers, found.shape.hidden) == ("decoder", 1, 16)


def answer(monkeypatch: pytest.MonkeyPatch, capsys: Any, told: Job) -> dict[str, Any]:
    given = io.TextIOWrapper(io.BytesIO(told.model_dump_json().encode()))
    monkeypatch.setattr("sys.stdin", given)
    assert main([]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_program_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert answer(monkeypatch, capsys, job())["found"]["shape"]["kind"] == "measured"


def test_a_mistake_of_the_user_is_an_answer_too(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wrong = job(model={"name": "mlp", "args": {"depth": 3}})
    error = answer(monkeypatch, capsys, wrong)["error"]
    assert error["code"] == ModelError.code
    assert "model.args.depth" in error["message"]
