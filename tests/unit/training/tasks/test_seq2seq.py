from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.training.tiny_hf import save_t5
from yunlu.core.errors import DataError
from yunlu.spec.job import Job
from yunlu.training.tasks.scoring import GenerativeOutputs
from yunlu.training.tasks.seq2seq import Seq2Seq
from yunlu.training.tasks.task import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.training.tasks.task import Splits

SMALL: dict[str, Any] = {"name": "transformer", "args": {"width": 32, "layers": 1, "heads": 2}}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The answer is the number, written by its word."""
    words = ("one", "two", "three", "four", "five")
    rows = [{"source": f"{n % 5 + 1}!", "target": words[n % 5]} for n in range(100)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(data: Path | str, model: Any = SMALL, **more: Any) -> Job:
    return Job.model_validate(
        {"task": "seq2seq", "model": model, "data": {"train": str(data), **more}}
    )


def load(job: Job) -> tuple[Seq2Seq, Splits]:
    task = Seq2Seq()
    return task, task.load(job)


def all_of(task: Seq2Seq, samples: Any) -> Batch:
    return task.collate([samples[index] for index in range(len(samples))])


def fit(task: Seq2Seq, model: nn.Module, samples: Any, *, steps: int, lr: float = 0.01) -> None:
    batch = task.collate([samples[index] for index in range(20)])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = task.loss(model, batch)
        (loss / batch.items).backward()
        optimizer.step()
    model.eval()


def test_it_learns_to_write_the_answer_by_itself(pairs: Path) -> None:
    torch.manual_seed(0)
    job = make_job(pairs)
    task, splits = load(job)
    model = task.build(job)
    fit(task, model, splits.train, steps=80)
    batch, scorer = all_of(task, splits.test), task.scorer()
    scorer.add(task.loss(model, batch)[1], batch)
    result = scorer.result()
    assert result.metrics == {
        "exact_match": 1.0,
        "character_error_rate": 0.0,
        "token_accuracy": 1.0,
    }
    assert result.examples[0].input.endswith("!")
    assert result.examples[0].expected == result.examples[0].predicted


def test_the_decoder_reads_the_true_tokens_one_place_late(pairs: Path) -> None:
    task, splits = load(make_job(pairs))
    batch = task.collate([splits.train[0], splits.train[2]])
    source, mask, given = batch.inputs
    assert isinstance(source, Tensor)
    bos, eos = task.tokenizer.bos, task.tokenizer.eos
    assert given[:, 0].tolist() == [bos, bos]
    for row, (_, target) in enumerate((splits.train[0], splits.train[2])):
        length = len(target)
        assert given[row, 1:length].tolist() == target[:-1].tolist()
        assert batch.targets[row, :length].tolist() == target.tolist()
        assert target[-1] == eos
        assert (batch.targets[row, length:] == -100).all()
    assert batch.items == int((batch.targets != -100).sum())
    assert mask.all()


def test_a_batch_in_parts_has_the_same_loss(pairs: Path) -> None:
    job = make_job(pairs)
    task, splits = load(job)
    model = task.build(job)
    samples = [splits.train[index] for index in range(5)]
    whole, parts = task.collate(samples), [task.collate([sample]) for sample in samples]
    assert whole.items == sum(part.items for part in parts)
    total = sum(task.loss(model, part)[0] for part in parts)
    torch.testing.assert_close(task.loss(model, whole)[0], total)


def test_wrong_answers_are_counted_by_their_letters(pairs: Path) -> None:
    task, splits = load(make_job(pairs))
    tokenizer, scorer = task.tokenizer, task.scorer()
    spelled = [
        tokenizer.decode(target.tolist()) for _, target in (splits.train[0], splits.train[1])
    ]
    batch = task.collate([splits.train[0], splits.train[1]])
    # The first answer is right; the second has one letter too many.
    said = tokenizer.encode_batch([spelled[0], spelled[1] + "x"], ends=True)
    width = max(map(len, said))
    written = torch.tensor([ids + [tokenizer.eos] * (width - len(ids)) for ids in said])
    logits = torch.zeros(*batch.targets.shape, tokenizer.size)
    scorer.add(GenerativeOutputs(logits, lambda *_: written), batch)
    result = scorer.result()
    assert result.metrics["exact_match"] == 0.5
    assert result.metrics["character_error_rate"] == 1 / sum(map(len, spelled))
    assert result.examples[0].predicted == spelled[1] + "x"


def test_what_a_model_writes_after_the_end_does_not_count(pairs: Path) -> None:
    task, splits = load(make_job(pairs))
    batch, scorer, eos = task.collate([splits.train[0]]), task.scorer(), task.tokenizer.eos
    logits = torch.zeros(*batch.targets.shape, task.tokenizer.size)
    scorer.add(GenerativeOutputs(logits, lambda *_: torch.tensor([[eos, 65, 66]])), batch)
    assert scorer.result().examples[0].predicted == ""


def test_writing_is_bounded_however_large_the_split(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yunlu.training.tasks.seq2seq._GENERATED", 7)
    job = make_job(pairs)
    task, splits = load(job)
    model, scorer, asked = task.build(job).eval(), task.scorer(), list[int]()
    for _ in range(3):
        batch = task.collate([splits.train[index] for index in range(5)])
        answers = task.loss(model, batch)[1]

        def write(batch: Batch, count: int, answers: Any = answers) -> Tensor:
            asked.append(count)
            return answers.generate(batch, count)

        scorer.add(type(answers)(answers.logits, write), batch)
    assert asked == [5, 2]


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, source, source_mask, target):
        weight = source_mask.unsqueeze(2).float()
        memory = (self.embed(source) * weight).sum(1)
        return self.head(self.rnn(self.embed(target), memory[None].contiguous())[0])
"""


