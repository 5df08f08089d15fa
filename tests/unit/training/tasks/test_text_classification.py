from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.unit.training.tiny_hf import save_bert, save_gpt2
from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.tasks.task import Batch, call
from yunlu.training.tasks.text_classification import TextClassification

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.training.tasks.task import Splits

SMALL: dict[str, Any] = {"name": "transformer", "args": {"width": 16, "layers": 1, "heads": 2}}
WORDS = {"good": "the lamp is good", "bad": "the old lamp is really very bad"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"text": f"{WORDS[label]} {'again ' * (n % 3)}{n}", "label": label}
        for n in range(20)
        for label in WORDS
    ]
    return write(tmp_path / "data.jsonl", rows)


def make_job(data: Path | str, model: Any = SMALL, *, train: Any = None, **more: Any) -> Job:
    return Job.model_validate(
        {
            "task": "text-classification",
            "model": model,
            "data": {"train": str(data), **more},
            "train": train or {},
        }
    )


def load(job: Job) -> tuple[TextClassification, Splits]:
    task = TextClassification()
    return task, task.load(job)


def all_of(task: TextClassification, samples: Any) -> Batch:
    return task.collate([samples[index] for index in range(len(samples))])


def test_it_learns_to_tell_texts_apart(data: Path) -> None:
    torch.manual_seed(0)
    job = make_job(data)
    task, splits = load(job)
    model = task.build(job)
    batch = all_of(task, splits.train)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss, _ = task.loss(model, batch)
        (loss / batch.items).backward()
        optimizer.step()
    model.eval()
    held_out = all_of(task, splits.test)
    scorer = task.scorer()
    scorer.add(task.loss(model, held_out)[1], held_out)
    result = scorer.result()
    assert result.metrics["accuracy"] == 1.0
    assert result.confusion is not None
    assert result.confusion.labels == ["bad", "good"]
    assert all("lamp is" in example.input for example in result.examples)
    assert all(example.expected == example.predicted for example in result.examples)


def test_a_mistake_is_shown_before_what_went_well(data: Path) -> None:
    task, splits = load(make_job(data))
    batch = all_of(task, splits.train)
    always_bad = torch.tensor([1.0, 0.0]).expand(batch.samples, 2)
    scorer = task.scorer()
    scorer.add(always_bad, batch)
    first = scorer.result().examples[0]
    assert (first.expected, first.predicted) == ("good", "bad")
    assert first.input.startswith(WORDS["good"])


def test_padding_to_a_longer_neighbour_does_not_change_the_loss(data: Path) -> None:
    job = make_job(data)
    task, splits = load(job)
    model = task.build(job).eval()
    samples = [splits.train[index] for index in range(6)]
    together, _ = task.loss(model, task.collate(samples))
    alone = sum(task.loss(model, task.collate([sample]))[0] for sample in samples)
    torch.testing.assert_close(together, alone)


def test_label_smoothing_enters_the_loss(data: Path) -> None:
    plain, smooth = make_job(data), make_job(data, train={"label_smoothing": 0.2})
    losses: list[float] = []
    for job in (plain, smooth):
        task, splits = load(job)
        model = nn.Module()
        model.forward = lambda ids, mask: torch.tensor([3.0, -3.0]).expand(len(ids), 2)
        losses.append(task.loss(model, all_of(task, splits.train))[0].item())
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("columns", "spec"),
    [
        (("Review", "Sentiment"), {}),
        (("words", "kind"), {"input": "words", "target": "kind"}),
        (("anything", "label"), {}),
    ],
)
def test_columns_are_found_by_name_by_custom_or_by_content(
    tmp_path: Path, columns: tuple[str, str], spec: dict[str, str]
) -> None:
    text, label = columns
    rows = [{text: f"{word} {n}", label: word} for n in range(10) for word in ("good", "bad")]
    task, _ = load(make_job(write(tmp_path / "d.jsonl", rows), **spec))
    assert task.labels.names == ["bad", "good"]


def test_columns_that_cannot_be_told_apart_are_listed(tmp_path: Path) -> None:
    rows = [{"one": "a", "two": "b", "label": str(n % 2)} for n in range(10)]
    with pytest.raises(DataError, match="one, two, label"):
        load(make_job(write(tmp_path / "d.jsonl", rows)))


