from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.training.tiny_hf import save_gpt2
from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.tasks.language_modeling import LanguageModeling, TokenBlocks
from yunlu.training.tasks.task import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.training.tasks.task import Splits

SMALL: dict[str, Any] = {"name": "transformer", "args": {"width": 32, "layers": 1, "heads": 2}}
LINES = [f"line {number} of a small text, with ümlauts" for number in range(200)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES))
    return path


def make_job(data: Path | str, model: Any = SMALL, **more: Any) -> Job:
    spec = {"train": str(data), "max_length": 16, **more}
    return Job.model_validate({"task": "language-modeling", "model": model, "data": spec})


def load(job: Job) -> tuple[LanguageModeling, Splits]:
    task = LanguageModeling()
    return task, task.load(job)


def all_of(task: LanguageModeling, samples: Any) -> Batch:
    return task.collate([samples[index] for index in range(len(samples))])


def spell(task: LanguageModeling, samples: Any) -> str:
    return task.tokenizer.decode(samples.stream.tolist())


@given(tokens=st.integers(2, 200), length=st.integers(1, 50))
def test_every_token_but_the_first_is_a_target_once(tokens: int, length: int) -> None:
    stream = np.arange(tokens, dtype=np.uint16)
    blocks = TokenBlocks(stream, length=length, in_bytes=3 * tokens)
    samples = [blocks[index] for index in range(len(blocks))]
    targets = [int(token) for block, _ in samples for token in block[1:]]
    assert targets == list(range(1, tokens))
    assert sum(count for _, count in samples) == pytest.approx(3 * (tokens - 1))


def test_the_end_of_the_text_is_held_out_between_lines(text: Path) -> None:
    task, splits = load(make_job(text))
    parts = [spell(task, part) for part in (splits.train, splits.validation, splits.test)]
    assert "".join(parts) == text.read_text()
    assert all(part.startswith("line") for part in parts)
    assert len(parts[1]) == pytest.approx(0.1 * len(text.read_text()), rel=0.1)


def test_inputs_and_targets_are_one_token_apart_and_padding_is_not_counted(text: Path) -> None:
    task, splits = load(make_job(text, tokenizer="bytes"))
    last = len(splits.train) - 1
    batch = task.collate([splits.train[0], splits.train[last]])
    targets, in_bytes = batch.targets
    short = len(splits.train[last][0]) - 1
    assert batch.items == 16 + short
    assert batch.inputs[0][0, 1:].tolist() == targets[0, :-1].tolist()
    assert (targets[1, short:] == -100).all()
    assert in_bytes.sum().item() == pytest.approx(batch.items)


def test_a_batch_in_parts_has_the_same_loss(text: Path) -> None:
    job = make_job(text)
    task, splits = load(job)
    model = task.build(job)
    samples = [splits.train[index] for index in (0, 1, len(splits.train) - 1)]
    whole = task.collate(samples)
    parts = [task.collate([sample]) for sample in samples]
    assert whole.items == sum(part.items for part in parts)
    total = sum(task.loss(model, part)[0] for part in parts)
    torch.testing.assert_close(task.loss(model, whole)[0], total)


class Uniform(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.vocabulary)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_knowing_nothing_costs_the_whole_vocabulary(text: Path, tokenizer: str) -> None:
    task, splits = load(make_job(text, tokenizer=tokenizer, vocabulary=400))
    model, scorer = Uniform(task.tokenizer.size), task.scorer()
    batch = all_of(task, splits.test)
    scorer.add(task.loss(model, batch)[1], batch)
    found = scorer.result().metrics
    assert found["perplexity"] == pytest.approx(task.tokenizer.size, rel=1e-4)
    in_bytes = len(spell(task, splits.test).encode())
    tokens = len(splits.test.stream)
    bits = math.log2(task.tokenizer.size) * tokens / in_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_it_learns_and_its_examples_go_on_from_the_text(text: Path) -> None:
    torch.manual_seed(0)
    job = make_job(text)
    task, splits = load(job)
    model = task.build(job)
    batch = task.collate([splits.train[index] for index in range(100)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        loss, _ = task.loss(model, batch)
        (loss / batch.items).backward()
        optimizer.step()
    held_out, scorer = all_of(task, splits.test), task.scorer()
    model.eval()
    with torch.no_grad():
        scorer.add(task.loss(model, held_out)[1], held_out)
    result = scorer.result()
    assert result.metrics["perplexity"] < 12
    assert result.metrics["accuracy"] > 0.3
    example = result.examples[0]
    assert len(example.predicted) >= 1
    assert (example.input + example.expected) in text.read_text()


def test_rows_of_a_table_are_documents_with_an_end_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": line, "n": 1}) + "\n" for line in LINES))
    task, splits = load(make_job(path, tokenizer="bytes"))
    stream: np.ndarray = splits.train.stream
    assert (stream == task.tokenizer.eos).sum() == 160 - 1
    assert len(splits.train) + len(splits.test or ()) > 300


def test_a_folder_with_parts_of_its_own_keeps_them(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    task, splits = load(make_job(tmp_path))
    assert "test" not in spell(task, splits.train)
    assert spell(task, splits.test) == "test " * 300
    assert "train" in spell(task, splits.validation)


def test_a_folder_of_texts_is_one_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    task, splits = load(make_job(tmp_path))
    assert spell(task, splits.train).startswith("a a")
    assert spell(task, splits.test).endswith("b ")


def test_a_program_is_a_text_too(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("print('hello')\n" * 100)
    task, splits = load(make_job(path))
    assert "print" in spell(task, splits.train)


def test_the_fingerprint_follows_the_text(text: Path) -> None:
    before = load(make_job(text))[1].fingerprint
    assert load(make_job(text))[1].fingerprint == before
    text.write_text(text.read_text() + ".")
    assert load(make_job(text))[1].fingerprint != before


def test_a_limit_keeps_that_many_blocks(text: Path) -> None:
    _, splits = load(make_job(text, limit=3))
    assert len(splits.train) == 3


@pytest.mark.parametrize("content", ["", "a"])
def test_a_text_too_short_to_learn_from_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(DataError, match=r"empty|too few"):
        load(make_job(tmp_path / "t.txt"))


def test_a_hugging_face_model_is_trained_by_name(text: Path, tmp_path: Path) -> None:
    job = make_job(text, f"hf:{save_gpt2(tmp_path / 'gpt2')}")
    task, splits = load(job)
    model = task.build(job)
    batch = all_of(task, splits.test)
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    loss, outputs = task.loss(model, batch)
    loss.backward()
    scorer = task.scorer()
    scorer.add(outputs, batch)
    assert scorer.result().metrics["bits_per_byte"] > 0


def test_a_block_longer_than_the_model_can_read_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="more than the 48 tokens"):
        load(make_job(text, f"hf:{save_gpt2(tmp_path / 'gpt2')}", max_length=49))
