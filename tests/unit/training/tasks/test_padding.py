"""Which ways to treat lengths a task offers, and what it says to the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.training.tiny_hf import save_bert, save_gpt2, save_t5
from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.data.batches import lengths_of
from yunlu.training.tasks.task import check_padding, collate_for, open_task, padding_options

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from yunlu.training.tasks.task import Splits, Task

SMALL: dict[str, Any] = {"name": "transformer", "args": {"width": 16, "layers": 1, "heads": 2}}
EVEN = {"split": {"validation": 0, "test": 0}}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reviews(folder: Path, *, even: bool = False) -> str:
    texts = ["the lamp is good", "the lamp is bad" + " again" * (0 if even else 3)]
    if even:
        texts = ["the lamp is good"] * 2
    rows = [{"text": texts[n % 2], "label": "ab"[n % 2]} for n in range(40)]
    return write(folder / "reviews.jsonl", rows)


def built(task: str, model: Any, data: Any) -> tuple[Task, nn.Module, Splits]:
    job = Job.model_validate({"task": task, "model": model, "data": data})
    opened = open_task(task)
    splits = opened.load(job)
    return opened, opened.build(job), splits


def test_texts_can_be_padded_sorted_or_packed(tmp_path: Path) -> None:
    made = built("text-classification", SMALL, reviews(tmp_path))
    assert padding_options(*made) == ["pad", "bucket", "pack"]
    task, _, splits = made
    samples = [splits.train[index] for index in range(4)]
    assert collate_for(task, "pack")(samples).padding == 0
    assert collate_for(task, "bucket")(samples).padding == task.collate(samples).padding > 0


def test_an_encoder_of_hugging_face_can_be_packed_and_a_decoder_cannot(tmp_path: Path) -> None:
    data = reviews(tmp_path)
    encoder = {"name": str(save_bert(tmp_path / "bert"))}
    decoder = {"name": str(save_gpt2(tmp_path / "gpt2"))}
    assert "pack" in padding_options(*built("text-classification", encoder, data))
    assert padding_options(*built("text-classification", decoder, data)) == ["pad", "bucket"]


def test_pairs_are_as_long_as_both_sides(tmp_path: Path) -> None:
    rows = [{"source": "ab" * (n % 5 + 1), "target": "c" * (n % 3 + 1)} for n in range(40)]
    data = write(tmp_path / "pairs.jsonl", rows)
    made = built("seq2seq", SMALL, data)
    assert padding_options(*made) == ["pad", "bucket", "pack"]
    lengths = lengths_of(made[2].train)
    assert lengths is not None
    assert lengths.shape == (len(made[2].train), 2)
    theirs = built("seq2seq", {"name": str(save_t5(tmp_path / "t5"))}, data)
    assert padding_options(*theirs) == ["pad", "bucket"]


@pytest.mark.parametrize(
    ("task", "model", "data"),
    [
        ("language-modeling", SMALL, {"train": "synthetic:python-docs", "limit": 40}),
        ("image-classification", {"name": "cnn"}, {"train": "sklearn:digits", "limit": 40}),
        ("tabular-regression", {"name": "mlp"}, {"train": "sklearn:diabetes", "limit": 40}),
    ],
)
def test_data_of_one_size_has_nothing_to_choose(task: str, model: Any, data: Any) -> None:
    assert padding_options(*built(task, model, data)) == ["pad"]


def test_texts_that_happen_to_be_equally_long_have_nothing_to_choose(tmp_path: Path) -> None:
    made = built("text-classification", SMALL, {"train": reviews(tmp_path, even=True), **EVEN})
    assert padding_options(*made) == ["pad"]


def test_a_way_that_is_not_offered_is_refused_with_what_to_do() -> None:
    check_padding("pad", ["pad"])
    check_padding("pack", ["pad", "bucket", "pack"])
    with pytest.raises(ModelError, match=r"train\.padding: pack needs a model") as caught:
        check_padding("pack", ["pad", "bucket"])
    assert "bucket" in str(caught.value.hint)
    for asked in ("bucket", "pack"):
        with pytest.raises(DataError, match=f"{asked} is for samples of different length"):
            check_padding(asked, ["pad"])
