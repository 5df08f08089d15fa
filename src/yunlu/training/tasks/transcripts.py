"""Texts as character codes, scores as texts, and how far two texts are apart."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError, ModelError
from yunlu.training.models.hf import find_hf_directory, names_hf
from yunlu.training.tasks.media import read_hf_config
from yunlu.training.tasks.task import Batch, Evaluation, Example

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from yunlu.spec.job import ModelSpec

_EXAMPLES = 8
_WORD_BORDER = "|"
"""What Hugging Face's speech vocabularies write for a space."""


def clean_text(text: str) -> str:
    """Lower case, single spaces: how texts are learned and compared."""
    return " ".join(text.lower().split())


class Characters:
    """The characters a model can write; one code is the blank of CTC."""

    def __init__(self, symbols: dict[int, str], *, blank: int, size: int) -> None:
        self.symbols, self.blank, self.size = symbols, blank, size
        self._codes = {symbol: code for code, symbol in symbols.items()}

    @classmethod
    def choose(cls, model: ModelSpec, texts: Iterable[str]) -> Characters:
        """Those of pretrained weights that bring a vocabulary, else those of the texts."""
        if names_hf(model.name) and model.pretrained:
            vocabulary = find_hf_directory(model.name) / "vocab.json"
            if vocabulary.is_file():
                return cls.read_hf(vocabulary, read_hf_config(model))
        return cls.learn(texts)

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Characters:
        """Every character of the training texts, by code point; the blank is 0."""
        found = sorted({character for text in texts for character in text})
        if not found:
            raise DataError(
                "the training texts are all empty",
                hint="name the column of transcripts with data.target",
            )
        return cls(dict(enumerate(found, start=1)), blank=0, size=len(found) + 1)

    @classmethod
    def read_hf(cls, path: Path, config: Any) -> Characters:
        """The vocabulary that came with the weights; its padding is the blank."""
        try:
            vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
            codes = {str(symbol): int(code) for symbol, code in vocabulary.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"{path} is not a table of characters: {error}") from error
        spoken = {
            code: " " if symbol == _WORD_BORDER else symbol.lower()
            for symbol, code in codes.items()
            if len(symbol) == 1 and code != config.pad_token_id
        }
        return cls(spoken, blank=config.pad_token_id, size=config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """The codes of a text; characters that training never saw have none and are left out."""
        return [self._codes[character] for character in text if character in self._codes]

    def decode(self, best: Iterable[int]) -> str:
        """The text of the best code per frame: repeats are one, blanks are none."""
        merged = (code for code, _ in groupby(best))
        return clean_text("".join(self.symbols.get(code, "") for code in merged))

    def frames_needed(self, text: str) -> int:
        """CTC needs a frame per character, and a blank between two that are the same."""
        codes = self.encode(text)
        return len(codes) + sum(a == b for a, b in pairwise(codes))


class TranscriptScorer:
    """Wrong characters and words as shares of those in the true texts, and whole texts right."""

    def __init__(self, characters: Characters) -> None:
        self._characters = characters
        self._edits = {"cer": 0, "wer": 0}
        self._totals = {"cer": 0, "wer": 0}
        self._texts = self._exact = 0
        self._examples: list[Example] = []

    def add(self, outputs: Any, batch: Batch) -> None:
        """Take ``(scores, real lengths)`` and a batch; each is read as its best code per frame."""
        scores, lengths = outputs
        best = scores.argmax(dim=-1).tolist()
        for codes, length, text, name in zip(
            best, lengths.tolist(), batch.targets["texts"], batch.targets["names"], strict=True
        ):
            guess = self._characters.decode(codes[:length])
            self._texts += 1
            self._exact += guess == text
            for metric, truth, said in (
                ("cer", text, guess),
                ("wer", text.split(), guess.split()),
            ):
                self._edits[metric] += edit_distance(truth, said)
                self._totals[metric] += len(truth)
            if len(self._examples) < _EXAMPLES:
                self._examples.append(Example(input=name, expected=text, predicted=guess))

    def result(self) -> Evaluation:
        """``cer``, ``wer`` and ``exact_match``."""
        rates = {name: self._edits[name] / max(1, self._totals[name]) for name in self._edits}
        exact = self._exact / max(1, self._texts)
        return Evaluation(metrics={**rates, "exact_match": exact}, examples=self._examples)


def edit_distance(truth: Sequence[Any], said: Sequence[Any]) -> int:
    """How many insertions, deletions and replacements turn one into the other (Levenshtein, 1966)."""
    above = list(range(len(said) + 1))
    for row, wanted in enumerate(truth, start=1):
        current = [row]
        for column, got in enumerate(said, start=1):
            replaced = above[column - 1] + (wanted != got)
            current.append(min(replaced, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]
