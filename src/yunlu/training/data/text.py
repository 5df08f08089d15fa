"""Texts as token ids: encoded once, stored in one array, padded per batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from yunlu.core.errors import DataError, ModelError
from yunlu.core.json_decode import read_json
from yunlu.training.data.table import FileRef
from yunlu.training.models.hf import find_hf_directory, names_hf

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from yunlu.spec.job import Job, ModelSpec
    from yunlu.training.data.table import DataTable
    from yunlu.training.data.tokenizer import Tokenizer

_LONGEST = 512
_TEXTS_AT_ONCE = 10_000


class TokenLists:
    """Many lists of ids in one array."""

    def __init__(self, lists: Iterable[Sequence[int]], *, size: int) -> None:
        kind = id_type(size)
        arrays = [np.asarray(ids, dtype=kind) for ids in lists]
        lengths = [len(array) for array in arrays]
        self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self.ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=kind)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of one text."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each text."""
        return np.diff(self.starts)

    @property
    def longest(self) -> int:
        """Tokens in the longest text."""
        return int(self.lengths.max(initial=0))


def id_type(size: int) -> type[np.uint16 | np.uint32]:
    """The smallest type that holds every id of a vocabulary."""
    return np.uint16 if size <= 1 << 16 else np.uint32


def texts_of(table: DataTable, names: Sequence[str], *, part: str) -> list[str]:
    """The texts of one or several joined columns; a missing value is an error with its row."""
    columns = [table[name] for name in names]
    texts: list[str] = []
    for index, values in enumerate(zip(*columns, strict=True)):
        for name, value in zip(names, values, strict=True):
            if value is None or value != value:  # noqa: PLR0124 - NaN is what a missing number is
                row = table.source_row(index)
                raise DataError(f"row {row} of the {part} data has no {name!r}")
            if isinstance(value, (dict, list, bytes, np.ndarray, FileRef)):
                kind = type(value).__name__
                raise DataError(f"column {name!r} holds {kind}, not text", hint="set data.input")
        texts.append("\n".join(str(value) for value in values))
    return texts


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int, closed: bool = False
) -> TokenLists:
    """Encode all texts with special tokens, in chunks; an empty text is a single ``eos``.

    ``closed`` ends each with ``eos``, which not every tokenizer adds: without it a model that
    writes would never learn to stop.
    """

    def lists() -> Iterable[list[int]]:
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            some = texts[first : first + _TEXTS_AT_ONCE]
            for ids in tokenizer.encode_batch(some, ends=True, max_length=max_length):
                if not ids or (closed and ids[-1] != tokenizer.eos):
                    yield [*ids[: max_length - 1], tokenizer.eos]
                else:
                    yield ids

    return TokenLists(lists(), size=tokenizer.size)


def fit_length(job: Job, tokenizer: Tokenizer, *, default: int = _LONGEST) -> int:
    """The longest sample in tokens: the job's value, else ``default``, limited by the model."""
    limit = _longest_input(job.model, tokenizer)
    requested = job.data.max_length
    if requested == "auto":
        return default if limit is None else min(default, limit)
    if limit is not None and requested > limit:
        raise ModelError(
            f"data.max_length: {requested} is more than the {limit} tokens {job.model.name} can read.",
            hint=f"use at most {limit}",
        )
    return requested


def pad(lists: Sequence[np.ndarray], fill: int) -> tuple[Tensor, Tensor]:
    """Ids ``(B, L)`` and a mask that is true at real tokens."""
    lengths = torch.tensor([len(ids) for ids in lists])
    padded = np.full((len(lists), max(int(lengths.max()), 1)), fill, dtype=np.int64)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return torch.from_numpy(padded), mask


def concatenate(lists: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Ids ``(T,)`` of all texts in one row, and the length of each."""
    ids = np.concatenate(lists).astype(np.int64)
    return torch.from_numpy(ids), torch.tensor([len(ids) for ids in lists])


def token_config(job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenizer settings for a Hugging Face configuration."""
    if job.model.pretrained or tokenizer.name == job.model.name:
        return {"pad_token_id": tokenizer.pad}
    marks = {"pad_token_id": tokenizer.pad, "bos_token_id": tokenizer.bos}
    return {**marks, "eos_token_id": tokenizer.eos, "vocab_size": tokenizer.size}


def check_vocabulary(job: Job, model: nn.Module, tokenizer: Tokenizer) -> None:
    """Check that a Hugging Face model has an embedding for every id of the tokenizer."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is not None and rows < tokenizer.size:
        raise ModelError(
            f"{job.model.name} knows {rows} tokens, but the tokenizer {tokenizer.name} "
            f"has {tokenizer.size}.",
            hint="use the tokenizer the model was trained with",
        )


def save_tokenizer(tokenizer: Tokenizer, directory: Path, **settings: Any) -> None:
    """Save the tokenizer, and ``preprocessing.json`` with the other settings to use the model."""
    tokenizer.save(directory)
    marks = {"pad": tokenizer.pad, "bos": tokenizer.bos, "eos": tokenizer.eos}
    parts = {"tokenizer": tokenizer.name, **marks, **settings}
    text = json.dumps(parts, indent=2, ensure_ascii=False)
    (directory / "preprocessing.json").write_text(text + "\n", encoding="utf-8")


def _longest_input(spec: ModelSpec, tokenizer: Tokenizer) -> int | None:
    limits = [tokenizer.limit]
    if names_hf(spec.name):
        path = find_hf_directory(spec.name) / "config.json"
        try:
            config = read_json(path)
        except ModelError:
            config = {}  # reported when the model is built
        keys = ("max_position_embeddings", "n_positions")
        limits += [{**config, **spec.args}.get(key) for key in keys]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)
