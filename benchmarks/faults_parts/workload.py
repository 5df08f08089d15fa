"""What every contender trains: its size, its text, and the samples of each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

SEED = 0
VOCABULARY = 260
"""Bytes, and room for a tokenizer's own marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A language model of about 2M parameters, on text that is made."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    length: int = 64
    batch: int = 8
    samples: int = 4096
    lr: float = 1e-4
    checkpoint_every: int = 5
    """Steps between checkpoints, where a contender needs them to go on."""

    def model_args(self) -> dict[str, Any]:
        """What the model is built from, besides vocabulary and length."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads}

    def samples_of(self, step: int) -> list[int]:
        """The samples of a step, counted from 0: every one once per epoch."""
        epoch, within = divmod(step, self.samples // self.batch)
        first = within * self.batch
        return _shuffle(self.samples, epoch)[first : first + self.batch].tolist()

    def describe(self) -> dict[str, Any]:
        """As plain values, for a script's command line."""
        return asdict(self)


@lru_cache(maxsize=4)
def _shuffle(samples: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((SEED, epoch)).permutation(samples)


def make_text(path: Path, workload: Workload) -> None:
    """Letters of which each follows one of four others: ``samples`` blocks overlapping by one."""
    random = np.random.default_rng(SEED)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz .,;\n", dtype=np.uint8)
    followers = random.integers(0, len(letters), (len(letters), 4))
    choices = random.integers(0, 4, workload.samples * workload.length)
    places = np.empty(len(choices) + 1, dtype=np.int64)
    places[0] = 0
    for index, choice in enumerate(choices):
        places[index + 1] = followers[places[index], choice]
    path.write_bytes(letters[places].tobytes())


def read_blocks(path: Path, workload: Workload) -> np.ndarray:
    """The blocks, each one longer than the model's input: token and target overlap."""
    stream = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64)
    starts = np.arange(workload.samples)[:, None] * workload.length
    return stream[starts + np.arange(workload.length + 1)]