def test_a_module_of_ones_own_writes_too(pairs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "own_seq2seq_net.py").write_text(OWN)
    job = make_job(pairs, f"{tmp_path}/own_seq2seq_net.py:Own")
    task, splits = load(job)
    model = task.build(job)
    fit(task, model, splits.train, steps=80)
    batch, scorer = all_of(task, splits.test), task.scorer()
    scorer.add(task.loss(model, batch)[1], batch)
    assert scorer.result().metrics["exact_match"] == 1.0


def test_a_hugging_face_model_shifts_and_writes_in_its_own_way(pairs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = make_job(pairs, {"name": f"hf:{save_t5(tmp_path / 't5')}", "args": {"dropout_rate": 0.0}})
    task, splits = load(job)
    model = task.build(job)
    batch = all_of(task, splits.train)
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    mine = task.loss(model, batch)[0] / batch.items
    theirs = model(**batch.inputs, labels=batch.targets).loss
    torch.testing.assert_close(mine, theirs)
    fit(task, model, splits.train, steps=80, lr=0.03)
    scorer = task.scorer()
    scorer.add(task.loss(model, batch)[1], batch)
    assert scorer.result().metrics["exact_match"] > 0.9


@pytest.mark.parametrize(
    ("names", "spec", "found"),
    [
        (("source", "target"), {}, ("source", "target")),
        (("target", "source"), {}, ("source", "target")),
        (("article", "summary"), {}, ("article", "summary")),
        (("label", "text"), {}, ("label", "text")),
        (("de", "en"), {}, ("de", "en")),
        (("de", "en"), {"input": "en"}, ("en", "de")),
        (("de", "en"), {"target": "de"}, ("en", "de")),
        (("input", "output", "note"), {}, ("input", "output")),
        (("a", "b", "c"), {"input": "c", "target": "a"}, ("c", "a")),
    ],
)
def test_source_and_target_are_found(
    tmp_path: Path, names: tuple[str, ...], spec: dict[str, str], found: tuple[str, str]
) -> None:
    path = tmp_path / "d.jsonl"
    row = json.dumps({name: f"some {name}" for name in names})
    path.write_text(f"{row}\n" * 10)
    _, splits = load(make_job(path, **spec))
    assert splits.about["columns"] == f"{found[0]} → {found[1]}"


def test_a_text_with_one_tab_per_line_is_source_and_target(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("".join(f"{n} apples\t{n} Äpfel\n" for n in range(20)))
    task, splits = load(make_job(path))
    source, target = splits.train[0]
    assert task.tokenizer.decode(source.tolist()).endswith("apples")
    assert task.tokenizer.decode(target.tolist()).endswith("Äpfel")


def test_columns_that_cannot_be_told_apart_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"a": "x", "b": "y", "c": "z"}\n' * 10)
    with pytest.raises(DataError, match="a, b, c"):
        load(make_job(path))
    with pytest.raises(DataError, match="no column 'sorce'"):
        load(make_job(path, input="sorce"))


def test_what_it_saves_is_enough_to_use_the_model(pairs: Path, tmp_path: Path) -> None:
    task, _ = load(make_job(pairs))
    task.save_artifacts(tmp_path)
    parts = json.loads((tmp_path / "preprocessing.json").read_text())
    assert parts["bos"] == task.tokenizer.bos
    assert (tmp_path / "tokenizer.json").is_file()
