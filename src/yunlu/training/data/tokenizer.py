"""Text to token ids and back: bytes, a BPE trained on the data, or a Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from yunlu.core.errors import DataError, ModelError, missing_part
from yunlu.core.limits import read_json
from yunlu.training.models.hf import find_hf_directory, names_hf
from yunlu.training.models.initial_weights import base_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.spec.job import DataSpec, ModelSpec

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_LARGEST_VOCABULARY = 8192
_BYTES_PER_TOKEN = 100
_HF_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "tokenizer.model",
    "vocab.json",
)


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    name: str
    size: int
    """Ids run from 0 to ``size - 1``."""
    pad: int
    bos: int
    eos: int
    limit: int | None
    """Longest sequence of its model, if known."""

    def encode_batch(
        self, texts: Sequence[str], *, ends: bool = False, max_length: int | None = None
    ) -> list[list[int]]:
        """Ids of each text, truncated to ``max_length``; ``ends`` adds special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without pad, bos and eos."""
        ...

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json``."""
        ...


class ByteTokenizer:
    """Byte-level tokenizer: each UTF-8 byte is an id."""

    name = "bytes"
    size = 256 + len(_SPECIAL)
    pad, bos, eos = range(256, 256 + len(_SPECIAL))
    limit: int | None = None

    def encode_batch(
        self, texts: Sequence[str], *, ends: bool = False, max_length: int | None = None
    ) -> list[list[int]]:
        """UTF-8 bytes; truncated between bytes, not characters."""
        # A lone surrogate (from broken JSON escapes) has no UTF-8: replaced by a question mark.
        return _truncate(
            [list(text.encode("utf-8", "replace")) for text in texts], self.eos, ends, max_length
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Decode; incomplete characters become the replacement character."""
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")

    def save(self, directory: Path) -> None:
        """Save as a BPE without merges, readable as any ``tokenizer.json``."""
        fast = _byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]), by_word=False)
        fast.add_special_tokens(list(_SPECIAL))
        fast.save(str(directory / "tokenizer.json"))


class BpeTokenizer:
    """Byte-level BPE, trained on the training split; deterministic."""

    name = "bpe"
    pad, bos, eos = range(len(_SPECIAL))
    limit: int | None = None

    def __init__(self, texts: Iterable[str], *, vocabulary: int) -> None:
        self._fast = _byte_level(models.BPE(), by_word=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(_SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self._fast.train_from_iterator(texts, trainer)
        self.size = self._fast.get_vocab_size()

    @classmethod
    def read(cls, directory: Path) -> BpeTokenizer:
        """Load the tokenizer that an earlier run trained and exported."""
        path = directory / "tokenizer.json"
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ModelError(f"{path} is not a tokenizer that can be read: {error}") from error
        tokenizer = cls.__new__(cls)
        tokenizer._fast, tokenizer.size = fast, fast.get_vocab_size()
        if [fast.token_to_id(mark) for mark in _SPECIAL] != [
            tokenizer.pad,
            tokenizer.bos,
            tokenizer.eos,
        ]:
            raise ModelError(f"{path} was altered: its special tokens differ from the export.")
        return tokenizer

    def encode_batch(
        self, texts: Sequence[str], *, ends: bool = False, max_length: int | None = None
    ) -> list[list[int]]:
        """Lossless: the ids hold every byte of the text."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        encodings = self._fast.encode_batch_fast(clean, add_special_tokens=False)
        return _truncate([encoding.ids for encoding in encodings], self.eos, ends, max_length)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Save in the format of ``tokenizers``."""
        self._fast.save(str(directory / "tokenizer.json"))


class HfTokenizer:
    """A Hugging Face tokenizer from a directory; its code, if any, never runs."""

    def __init__(self, directory: Path, name: str) -> None:
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, and optional
        except ImportError as error:
            raise missing_part("transformers", "hf", f"The tokenizer {name}") from error
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"The tokenizer in {directory} cannot be loaded: {reason}") from error
        self.name = name
        self.size = max(self._inner.get_vocab().values()) + 1
        ids = self._inner
        self.eos = _first(ids.eos_token_id, ids.sep_token_id, ids.pad_token_id, 0)
        self.bos = _first(ids.bos_token_id, ids.cls_token_id, self.eos)
        self.pad = _first(ids.pad_token_id, self.eos)
        # An absent limit is written as a huge number.
        longest = int(min(self._inner.model_max_length, 1 << 30))
        self.limit = longest if longest < 1 << 30 else None

    def encode_batch(
        self, texts: Sequence[str], *, ends: bool = False, max_length: int | None = None
    ) -> list[list[int]]:
        """Encode; ``ends`` adds the model's special tokens (``[CLS]``, ``</s>``, ...)."""
        if not texts:
            return []
        return self._inner(
            list(texts),
            add_special_tokens=ends,
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, as the tokenizer decodes it."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Save all files, as transformers does."""
        self._inner.save_pretrained(str(directory))


def choose_tokenizer(
    data: DataSpec, model: ModelSpec, texts: Sequence[str], *, small: str
) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names, trained on ``texts`` if needed.

    ``auto`` is the model's own for a Hugging Face model, and the base model's when fine-tuning; else
    ``small`` up to 2 MB of text, where BPE learns too few words to pay, and ``bpe`` above.
    """
    name = data.tokenizer
    if model.weights is not None and not names_hf(model.name):
        return _base_tokenizer(data, model)
    if name == "auto":
        if names_hf(model.name):
            model_tokenizer = _own_tokenizer(model)
            if model_tokenizer is not None:
                return model_tokenizer
        name = small if _bytes_in(texts) <= 2 << 20 else "bpe"
    elif names_hf(model.name) and model.pretrained and name in {"bytes", "bpe"}:
        raise ModelError(
            f"data.tokenizer: {model.name} was trained with its own tokenizer, not {name!r}.",
            hint="remove data.tokenizer, or set model.pretrained: false",
        )
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        size = data.vocabulary
        return BpeTokenizer(texts, vocabulary=fitting_vocabulary(texts) if size == "auto" else size)
    if name.startswith("hf:") or Path(name).expanduser().is_dir():
        return HfTokenizer(find_hf_directory(name), name)
    raise DataError(
        f"data.tokenizer: there is no tokenizer {name!r}.",
        hint="write auto, bytes, bpe, or the directory of a Hugging Face tokenizer",
    )


def fitting_vocabulary(texts: Sequence[str]) -> int:
    """Vocabulary size: one token per hundred bytes, so that each occurs often enough."""
    return max(512, min(_LARGEST_VOCABULARY, _bytes_in(texts) // _BYTES_PER_TOKEN))


def _base_tokenizer(data: DataSpec, model: ModelSpec) -> Tokenizer:
    """The tokenizer of the base model: its weights need the same ids."""
    directory = base_directory(model)
    base = None if directory is None else exported_tokenizer(directory)
    if directory is None or base is None:
        raise ModelError(
            f"model.weights: {model.weights} holds no tokenizer, so its weights cannot be used on text."
        )
    requested = data.tokenizer
    if requested not in {"auto", base.name} and not _is_same(requested, directory):
        raise ModelError(
            f"data.tokenizer: the model in {directory} was trained with its own tokenizer "
            f"({base.name}), not {requested!r}.",
            hint="remove data.tokenizer",
        )
    if data.vocabulary not in {"auto", base.size}:
        raise ModelError(
            f"data.vocabulary: the tokenizer of {directory} has {base.size} tokens, not "
            f"{data.vocabulary}.",
            hint="remove data.vocabulary",
        )
    return base


def exported_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer recorded in an export of Yunlu; None if there is none."""
    path = directory / "preprocessing.json"
    if not path.is_file():
        return None
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ModelError(f"{path} does not hold an object.")
    name = settings.get("tokenizer")
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == BpeTokenizer.name:
        return BpeTokenizer.read(directory)
    return None if name is None else HfTokenizer(directory, name)


def _is_same(requested: str, directory: Path) -> bool:
    """Whether the directory that a job names holds the same tokenizer as the base model."""
    other = Path(requested.removeprefix("hf:")).expanduser() / "tokenizer.json"
    base = directory / "tokenizer.json"
    return other.is_file() and base.is_file() and other.read_bytes() == base.read_bytes()


def _own_tokenizer(model: ModelSpec) -> Tokenizer | None:
    directory = find_hf_directory(model.name)
    if model.pretrained and (exported := exported_tokenizer(directory)) is not None:
        return exported
    if any((directory / file).is_file() for file in _HF_FILES):
        return HfTokenizer(directory, model.name)
    if model.pretrained:
        raise ModelError(
            f"{model.name}: {directory} has no tokenizer.",
            hint="set data.tokenizer to the directory of the tokenizer it was trained with",
        )
    return None


def _truncate(
    sequences: list[list[int]], eos: int, ends: bool, max_length: int | None
) -> list[list[int]]:
    room = None if max_length is None else max_length - ends
    return [[*sequence[:room], eos] if ends else sequence[:room] for sequence in sequences]


def _byte_level(model: models.Model, *, by_word: bool) -> FastTokenizer:
    fast = FastTokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_word)
    fast.decoder = decoders.ByteLevel()
    return fast


def _byte_vocabulary() -> dict[str, int]:
    """Printable character of each byte in byte-level BPE, with the byte as id."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


def _bytes_in(texts: Sequence[str]) -> int:
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


def _first(*ids: int | None) -> int:
    return next(number for number in ids if number is not None)
