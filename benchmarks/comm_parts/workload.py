"""The text, and what is trained on it. Arrays only: no torch, so that whoever measures stays small.

The text is made of words. Each word is followed by one of a few others, with fixed odds, so the entropy
is known: no model can do better, and one that learned only letters or pairs of letters does much worse.
It is made as long as it is needed: no sample is seen twice, so the loss of training is a held-out one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
_SPACE = 32
_ODDS = np.array([0.55, 0.25, 0.12, 0.08])
VOCABULARY = 259
"""Of Yunlu's tokenizer of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A language model of 0.8M parameters and its text."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 32
    host_batch: int = 4
    """Samples of one host in one step."""
    lr: float = 3e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    words: int = 96
    warmup: int = 20
    """Steps in which the rate grows."""
    held_out: int = 256
    """Samples that the loss is taken on."""
    seed: int = 0

    def model_args(self) -> dict[str, Any]:
        """What the model is built from, besides vocabulary and length."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads}

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Language:
    words: list[bytes]
    followers: np.ndarray


def _make_language(workload: Workload) -> _Language:
    random = np.random.default_rng(workload.seed)
    words: list[bytes] = []
    while len(words) < workload.words:
        word = random.choice(_LETTERS, random.integers(2, 8)).tobytes()
        if word not in words:
            words.append(word)
    # Each word comes equally often in the places of the table, so none is rare in the long run.
    columns = [random.permutation(workload.words) for _ in _ODDS]
    return _Language(words, np.stack(columns, axis=1))


def make_text(workload: Workload, samples: int, *, part: int) -> bytes:
    """Text for so many samples; parts are independent of each other."""
    language = _make_language(workload)
    random = np.random.default_rng((workload.seed, part))
    shortest = min(map(len, language.words)) + 1
    count = (samples * workload.length + 1) // shortest + 1
    word = int(random.integers(workload.words))  # first: a longer text begins like a shorter one
    choices = random.choice(len(_ODDS), size=count, p=_ODDS)
    spoken: list[bytes] = []
    length, wanted = 0, samples * workload.length + 1
    for choice in choices:
        spoken.append(language.words[word])
        length += len(spoken[-1]) + 1
        if length >= wanted:
            break
        word = int(language.followers[word, choice])
    return (bytes([_SPACE]).join(spoken) + bytes([_SPACE]))[:wanted]


def read_samples(text: bytes, workload: Workload) -> np.ndarray:
    """Blocks, each one longer than the model's input: token and target overlap."""
    stream = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    starts = np.arange((len(stream) - 1) // workload.length)[:, None] * workload.length
    return stream[starts + np.arange(workload.length + 1)]


def entropy(workload: Workload) -> float:
    """Nats per letter that nobody can predict: of the next word, spread over its letters and its space.

    The table's columns are permutations: in the long run every word comes equally often.
    """
    language = _make_language(workload)
    nats = 0.0
    for row in language.followers:
        odds = np.zeros(workload.words)
        np.add.at(odds, row, _ODDS)
        odds = odds[odds > 0]
        nats -= float((odds * np.log(odds)).sum())
    return nats / sum(len(word) + 1 for word in language.words)
