"""Texts as token ids: encoded once, stored in one array, padded per batch or packed without padding.

Packing for Hugging Face encoders: samples are concatenated instead of padded.
The model keeps its usual inputs. Only its encoder, between embeddings and pooling, works on packed
tokens: padding is removed on the way in and restored as zeros on the way out, and attention is computed
per sample. Head, positions and export stay the model's own.

Shapes: B batch, L length, T tokens of all samples, D width, H heads, K width of a head.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes
from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError
from yunlu.core.limits import read_json
from yunlu.training.data.table import FileRef
from yunlu.training.data.tokenizer import exported_tokenizer
from yunlu.training.models.hf import find_hf_directory, is_hf, names_hf
from yunlu.training.models.transformer import attend_apart

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path

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


def parts_of(text: Any) -> list[str]:
    """The texts of one input: a text, or one for each column."""
    parts: list[Any] = text if isinstance(text, list) else [text]
    if any(not isinstance(part, str) for part in parts):
        raise DataError(f"an input is {text!r:.80}; a text was expected")
    return parts


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


def restore_tokenizer(directory: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer that ``save_tokenizer`` saved, and the other settings."""
    tokenizer = exported_tokenizer(directory)
    if tokenizer is None:
        raise ModelError(f"{directory} holds no tokenizer.", hint="name an exported model")
    return tokenizer, read_json(directory / "preprocessing.json")


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


_ATTENTION = "yunlu_packed"
_PROBED_LENGTHS = (5, 1, 3, 7)
_PROBED_SPREAD = 1e-4


class HFPacking:
    """Removes padding inside the encoder of one model; inactive without lengths."""

    def __init__(self, model: nn.Module) -> None:
        """Install hooks on the model permanently: recomputed layers need them in the backward pass."""
        encoder = _find_encoder(model)
        if encoder is None:
            raise ValueError(f"{type(model).__name__} has no encoder that can be packed")
        _register_attention()
        self._lengths: list[int] | None = None
        self._token_indices_T: Tensor | None = None
        self._shape = (0, 0)
        self._config: Any = model.config
        self._before = self._config._attn_implementation
        self._config._attn_implementation = _ATTENTION
        self._hooks = (
            encoder.register_forward_pre_hook(self._remove_padding, with_kwargs=True),
            encoder.register_forward_hook(self._restore_padding),
        )

    @contextmanager
    def of(self, lengths: Sequence[int]) -> Generator[None]:
        """Context for calls of the model with samples of these lengths, padded at the end."""
        self._lengths = list(lengths)
        try:
            yield
        finally:
            self._lengths = None

    def remove(self) -> None:
        """Remove the hooks."""
        self._config._attn_implementation = self._before
        for hook in self._hooks:
            hook.remove()

    def _remove_padding(
        self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        del encoder
        if self._lengths is None:
            return None
        kwargs = dict(kwargs)
        hidden_BLD = args[0] if args else kwargs.pop("hidden_states")
        self._shape = hidden_BLD.shape[:2]
        # Made on the device: it would be waited for until it has them.
        numbers = torch.arange(self._shape.numel(), device=hidden_BLD.device).view(self._shape)
        rows = [numbers[row, :length] for row, length in enumerate(self._lengths)]
        self._token_indices_T = torch.cat(rows)
        packed_1TD = hidden_BLD.flatten(0, 1).index_select(0, self._token_indices_T)[None]
        return (packed_1TD, *args[1:]), {**kwargs, "packed_lengths": self._lengths}

    def _restore_padding(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        del encoder, args
        if self._lengths is None:
            return None
        assert self._token_indices_T is not None
        is_bare = isinstance(output, Tensor)
        packed_1TD: Tensor = output if is_bare else output[0]
        empty = packed_1TD.new_zeros(self._shape[0] * self._shape[1], packed_1TD.shape[2])
        hidden_BLD = empty.index_copy(0, self._token_indices_T, packed_1TD[0]).unflatten(
            0, self._shape
        )
        if is_bare:
            return hidden_BLD
        if isinstance(output, tuple):
            return (hidden_BLD, *output[1:])
        output.last_hidden_state = hidden_BLD
        return output


_packings: WeakKeyDictionary[nn.Module, HFPacking] = WeakKeyDictionary()


def call_packed(model: nn.Module, inputs: dict[str, Tensor], lengths: Sequence[int]) -> Any:
    """Call the model on padded inputs, computed without the padding."""
    inner = getattr(model, "module", model)  # of a data-parallel wrapper
    if inner not in _packings:
        _packings[inner] = HFPacking(inner)
    with _packings[inner].of(lengths):
        return model(**inputs)


def can_pack_hf(model: nn.Module) -> bool:
    """Whether packing gives the same outputs; tested on a few random tokens."""
    if not is_hf(model) or _find_encoder(model) is None or not _has_plain_attention(model):
        return False
    packing = HFPacking(model)
    was_training = model.training
    model.eval()
    try:
        return _gives_same_outputs(model, packing)
    except Exception:  # noqa: BLE001 - any error of an unknown architecture means it cannot be packed
        return False
    finally:
        model.train(was_training)
        packing.remove()


def _gives_same_outputs(model: nn.Module, packing: HFPacking) -> bool:
    config: Any = model.config
    lengths, device = torch.tensor(_PROBED_LENGTHS), next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), int(lengths.max()))
    ids_BL = torch.randint(0, config.vocab_size, shape, generator=generator)
    pad = config.pad_token_id
    if pad is not None:  # must not occur among real tokens
        ids_BL = torch.where(ids_BL == pad, (pad + 1) % config.vocab_size, ids_BL)
    mask_BL = torch.arange(shape[1]) < lengths[:, None]
    ids_BL = ids_BL.masked_fill(~mask_BL, pad or 0)
    inputs = {"input_ids": ids_BL.to(device), "attention_mask": mask_BL.long().to(device)}
    with torch.no_grad():
        padded = model(**inputs).logits
        with packing.of(_PROBED_LENGTHS):
            packed = model(**inputs).logits
    # Untrained models give nearly equal outputs: compare with the spread between outputs.
    spread = (padded - padded.mean(dim=0)).abs().max()
    return bool((padded - packed).abs().max() <= _PROBED_SPREAD * spread)


def _find_encoder(model: nn.Module) -> nn.Module | None:
    """The module between embeddings and pooling that only runs its layers."""
    for module in model.modules():
        children = dict(module.named_children())
        if set(children) == {"layer"} and isinstance(children["layer"], nn.ModuleList):
            return module
    return None


def _has_plain_attention(model: nn.Module) -> bool:
    """Whether it uses torch's attention without a window: the probe's samples are too short to tell."""
    config: Any = model.config
    names = ("sliding_window", "local_attention", "attention_window", "layer_types")
    is_local = any(getattr(config, name, None) for name in names)
    return config._attn_implementation == "sdpa" and not is_local


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def _attend(
    module: nn.Module,
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's own attention, or packed attention if lengths are given."""
    if packed_lengths is None:
        from transformers.integrations.sdpa_attention import (  # noqa: PLC0415
            sdpa_attention_forward,
        )

        return sdpa_attention_forward(
            module, query_BHLK, key_BHLK, value_BHLK, attention_mask,
            dropout=dropout, scaling=scaling, **kwargs,
        )  # fmt: skip
    output_THK = attend_apart(
        query_BHLK[0],
        key_BHLK[0],
        value_BHLK[0],
        packed_lengths,
        packed_lengths,
        causal=bool(getattr(module, "is_causal", False)),
        dropout=dropout,
        scale=scaling,
    )
    return output_THK[None], None
