"""Character codes of transcripts, CTC decoding, error rates."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError, ModelError
from yunlu.core.json_decode import read_json
from yunlu.training.models.hf import find_hf_directory, names_hf
from yunlu.training.tasks.media import read_hf_config
from yunlu.training.tasks.task import Batch, Evaluation, Example

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from yunlu.spec.job import ModelSpec

_EXAMPLES = 8
_WORD_BORDER = "|"
"""The space in Hugging Face's speech vocabularies."""


def clean_text(text: str) -> str:
    """Normalise to lower case and single spaces."""
    return " ".join(text.lower().split())


class Characters:
    """The characters of a model; one code is the CTC blank."""

    def __init__(self, symbols: dict[int, str], *, blank: int, size: int) -> None:
        self.symbols, self.blank, self.size = symbols, blank, size
        self._codes = {symbol: code for code, symbol in symbols.items()}

    @classmethod
    def choose(cls, model: ModelSpec, texts: Iterable[str]) -> Characters:
        """Characters of the pretrained weights' vocabulary, else of the texts."""
        if names_hf(model.name) and model.pretrained:
            vocabulary = find_hf_directory(model.name) / "vocab.json"
            if vocabulary.is_file():
                return cls.read_hf(vocabulary, read_hf_config(model))
        return cls.learn(texts)

    @classmethod
    def learn(cls, texts: Iterable[str]) -> Characters:
        """Every character of the training texts, by code point; the blank is 0."""
        characters = sorted({character for text in texts for character in text})
        if not characters:
            raise DataError(
                "the training texts are all empty",
                hint="name the column of transcripts with data.target",
            )
        return cls(dict(enumerate(characters, start=1)), blank=0, size=len(characters) + 1)

    @classmethod
    def read_hf(cls, path: Path, config: Any) -> Characters:
        """Read the vocabulary of pretrained weights; its padding is the blank."""
        try:
            vocabulary: dict[str, int] = read_json(path)
            codes = {str(symbol): int(code) for symbol, code in vocabulary.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"{path} is not a table of characters: {error}") from error
        symbols = {
            code: " " if symbol == _WORD_BORDER else symbol.lower()
            for symbol, code in codes.items()
            if len(symbol) == 1 and code != config.pad_token_id
        }
        return cls(symbols, blank=config.pad_token_id, size=config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """The codes of a text, without unknown characters."""
        return [self._codes[character] for character in text if character in self._codes]

    def decode(self, best: Iterable[int]) -> str:
        """Greedy CTC decoding: merge repeats, remove blanks."""
        merged = (code for code, _ in groupby(best))
        return clean_text("".join(self.symbols.get(code, "") for code in merged))

    def frames_needed(self, text: str) -> int:
        """Fewest frames for CTC: one per character, and a blank between equal ones."""
        codes = self.encode(text)
        return len(codes) + sum(a == b for a, b in pairwise(codes))


class TranscriptScorer:
    """Character and word error rates, and exact match."""

    def __init__(self, characters: Characters) -> None:
        self._characters = characters
        self._edits = {"cer": 0, "wer": 0}
        self._totals = {"cer": 0, "wer": 0}
        self._texts = self._exact = 0
        self._examples: list[Example] = []

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add ``(logits, real lengths)`` and a batch; decoded greedily."""
        scores, lengths = outputs
        best = scores.argmax(dim=-1).tolist()
        for codes, length, text, name in zip(
            best, lengths.tolist(), batch.targets["texts"], batch.targets["names"], strict=True
        ):
            predicted = self._characters.decode(codes[:length])
            self._texts += 1
            self._exact += predicted == text
            for metric, truth, prediction in (
                ("cer", text, predicted),
                ("wer", text.split(), predicted.split()),
            ):
                self._edits[metric] += edit_distance(truth, prediction)
                self._totals[metric] += len(truth)
            if len(self._examples) < _EXAMPLES:
                self._examples.append(Example(input=name, expected=text, predicted=predicted))

    def result(self) -> Evaluation:
        """``cer``, ``wer`` and ``exact_match``."""
        rates = {name: self._edits[name] / max(1, self._totals[name]) for name in self._edits}
        exact = self._exact / max(1, self._texts)
        return Evaluation(metrics={**rates, "exact_match": exact}, examples=self._examples)


def edit_distance(truth: Sequence[Any], predicted: Sequence[Any]) -> int:
    """Levenshtein distance: insertions, deletions and replacements (Levenshtein, 1966)."""
    above = list(range(len(predicted) + 1))
    for row, expected in enumerate(truth, start=1):
        current = [row]
        for column, actual in enumerate(predicted, start=1):
            replaced = above[column - 1] + (expected != actual)
            current.append(min(replaced, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]
