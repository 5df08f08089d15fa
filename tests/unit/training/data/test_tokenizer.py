from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from tests.unit.training.tiny_hf import save_bert
from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import DataSpec, ModelSpec
from yunlu.training.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    HfTokenizer,
    Tokenizer,
    choose_tokenizer,
    fitting_vocabulary,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["the lamp is good", "云炉 the lamp is not bad", "naïve — “quotes”\n\ttab  two  spaces"] * 3
BYTES, BPE = ByteTokenizer(), BpeTokenizer(TEXTS, vocabulary=320)
OWN = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])


@OWN
@given(text=st.text(st.characters(codec="utf-8")))
@settings(deadline=None, max_examples=60)
def test_every_text_survives_the_way_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    plain, ended = (tokenizer.encode_batch([text], ends=ends)[0] for ends in (False, True))
    assert tokenizer.decode(plain) == text
    assert ended == [*plain, tokenizer.eos]
    assert tokenizer.decode([tokenizer.bos, *ended, tokenizer.pad]) == text
    assert all(0 <= number < tokenizer.size for number in ended)


@OWN
def test_a_long_text_is_cut_and_keeps_its_end_mark(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_batch(["the lamp is good"])[0]
    assert tokenizer.encode_batch(["the lamp is good"], max_length=3) == [whole[:3]]
    cut = tokenizer.encode_batch(["the lamp is good"], ends=True, max_length=3)[0]
    assert cut == [*whole[:2], tokenizer.eos]


@OWN
def test_a_lone_surrogate_does_not_stop_the_run(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_batch(["a\ud800b"])[0]) == "a?b"


@OWN
def test_the_saved_file_gives_any_reader_the_same_ids(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    read = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert read.encode(text).ids == tokenizer.encode_batch([text])[0]
    marks = [read.token_to_id(mark) for mark in ("<pad>", "<bos>", "<eos>")]
    assert marks == [tokenizer.pad, tokenizer.bos, tokenizer.eos]
    assert read.get_vocab_size() == tokenizer.size


def test_training_twice_on_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    files: list[bytes] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        BpeTokenizer(TEXTS, vocabulary=320).save(tmp_path / name)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1]


def test_frequent_words_become_single_tokens() -> None:
    assert len(BPE.encode_batch([" lamp"])[0]) == 1
    assert len(BYTES.encode_batch([" lamp"])[0]) == 5


def test_the_vocabulary_grows_with_the_data_up_to_a_limit() -> None:
    assert fitting_vocabulary(["short"]) == 512
    assert fitting_vocabulary(["x" * 200_000]) == 2000
    assert fitting_vocabulary(["x" * 9_000_000]) == 8192


def choose(
    model: str = "transformer",
    *,
    small: str = "bytes",
    texts: Any = TEXTS,
    pretrained: bool = True,
    **data: Any,
) -> Tokenizer:
    spec = ModelSpec(name=model, pretrained=pretrained)
    return choose_tokenizer(DataSpec(train="x", **data), spec, texts, small=small)


def test_auto_follows_the_size_of_the_data() -> None:
    assert choose(small="bytes").name == "bytes"
    assert choose(small="bpe").name == "bpe"
    assert choose(small="bytes", texts=["many words " * 200_000]).name == "bpe"


def test_auto_follows_a_hugging_face_model(tmp_path: Path) -> None:
    directory = save_bert(tmp_path / "bert")
    tokenizer = choose(f"hf:{directory}")
    assert isinstance(tokenizer, HfTokenizer)
    assert tokenizer.limit == 64
    ids = tokenizer.encode_batch(["the lamp is good"])[0]
    assert tokenizer.decode([*ids, tokenizer.pad]) == "the lamp is good"
    assert tokenizer.encode_batch(["the lamp is good"], max_length=2)[0] == ids[:2]


def test_a_hugging_face_tokenizer_by_directory_serves_any_model(tmp_path: Path) -> None:
    directory = save_bert(tmp_path / "bert")
    assert isinstance(choose(tokenizer=str(directory)), HfTokenizer)


def test_a_pretrained_model_keeps_the_tokenizer_it_was_trained_with(tmp_path: Path) -> None:
    directory = save_bert(tmp_path / "bert")
    with pytest.raises(ModelError, match="trained with its own tokenizer"):
        choose(str(directory), tokenizer="bytes")
    assert choose(str(directory), tokenizer="bytes", pretrained=False).name == "bytes"
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        choose(str(directory))
    assert choose(str(directory), pretrained=False).name == "bytes"


def test_an_unknown_tokenizer_is_named() -> None:
    with pytest.raises(DataError, match="no tokenizer 'word'"):
        choose(tokenizer="word")


def test_the_vocabulary_a_job_asks_for_is_kept() -> None:
    assert choose(tokenizer="bpe", vocabulary=300).size == 300
