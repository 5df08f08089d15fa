"""A loaded model answers with the numbers that its run reported."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import yunlu
from yunlu.core.errors import DataError, ModelError, StoreError, YunluError
from yunlu.core.settings import use_keras_on_torch
from yunlu.runs.events import Evaluated
from yunlu.spec.job import Job
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import DataTable

pytestmark = pytest.mark.slow

TINY = {"width": 32, "layers": 1, "heads": 2}
QUICK = {"compile": False, "threads": 1, "workers": 0, "precision": "fp32", "padding": "pad"}


def train(job: dict[str, Any], **train: Any) -> yunlu.Run:
    return yunlu.train(Job.model_validate({**job, "train": {**QUICK, **train}}))


def held_out(run: yunlu.Run) -> DataTable:
    job = Job.model_validate_json((run.dir / "model" / "job.json").read_text())
    table = load_tables(job.data, seed=job.train.seed).test
    assert table is not None
    return table


def accuracy(run: yunlu.Run, inputs: Callable[[DataTable], Any], target: str) -> float:
    table, model = held_out(run), run.load()
    answers = [answer.value for answer in model.predict(inputs(table))]
    truths = [str(value) for value in table[target]]
    return sum(one == other for one, other in zip(answers, truths, strict=True)) / len(truths)


def rows(table: DataTable) -> list[dict[str, Any]]:
    names = list(table.columns)
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*table.columns.values(), strict=True)
    ]


def test_tables_give_the_reported_accuracy_and_error() -> None:
    job = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:wine"}
    run = train(job, epochs=3)
    assert accuracy(run, rows, "label") == pytest.approx(run.metrics["accuracy"])
    first = run.load().predict(rows(held_out(run))[:1])[0]
    assert first.scores is not None
    assert sum(first.scores.values()) == pytest.approx(1.0)
    with pytest.raises(DataError, match="a list of inputs"):
        run.load().predict("text")
    with pytest.raises(DataError, match="has no"):
        run.load().predict([{"alcohol": 1.0}])

    run = train(
        {"task": "tabular-regression", "model": "mlp", "data": "sklearn:diabetes"}, epochs=3
    )
    table = held_out(run)
    answers = run.load().predict(rows(table))
    errors = [float(a.value) - float(t) for a, t in zip(answers, table["target"], strict=True)]
    rmse = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert rmse == pytest.approx(run.metrics["rmse"], rel=1e-4)


def test_images_and_int8_give_the_reported_accuracy() -> None:
    job = {
        "task": "image-classification",
        "model": "cnn",
        "data": {"train": "sklearn:digits", "limit": 400},
    }
    run = train(job, epochs=2)
    reported = run.metrics["accuracy"]
    assert accuracy(run, lambda table: table["image"], "label") == pytest.approx(reported)
    pytest.importorskip("torchao")
    job = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:wine"}
    run = train(job, epochs=3, quantize="int8")
    assert (run.dir / "model" / "model.int8.safetensors").is_file()
    assert accuracy(run, rows, "label") == pytest.approx(run.metrics["accuracy"], abs=0.06)
    kinds = {type(weight.data).__name__ for weight in run.load().module.parameters()}
    assert kinds & {"Int8Tensor", "IntxUnpackedToInt8Tensor"}


def test_texts_are_classified_continued_and_answered_as_in_the_evaluation() -> None:
    small = {"name": "transformer", "args": TINY}
    run = train(
        {
            "task": "text-classification",
            "model": small,
            "data": {"train": "synthetic:reviews", "limit": 300},
        },
        epochs=2,
    )
    reported = run.metrics["accuracy"]
    assert accuracy(run, lambda table: table["text"], "label") == pytest.approx(reported)

    run = train(
        {"task": "seq2seq", "model": small, "data": {"train": "synthetic:dates", "limit": 300}},
        epochs=2,
    )
    tested = [event for event in run.events() if isinstance(event, Evaluated)][-1]
    examples = tested.examples
    answers = run.load().predict([example.input for example in examples])
    assert [answer.value for answer in answers] == [example.predicted for example in examples]

    run = train(
        {"task": "language-modeling", "model": small,
         "data": {"train": "synthetic:python-docs", "max_length": 64, "limit": 50}},
        steps=5,
    )  # fmt: skip
    tested = [event for event in run.events() if isinstance(event, Evaluated)][-1]
    answers = run.load().predict([example.input for example in tested.examples])
    assert [answer.value for answer in answers] == [one.predicted for one in tested.examples]


def test_ratings_give_the_reported_error() -> None:
    job = {"task": "recommendation", "model": {"name": "factors", "args": {"dim": 4}},
           "data": {"train": "synthetic:films", "limit": 2000}}  # fmt: skip
    run = train(job, epochs=1)
    table = held_out(run)
    user, item, rating = list(table.columns)[:3]
    answers = run.load().predict(list(zip(table[user], table[item], strict=True)))
    errors = [float(a.value) - float(t) for a, t in zip(answers, table[rating], strict=True)]
    rmse = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert rmse == pytest.approx(run.metrics["rmse"], rel=1e-4)


def test_a_model_of_ones_own_is_built_again_and_elsewhere_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, inputs, outputs):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(inputs, outputs)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    job = {"task": "tabular-classification", "model": "own_net:Net", "data": "sklearn:wine"}
    run = train(job, epochs=2)
    assert accuracy(run, rows, "label") == pytest.approx(run.metrics["accuracy"])

    copied = tmp_path / "copied"
    shutil.copytree(run.dir / "model", copied)
    with pytest.raises(ModelError, match="which is code"):
        yunlu.load_model(copied)
    assert yunlu.load_model(copied, trust_code=True).predict(rows(held_out(run))[:1])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_model_is_whole_in_its_export(tmp_path: Path) -> None:
    use_keras_on_torch()
    keras = pytest.importorskip("keras")
    net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    net.save(tmp_path / "net.keras")
    job = {"task": "image-classification", "model": str(tmp_path / "net.keras"),
           "data": {"train": "sklearn:digits", "limit": 200}}  # fmt: skip
    run = train(job, epochs=1)
    (tmp_path / "net.keras").unlink()  # the export is whole without it
    reported = run.metrics["accuracy"]
    assert accuracy(run, lambda table: table["image"], "label") == pytest.approx(reported)


def test_a_fine_tuned_hugging_face_model_predicts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "bert")
    job = {
        "task": "text-classification",
        "model": {"name": f"hf:{tmp_path / 'bert'}", "pretrained": False},
        "data": {
            "train": "synthetic:reviews",
            "limit": 100,
            "tokenizer": "bytes",
            "max_length": 48,
        },
    }
    run = train(job, epochs=1)
    reported = run.metrics["accuracy"]
    assert accuracy(run, lambda table: table["text"], "label") == pytest.approx(reported)


def test_what_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no exported model"):
        yunlu.load_model(tmp_path)
    with pytest.raises(ModelError, match="There is no directory"):
        yunlu.load_model(tmp_path / "nowhere")
    with pytest.raises((StoreError, YunluError)):
        yunlu.load_model("nowhere")
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    run = yunlu.train(model=nn.Linear(3, 2), data=(x, y), epochs=1)
    with pytest.raises(ModelError, match="live Python objects"):
        run.load()