def test_a_wrong_column_suggests_the_nearest(data: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'text'"):
        load(make_job(data, input="txt"))


def test_a_label_unknown_to_training_is_named(data: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "test.jsonl", [{"text": "so so", "label": "mixed"}])
    with pytest.raises(DataError, match="test data has the label 'mixed' in row"):
        load(make_job(data, test=str(other)))


def test_a_missing_label_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    rows = [{"text": "a b", "label": None if n == 30 else "xy"[n % 2]} for n in range(40)]
    with pytest.raises(DataError, match=r"row 31 of the \w+ data has no label"):
        load(make_job(write(tmp_path / "a.jsonl", rows)))


def test_texts_without_labels_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one text\nanother text\n" * 20)
    with pytest.raises(DataError, match="label<TAB>sentence"):
        load(make_job(path))


def test_texts_are_cut_to_the_length_a_job_asks_for(data: Path) -> None:
    task, splits = load(make_job(data, max_length=4, tokenizer="bytes"))
    batch = all_of(task, splits.train)
    assert batch.inputs[0].shape[1] == 4
    assert task.max_length == 4


def test_a_text_longer_than_any_in_training_is_cut_to_what_the_model_knows(
    data: Path, tmp_path: Path
) -> None:
    longer = write(tmp_path / "test.jsonl", [{"text": "lamp " * 300, "label": "bad"}])
    job = make_job(data, test=str(longer))
    task, splits = load(job)
    assert task.loss(task.build(job), all_of(task, splits.test))[0].isfinite()


@pytest.mark.parametrize("save", [save_bert, save_gpt2])
def test_a_hugging_face_model_is_trained_by_name(data: Path, tmp_path: Path, save: Any) -> None:
    job = make_job(data, f"hf:{save(tmp_path / 'hf')}")
    task, splits = load(job)
    model: Any = task.build(job)
    batch = all_of(task, splits.train)
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    loss, outputs = task.loss(model, batch)
    loss.backward()
    scorer = task.scorer()
    scorer.add(outputs, batch)
    assert scorer.result().examples[0].input.endswith(tuple("0123456789"))
    assert model.config.id2label == {0: "bad", 1: "good"}


def test_a_model_too_small_for_the_tokenizer_is_refused(data: Path, tmp_path: Path) -> None:
    directory = save_bert(tmp_path / "bert")
    job = make_job(data, {"name": str(directory), "pretrained": False, "args": {"vocab_size": 9}})
    task, _ = load(job)
    with pytest.raises(ModelError, match="knows 9 tokens"):
        task.build(job)


def test_a_configuration_alone_takes_the_size_of_a_trained_tokenizer(
    data: Path, tmp_path: Path
) -> None:
    directory = save_bert(tmp_path / "bert")
    job = make_job(data, {"name": str(directory), "pretrained": False}, tokenizer="bytes")
    task, splits = load(job)
    model: Any = task.build(job)
    assert model.config.vocab_size == 259
    assert task.loss(model, all_of(task, splits.train))[0].isfinite()


OWN = """
import torch
from torch import nn

class Bag(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, classes, mode="sum")

    def forward(self, ids, mask):
        return self.bag(ids, per_sample_weights=mask.float())

class OnlyIds(nn.Module):
    def forward(self, ids):
        return ids
"""


def test_a_module_of_ones_own_gets_ids_and_mask(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own_bag_of_words.py").write_text(OWN)
    job = make_job(data, f"{tmp_path}/own_bag_of_words.py:Bag")
    task, splits = load(job)
    batch = all_of(task, splits.train)
    assert call(task.build(job), batch).shape == (batch.samples, 2)


def test_a_module_that_takes_other_inputs_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own_only_ids.py").write_text(OWN)
    job = make_job(data, f"{tmp_path}/own_only_ids.py:OnlyIds")
    task, _ = load(job)
    with pytest.raises(ModelError, match=r"does not take \(ids, mask\)"):
        task.build(job)


def test_what_it_saves_is_enough_to_use_the_model(data: Path, tmp_path: Path) -> None:
    task, _ = load(make_job(data))
    task.save_artifacts(tmp_path)
    parts = json.loads((tmp_path / "preprocessing.json").read_text())
    assert parts["labels"] == ["bad", "good"]
    assert parts["max_length"] == task.max_length
    assert (tmp_path / "tokenizer.json").is_file()
