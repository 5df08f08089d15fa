from __future__ import annotations

import datetime
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from yunlu.spec.job import DataSpec
from yunlu.training.data.sources import load_tables, read_text
from yunlu.training.data.synthetic import generate, generate_dates, generate_reviews
from yunlu.training.data.table import DataTable

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_seed_makes_the_same_data() -> None:
    assert generate_reviews(1).fingerprint == generate_reviews(1).fingerprint
    assert generate_reviews(1).fingerprint != generate_reviews(2).fingerprint


@pytest.mark.parametrize("name", ["reviews", "dates"])
def test_no_text_of_the_test_part_stands_in_the_training_part(name: str) -> None:
    tables = load_tables(DataSpec(train=f"synthetic:{name}"), seed=3)
    assert tables.test is not None
    column = "text" if name == "reviews" else "source"
    assert not set(tables.test[column]) & set(tables.train[column])


def test_the_moods_are_balanced() -> None:
    counts = Counter(generate_reviews(0)["label"])
    assert set(counts) == {"negative", "neutral", "positive"}
    assert min(counts.values()) > 0.3 * sum(counts.values())


def test_counting_words_does_not_solve_the_reviews() -> None:
    """Naive Bayes, the best that sums of words can do here, stays far from what is expected."""
    table = generate_reviews(0)
    rows = list(zip(table["label"], (set(text.split()) for text in table["text"]), strict=True))
    train, test = rows[:4800], rows[4800:]
    labels = Counter(label for label, _ in train)
    counts = {label: Counter[str]() for label in labels}
    for label, words in train:
        counts[label].update(words)

    def likelihood(label: str, words: set[str]) -> float:
        share = labels[label] / len(train)
        for word in words:
            share *= (counts[label][word] + 1) / (labels[label] + 2)
        return share

    right = sum(
        max(labels, key=lambda guess: likelihood(guess, words)) == label for label, words in test
    )
    assert right / len(test) < 0.85


def test_dates_are_real_and_written_with_their_own_numbers() -> None:
    table = generate_dates(0)
    for source, target in zip(table["source"][:500], table["target"][:500], strict=True):
        date = datetime.date.fromisoformat(target)
        digits = re.findall(r"\d+", source)
        assert f"{date.year % 100:02d}" in source
        assert any(str(date.day) in number for number in digits)


def test_dates_come_in_many_forms() -> None:
    shapes = {
        re.sub(r"[A-Za-z]+", "a", re.sub(r"\d+", "0", text)) for text in generate_dates(0)["source"]
    }
    assert len(shapes) >= 10


def test_the_python_docs_are_prose_in_a_file_that_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path))
    path = generate("python-docs")
    assert not isinstance(path, DataTable)
    first = path.stat().st_mtime_ns
    assert generate("python-docs") == path
    assert path.stat().st_mtime_ns == first
    text = read_text("synthetic:python-docs")
    assert len(text) > 200_000
    assert "statement" in text
