from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.errors import DataError, ModelError
from yunlu.training.tasks.scoring import edit_distance
from yunlu.training.tasks.speech_to_text import Characters, TranscriptScorer, clean_text
from yunlu.training.tasks.task import Batch

words = st.text("abc", max_size=8)


@pytest.mark.parametrize(
    ("truth", "said", "edits"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("abc", "cab", 2)],
)
def test_known_distances(truth: str, said: str, edits: int) -> None:
    assert edit_distance(truth, said) == edits


@given(words, words, words)
def test_the_distance_is_a_distance(one: str, two: str, three: str) -> None:
    assert edit_distance(one, two) == edit_distance(two, one)
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert abs(len(one) - len(two)) <= edit_distance(one, two) <= max(len(one), len(two))


def test_texts_are_compared_in_lower_case_with_single_spaces() -> None:
    assert clean_text("  One\tTWO \n") == "one two"


def test_the_characters_are_those_of_the_texts_after_the_blank() -> None:
    characters = Characters.learn(["ba", "a b"])

    assert characters.symbols == {1: " ", 2: "a", 3: "b"}
    assert (characters.blank, characters.size) == (0, 4)
    assert characters.encode("abxa") == [2, 3, 2]  # x was never seen


def test_repeats_are_one_and_blanks_separate() -> None:
    characters = Characters.learn(["ab "])

    assert characters.decode([0, 2, 2, 0, 2, 3, 3, 0, 0]) == "aab"


@given(st.text("ab ", max_size=10).map(clean_text))
def test_a_text_spread_over_just_enough_frames_is_read_back(text: str) -> None:
    characters = Characters.learn(["ab "])
    frames: list[int] = []
    for code in characters.encode(text):
        frames += [0, code] if frames and frames[-1] == code else [code]

    assert len(frames) == characters.frames_needed(text)
    assert characters.decode(frames) == text


def test_texts_without_any_character_are_refused() -> None:
    with pytest.raises(DataError, match="all empty"):
        Characters.learn(["", ""])


def test_a_vocabulary_that_came_with_weights_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"<pad>": 0, "<unk>": 1, "|": 2, "A": 3, "B": 4}))

    characters = Characters.read_hf(path, SimpleNamespace(pad_token_id=0, vocab_size=6))

    assert characters.encode("a b") == [3, 2, 4]
    assert characters.decode([3, 0, 2, 1, 4]) == "a b"
    assert (characters.blank, characters.size) == (0, 6)


@pytest.mark.parametrize("content", ["[1]", "{not json", '{"en": {"a": 1}}'])
def test_a_vocabulary_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(content)

    with pytest.raises(ModelError, match=r"vocab\.json"):
        Characters.read_hf(path, SimpleNamespace(pad_token_id=0, vocab_size=6))


def test_rates_count_over_all_texts_and_frames_beyond_the_end_do_not() -> None:
    characters = Characters.learn(["ab "])
    scorer = TranscriptScorer(characters)
    frames = torch.tensor([[2, 1, 3, 3], [2, 2, 3, 1]])  # "a b", and "a" when only two are real
    batch = Batch(
        inputs=(), targets={"texts": ["a b", "ab"], "names": ["1", "2"]}, samples=2, items=5
    )

    scorer.add((torch.nn.functional.one_hot(frames, 4).float(), torch.tensor([4, 2])), batch)

    found = scorer.result()
    assert found.metrics == {"cer": 1 / 5, "wer": 1 / 3, "exact_match": 1 / 2}
    assert [(e.expected, e.predicted) for e in found.examples] == [("a b", "a b"), ("ab", "a")]
