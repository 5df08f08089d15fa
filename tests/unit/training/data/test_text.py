from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.training.tiny_hf import save_tokenizer
from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.data.table import DataTable, ImageRef
from yunlu.training.data.text import TokenLists, encode, fit_length, pad, texts_of
from yunlu.training.data.tokenizer import ByteTokenizer, HfTokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_lists_of_ids_are_kept_flat_and_given_back() -> None:
    lists = TokenLists([[1, 2], [3], [4, 5, 6]], size=300)
    assert [lists[index].tolist() for index in range(len(lists))] == [[1, 2], [3], [4, 5, 6]]
    assert lists.ids.dtype == np.uint16
    assert lists.longest == 3
    assert TokenLists([[70_000]], size=100_000)[0].tolist() == [70_000]


def test_padding_fills_the_end_and_the_mask_tells() -> None:
    ids, mask = pad([np.array([1, 2], np.uint16), np.array([3], np.uint16)], 9)
    assert ids.tolist() == [[1, 2], [3, 9]]
    assert ids.dtype == torch.int64
    assert mask.tolist() == [[True, True], [True, False]]


def test_an_empty_text_is_still_a_sample() -> None:
    tokenizer = ByteTokenizer()
    assert encode(tokenizer, ["", "a"], max_length=9)[0].tolist() == [tokenizer.eos]


def test_a_target_ends_with_its_mark_whatever_the_tokenizer_does(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = HfTokenizer(tmp_path, "tiny")
    texts = ["the lamp", "the lamp is good", ""]
    for max_length in (2, 50):
        plain = encode(tokenizer, texts, max_length=max_length)
        closed = encode(tokenizer, texts, max_length=max_length, closed=True)
        assert plain[1][-1] != tokenizer.eos
        assert all(closed[index][-1] == tokenizer.eos for index in range(3))
        assert closed.longest <= max_length


def test_several_columns_are_joined_and_numbers_spelled() -> None:
    table = DataTable({"title": ["a", "b"], "stars": np.array([1, 2])})
    assert texts_of(table, ["title", "stars"], part="training") == ["a\n1", "b\n2"]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_text_is_named_with_its_row(missing: object) -> None:
    table = DataTable({"text": ["a", missing, "b"]}).take([0, 1])
    with pytest.raises(DataError, match="row 2 of the test data has no 'text'"):
        texts_of(table, ["text"], part="test")


def test_a_column_of_lists_is_not_text() -> None:
    with pytest.raises(DataError, match="holds list, not text"):
        texts_of(DataTable({"x": [[1], [2]]}), ["x"], part="training")


def test_files_are_not_text() -> None:
    with pytest.raises(DataError, match="holds ImageRef, not text"):
        texts_of(DataTable({"image": [ImageRef("cat/1.png")]}), ["image"], part="training")


def test_a_length_beyond_what_the_tokenizer_allows_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.limit = 64

    def job(length: object) -> Job:
        return Job.model_validate(
            {"task": "t", "model": "m", "data": {"train": "x", "max_length": length}}
        )

    assert fit_length(job("auto"), tokenizer) == 64
    assert fit_length(job(50), tokenizer) == 50
    with pytest.raises(ModelError, match="more than the 64 tokens"):
        fit_length(job(65), tokenizer)
