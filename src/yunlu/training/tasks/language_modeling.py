"""Language modelling."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from yunlu.core.errors import DataError
from yunlu.training.data.files import Location, locate
from yunlu.training.data.readers import SUFFIXES
from yunlu.training.data.sources import PARTS, load_tables, read_text
from yunlu.training.data.table import find_column
from yunlu.training.data.text import (
    check_vocabulary,
    fit_length,
    id_type,
    pad,
    parts_of,
    restore_tokenizer,
    save_tokenizer,
    texts_of,
    token_config,
)
from yunlu.training.data.tokenizer import choose_tokenizer
from yunlu.training.models.build import build_model, check_call
from yunlu.training.models.hf import names_hf
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.tasks.scoring import IGNORED, GenerativeOutputs, extend, loss_sum
from yunlu.training.tasks.task import (
    Batch,
    Evaluation,
    Example,
    ModelPrediction,
    Splits,
    call,
    logits_of,
)
from yunlu.training.tasks.text_classification import TEXT_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from yunlu.spec.job import DataSpec, Job
    from yunlu.training.data.tokenizer import Tokenizer

_SHORT, _LONG, _MANY_BYTES = 128, 512, 8 << 20
_CHUNK = 1 << 20
_EXAMPLES, _WRITTEN = 2, 32

Texts = dict[str, list[str]]
"""Documents by split: ``train``, and ``validation`` and ``test`` if any."""


class LanguageModeling:
    """Language modelling: next-token prediction, scored by perplexity and bits per byte.

    The text is one stream of tokens, split into blocks; its end is held out, so that no
    sentence occurs in two splits. A Hugging Face model gets ``input_ids``; any other ``(ids,)``.
    """

    metric = "perplexity"
    special_keys = frozenset(
        {"data.max_length", "data.tokenizer", "data.vocabulary", "train.label_smoothing"}
    )

    def __init__(self) -> None:
        self._by_name = False

    def load(self, job: Job) -> Splits:
        """Read, tokenise once, split into blocks."""
        texts, fingerprint = _read(job)
        self._label_smoothing = job.train.label_smoothing
        self._by_name = names_hf(job.model.name)
        self.tokenizer = choose_tokenizer(job.data, job.model, texts["train"], small="bytes")
        many = sum(map(len, texts["train"])) > _MANY_BYTES
        self.max_length = fit_length(job, self.tokenizer, default=_LONG if many else _SHORT)
        blocks = {part: self._make_blocks(texts[part], job.data, part) for part in texts}
        return Splits(
            train=blocks["train"],
            validation=blocks.get("validation"),
            test=blocks.get("test"),
            fingerprint=fingerprint,
            about={
                "source": job.data.train,
                "tokenizer": self.tokenizer.name,
                "vocabulary": self.tokenizer.size,
                "block": self.max_length,
                "training_tokens": len(blocks["train"].stream),
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model, with an output per token of the vocabulary."""
        model = build_model(
            job.model,
            builtins={"transformer": CausalTransformer},
            sizes={"vocabulary": self.tokenizer.size, "max_length": self.max_length},
            auto_class="AutoModelForCausalLM",
            hf_sizes=token_config(job, self.tokenizer),
        )
        if self._by_name:
            check_vocabulary(job, model, self.tokenizer)
        else:
            check_call(model, ("ids",))
        return model

    def collate(self, samples: Sequence[tuple[np.ndarray, float]]) -> Batch:
        """Pad the blocks; targets are the inputs shifted by one."""
        ids, mask = pad([block for block, _ in samples], self.tokenizer.pad)
        targets = ids[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
        inputs = ids[:, :-1].contiguous()
        in_bytes = torch.tensor([count for _, count in samples])  # devices have no float64
        return Batch(
            inputs={"input_ids": inputs, "attention_mask": mask[:, :-1].long()}
            if self._by_name
            else (inputs,),
            targets=(targets, in_bytes),
            samples=len(samples),
            items=int(mask[:, 1:].sum()),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, GenerativeOutputs]:
        """Cross-entropy summed over the tokens."""
        logits = logits_of(call(model, batch))
        loss = loss_sum(logits, batch.targets[0], label_smoothing=self._label_smoothing)
        return loss, GenerativeOutputs(logits, partial(self._generate, model))

    def scorer(self) -> StreamScorer:
        """Perplexity, bits per byte, next-token accuracy, and generated examples."""
        return StreamScorer(self.tokenizer)

    def save_artifacts(self, directory: Path) -> None:
        """Save the tokenizer and its settings."""
        save_tokenizer(self.tokenizer, directory, max_length=self.max_length)

    def restore(self, job: Job, directory: Path) -> None:
        """Read the tokenizer and its settings."""
        self.tokenizer, settings = restore_tokenizer(directory)
        self.max_length = settings["max_length"]
        self._label_smoothing, self._by_name = 0.0, names_hf(job.model.name)

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The continuation of each text, the likeliest token at a time."""
        room = max(self.max_length - _WRITTEN, self.max_length // 2, 1)
        prompts = [parts_of(text)[0] for text in inputs]
        written: list[ModelPrediction] = []
        # One by one: padding would be read as text.
        for ids in self.tokenizer.encode_batch(prompts):
            prompt = torch.tensor([ids[-room:] or [self.tokenizer.bos]])
            tokens = self._generate(model, prompt, _WRITTEN)[0].tolist()
            end = tokens.index(self.tokenizer.eos) if self.tokenizer.eos in tokens else len(tokens)
            written.append(ModelPrediction(value=self.tokenizer.decode(tokens[:end])))
        return written

    def _generate(self, model: nn.Module, prompts: Tensor, count: int) -> Tensor:
        def logits_for(ids: Tensor) -> Tensor:
            if self._by_name:
                return logits_of(model(input_ids=ids, attention_mask=torch.ones_like(ids)))
            return logits_of(model(ids))

        length, fill = self.max_length, self.tokenizer.pad
        return extend(logits_for, prompts, count=count, length=length, fill=fill)

    def _make_blocks(self, texts: list[str], data: DataSpec, part: str) -> TokenBlocks:
        stream = _encode_stream(self.tokenizer, texts)
        if len(stream) < 2:
            raise DataError(f"the {part} text is empty: at least two tokens are needed")
        in_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return TokenBlocks(stream, length=self.max_length, in_bytes=in_bytes, limit=data.limit)


class TokenBlocks:
    """Blocks of a token stream that overlap by one: each token but the first is a target once."""

    def __init__(
        self, stream: np.ndarray, *, length: int, in_bytes: int, limit: int | None = None
    ) -> None:
        self.stream, self.length = stream, length
        self.bytes_per_token = in_bytes / len(stream)
        count = -(-(len(stream) - 1) // length)  # the last block may be shorter
        self.count = count if limit is None else min(count, limit)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        """Tokens of a block, and the number of bytes of its targets."""
        block = self.stream[index * self.length : (index + 1) * self.length + 1]
        return block, (len(block) - 1) * self.bytes_per_token


class StreamScorer:
    """Sums over tokens; computes the loss without label smoothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nats = self._right = self._tokens = self._bytes = 0.0
        self._examples: list[Example] = []

    def add(self, outputs: GenerativeOutputs, batch: Batch) -> None:
        """Add one batch; on the first, generate text from the middle of a block."""
        targets, in_bytes = batch.targets
        if not self._examples:
            self._examples = self._show(outputs, batch)
        self._nats += loss_sum(outputs.logits, targets).item()
        self._right += int((outputs.logits.argmax(dim=-1) == targets).sum())
        self._tokens += batch.items
        self._bytes += float(in_bytes.sum())

    def result(self) -> Evaluation:
        """``perplexity``, ``bits_per_byte`` (comparable between tokenizers), ``accuracy``."""
        nats = self._nats / max(self._tokens, 1)
        return Evaluation(
            metrics={
                "perplexity": math.exp(nats) if nats < 700 else math.inf,
                "bits_per_byte": self._nats / math.log(2) / max(self._bytes, 1),
                "accuracy": self._right / max(self._tokens, 1),
            },
            examples=self._examples,
        )

    def _show(self, outputs: GenerativeOutputs, batch: Batch) -> list[Example]:
        inputs = batch.inputs
        ids = (inputs["input_ids"] if isinstance(inputs, dict) else inputs[0])[:_EXAMPLES]
        middle = ids.shape[1] // 2
        if middle == 0:
            return []
        generated = outputs.generate(ids[:, :middle], _WRITTEN)
        expected = ids[:, middle : middle + _WRITTEN]
        decode = self._tokenizer.decode
        return [
            Example(input=decode(before), expected=decode(truth), predicted=decode(prediction))
            for before, truth, prediction in zip(
                ids[:, :middle].tolist(), expected.tolist(), generated.tolist(), strict=True
            )
        ]


def _read(job: Job) -> tuple[Texts, str]:
    data = job.data
    if _is_table(data):
        tables = load_tables(data, seed=job.train.seed)
        requested = data.input[0] if isinstance(data.input, list) and data.input else data.input
        assert not isinstance(requested, list)
        name = find_column(tables.train, requested, TEXT_NAMES, key="data.input")
        parts = {"train": tables.train, "validation": tables.validation, "test": tables.test}
        texts = {
            part: texts_of(table, [name], part=part)
            for part, table in parts.items()
            if table is not None
        }
        return texts, tables.fingerprint
    texts = _read_texts(data)
    digest = xxhash.xxh3_128()
    for part, documents in texts.items():
        digest.update(f"{part}\0".encode())
        for document in documents:
            digest.update(document.encode("utf-8", "replace"))
    _hold_out(texts, data)
    return texts, digest.hexdigest()


def _is_table(data: DataSpec) -> bool:
    """Whether samples are rows with a text column, rather than plain text."""
    if data.format != "auto":
        return data.format != "text"
    scheme = data.train.partition(":")[0]
    if scheme == "synthetic" or (scheme in {"hf", "sklearn"} and "://" not in data.train):
        return scheme != "synthetic"
    location = locate(data.train, data.options)
    if location.is_folder:
        return not any(file.suffix == ".txt" for file in location.files())
    # Anything but a columnar format is plain text.
    return SUFFIXES.get(location.suffix, "text") != "text"


def _read_texts(data: DataSpec) -> Texts:
    texts = _named_parts(data) or {"train": [read_text(data.train, data.options)]}
    for part, source in (("validation", data.validation), ("test", data.test)):
        if source is not None:
            texts[part] = [read_text(source, data.options)]
    return texts


def _named_parts(data: DataSpec) -> Texts:
    """Texts of ``train.txt`` beside ``test.txt`` or ``validation.txt`` in a folder."""
    if data.train.startswith("synthetic:"):
        return {}
    folder = locate(data.train, data.options)
    files: dict[str, Location] = {}
    for child in folder.children() if folder.is_folder else ():
        part = PARTS.get(child.name.partition(".")[0].lower())
        if part is not None:
            files[part] = child
    if "train" not in files or len(files) < 2:
        return {}
    return {part: [read_text(child.url, data.options)] for part, child in files.items()}


def _hold_out(texts: Texts, data: DataSpec) -> None:
    """Hold out missing splits from the end of the training text, between two lines."""
    text = texts["train"][0]
    end = len(text)
    for part, share in (("test", data.split.test), ("validation", data.split.validation)):
        if part in texts or not share:
            continue
        start = end - max(1, round(share * len(text)))
        line = text.rfind("\n", 0, start) + 1
        # A text without line breaks is split at the exact share.
        start = line if line > start - share * len(text) / 2 else start
        if start < 1:
            raise DataError(
                f"{len(text)} characters of text are too few to hold out validation and test",
                hint="give more text, or name data.validation and data.test",
            )
        texts[part] = [text[start:end]]
        end = start
    texts["train"] = [text[:end]]


def _encode_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One array of ids; documents are separated by ``eos``."""
    kind = id_type(tokenizer.size)
    arrays: list[np.ndarray] = []
    for number, text in enumerate(texts):
        if number:
            arrays.append(np.array([tokenizer.eos], dtype=kind))
        encoded = (tokenizer.encode_batch([chunk])[0] for chunk in _chunks(text))
        arrays.extend(np.asarray(ids, dtype=kind) for ids in encoded)
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=kind)


def _chunks(text: str) -> Iterator[str]:
    """Chunks of about a million characters, split after a line: lists of ids are large."""
    start = 0
    while start < len(text):
        cut = text.rfind("\n", start, start + _CHUNK) + 1
        end = len(text) if start + _CHUNK >= len(text) else cut if cut > start else start + _CHUNK
        yield text[start:end]
        start = end
