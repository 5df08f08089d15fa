"""Sequence-to-sequence learning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import conventional_column
from yunlu.training.data.text import (
    TokenLists,
    check_vocabulary,
    concatenate,
    encode,
    fit_length,
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
from yunlu.training.models.transformer import Seq2SeqTransformer
from yunlu.training.tasks.scoring import (
    IGNORED,
    GenerativeOutputs,
    edit_distance,
    extend,
    loss_sum,
    unwrapped,
)
from yunlu.training.tasks.task import (
    Batch,
    Evaluation,
    Example,
    ModelPrediction,
    Splits,
    call,
    logits_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.data.table import DataTable
    from yunlu.training.data.tokenizer import Tokenizer

SOURCE_NAMES = ("source", "src", "input", "article", "document", "question", "prompt", "text", "x")
TARGET_NAMES = (
    "target", "tgt", "output", "summary", "translation", "answer", "response", "completion", "label", "y",
)  # fmt: skip
_GENERATED, _EXAMPLES = 200, 6


class Seq2Seq:
    """Sequence-to-sequence learning, scored by exact match of generated texts.

    A Hugging Face model gets ``input_ids``, ``attention_mask`` and ``decoder_input_ids``; any other
    ``(source, source_mask, target)``, where the target begins with ``bos``.
    """

    metric = "exact_match"
    special_keys = frozenset(
        {"data.max_length", "data.tokenizer", "data.vocabulary", "train.label_smoothing"}
    )

    def __init__(self) -> None:
        self._by_name = False

    def load(self, job: Job) -> Splits:
        """Read the pairs and tokenise them once, with one vocabulary for both sides."""
        tables = load_tables(job.data, seed=job.train.seed)
        names = _pair_columns(tables.train, job)
        sources, targets = (texts_of(tables.train, [name], part="training") for name in names)
        self._label_smoothing = job.train.label_smoothing
        self._by_name = names_hf(job.model.name)
        self.tokenizer = choose_tokenizer(job.data, job.model, [*sources, *targets], small="bytes")
        limit = fit_length(job, self.tokenizer)
        train = self._encode(sources, targets, limit)
        longest = max(train.sources.longest, train.targets.longest)
        self.max_length = longest if job.data.max_length == "auto" else limit
        self._longest_answer = train.targets.longest
        return Splits(
            train=train,
            validation=self._read_part(tables.validation, names, "validation"),
            test=self._read_part(tables.test, names, "test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "columns": f"{names[0]} → {names[1]}",
                "tokenizer": self.tokenizer.name,
                "vocabulary": self.tokenizer.size,
                "max_length": self.max_length,
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model, with an output per token of the vocabulary."""
        model = build_model(
            job.model,
            builtins={"transformer": Seq2SeqTransformer},
            sizes={"vocabulary": self.tokenizer.size, "max_length": self.max_length},
            auto_class="AutoModelForSeq2SeqLM",
            hf_sizes=token_config(job, self.tokenizer),
        )
        if self._by_name:
            check_vocabulary(job, model, self.tokenizer)
        else:
            check_call(model, ("source", "source_mask", "target"))
        return model

    def collate(self, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
        """Pad both sides; the decoder input is the target shifted by one, after ``bos``."""
        source, source_mask = pad([source for source, _ in samples], self.tokenizer.pad)
        target, target_mask = pad([target for _, target in samples], self.tokenizer.pad)
        begin = torch.full((len(samples), 1), self.tokenizer.bos)
        named = {"input_ids": source, "attention_mask": source_mask.long()}
        positional = (source, source_mask, torch.cat((begin, target[:, :-1]), dim=1))
        return Batch(
            inputs=named if self._by_name else positional,
            targets=target.masked_fill(~target_mask, IGNORED),
            samples=len(samples),
            items=int(target_mask.sum()),
            tokens=source.numel() + target.numel(),
            padding=int((~source_mask).sum()) + int((~target_mask).sum()),
        )

    def can_pack(self, model: nn.Module) -> bool:
        """Whether it is the built-in model."""
        return isinstance(unwrapped(model), Seq2SeqTransformer)

    def pack(self, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
        """Pack sources and targets; each target starts with ``bos``."""
        source, source_lengths = concatenate([source for source, _ in samples])
        target, target_lengths = concatenate([target for _, target in samples])
        shifted = target.roll(1)
        shifted[target_lengths.cumsum(dim=0) - target_lengths] = self.tokenizer.bos
        return Batch(
            inputs=(source, source_lengths, shifted, target_lengths),
            targets=target,
            samples=len(samples),
            items=len(target),
            tokens=len(source) + len(target),
            on_host=(1, 3),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, GenerativeOutputs]:
        """Cross-entropy summed over the target's tokens (teacher forcing)."""
        if isinstance(batch.inputs, dict):
            # The first decoder token is the model's own convention.
            shifted = unwrapped(model).prepare_decoder_input_ids_from_labels(labels=batch.targets)
            outputs = model(**batch.inputs, decoder_input_ids=shifted)
        else:
            outputs = call(model, batch)
        logits = logits_of(outputs)
        loss = loss_sum(logits, batch.targets, label_smoothing=self._label_smoothing)
        return loss, GenerativeOutputs(logits, partial(self._generate, model))

    def scorer(self) -> GenerationScorer:
        """Exact match and character error rate of generated texts, token accuracy."""
        return GenerationScorer(self.tokenizer)

    def save_artifacts(self, directory: Path) -> None:
        """Save the tokenizer and its settings."""
        settings = {"max_length": self.max_length, "longest_answer": self._longest_answer}
        save_tokenizer(self.tokenizer, directory, **settings)

    def restore(self, job: Job, directory: Path) -> None:
        """Read the tokenizer and its settings."""
        self.tokenizer, settings = restore_tokenizer(directory)
        self.max_length = settings["max_length"]
        self._longest_answer = settings.get("longest_answer", self.max_length)
        self._label_smoothing, self._by_name = 0.0, names_hf(job.model.name)

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The answer to each text, the likeliest token at a time."""
        sources = [parts_of(text)[0] for text in inputs]
        pairs = self._encode(sources, [""] * len(sources), self.max_length)
        batch = self.collate([pairs[index] for index in range(len(pairs))])
        answers = self._generate(model, batch, batch.samples).tolist()
        return [ModelPrediction(value=decode_answer(self.tokenizer, ids)) for ids in answers]

    @torch.no_grad()
    def _generate(self, model: nn.Module, batch: Batch, count: int) -> Tensor:
        """Generate greedily from the first sources of the batch."""
        inner, longest, tokenizer = unwrapped(model), self._longest_answer, self.tokenizer
        if isinstance(batch.inputs, dict):
            some = {name: tensor[:count] for name, tensor in batch.inputs.items()}
            generated = inner.generate(**some, max_new_tokens=longest, do_sample=False, num_beams=1)
            return generated[:, 1:]  # without the start token
        source, mask = (tensor[:count] for tensor in batch.inputs[:2])
        if isinstance(inner, Seq2SeqTransformer):
            return inner.generate(
                source, mask, bos=tokenizer.bos, eos=tokenizer.eos, max_length=longest
            )

        def logits_for(target: Tensor) -> Tensor:
            return logits_of(model(source, mask, target))

        begin = source.new_full((len(source), 1), tokenizer.bos)
        return extend(logits_for, begin, count=longest, length=longest + 1, fill=tokenizer.pad)

    def _read_part(
        self, table: DataTable | None, names: tuple[str, str], part: str
    ) -> SequencePairs | None:
        if table is None:
            return None
        sources, targets = (texts_of(table, [name], part=part) for name in names)
        return self._encode(sources, targets, self.max_length)

    def _encode(self, sources: list[str], targets: list[str], max_length: int) -> SequencePairs:
        return SequencePairs(
            encode(self.tokenizer, sources, max_length=max_length),
            encode(self.tokenizer, targets, max_length=max_length, closed=True),
        )


class SequencePairs:
    """The ids of sources and targets."""

    def __init__(self, sources: TokenLists, targets: TokenLists) -> None:
        self.sources, self.targets = sources, targets

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each source, and in each target."""
        return np.stack((self.sources.lengths, self.targets.lengths), axis=1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """One pair."""
        return self.sources[index], self.targets[index]


class GenerationScorer:
    """Compares generated texts of the first samples: generation is slow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._right = self._tokens = 0
        self._generated = self._exact = self._edits = self._letters = 0
        self._wrong: list[Example] = []
        self._matched: list[Example] = []

    def add(self, outputs: GenerativeOutputs, batch: Batch) -> None:
        """Count correct tokens; generate texts until there are enough."""
        self._right += int((outputs.logits.argmax(dim=-1) == batch.targets).sum())
        self._tokens += batch.items
        count = min(_GENERATED - self._generated, batch.samples)
        if count > 0:
            self._compare(outputs.generate(batch, count), batch)

    def result(self) -> Evaluation:
        """``exact_match``, ``character_error_rate``, ``token_accuracy``."""
        generated = max(self._generated, 1)
        return Evaluation(
            metrics={
                "exact_match": self._exact / generated,
                "character_error_rate": self._edits / max(self._letters, 1),
                "token_accuracy": self._right / max(self._tokens, 1),
            },
            examples=[*self._wrong, *self._matched][:_EXAMPLES],
        )

    def _compare(self, answers: Tensor, batch: Batch) -> None:
        inputs = batch.inputs
        sources = inputs["input_ids"] if isinstance(inputs, dict) else inputs[0]
        for source, answer, truth in zip(
            sources.tolist(), answers.tolist(), batch.targets.tolist(), strict=False
        ):
            expected = decode_answer(self._tokenizer, truth)
            generated = decode_answer(self._tokenizer, answer)
            self._generated += 1
            self._exact += generated == expected
            self._edits += edit_distance(generated, expected)
            self._letters += len(expected)
            examples = self._matched if generated == expected else self._wrong
            if len(examples) < _EXAMPLES:
                shown = decode_answer(self._tokenizer, source)
                examples.append(Example(input=shown, expected=expected, predicted=generated))


def decode_answer(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text before ``eos``."""
    generated = ids[: ids.index(tokenizer.eos)] if tokenizer.eos in ids else ids
    nothing = {IGNORED, tokenizer.pad}
    return tokenizer.decode([token for token in generated if token not in nothing]).strip()


def _pair_columns(table: DataTable, job: Job) -> tuple[str, str]:
    """Source and target columns: as named, by convention, or the only two columns in order."""
    requested = job.data.input
    if isinstance(requested, list):
        if len(requested) != 1:
            raise DataError(f"data.input names {len(requested)} columns; this task reads one")
        requested = requested[0]
    named = [name for name in (requested, job.data.target) if name is not None]
    for name in named:
        table[name]  # raises for an unknown name, with a suggestion
    rest = [name for name in table.columns if name not in named]
    source = requested or conventional_column(
        table, [name for name in SOURCE_NAMES if name in _bare(rest)]
    )
    target = job.data.target or conventional_column(
        table, [name for name in TARGET_NAMES if name in _bare(rest) and name != source]
    )
    # Two columns without a header are read as `label<TAB>text`: here the first is the source.
    if not named and set(table.columns) == {"label", "text"}:
        source, target = table.columns
    if len(table.columns) == 2 and (source is None or target is None or source == target):
        first, second = table.columns
        source = source if source not in {None, target} else (first if target != first else second)
        target = second if source == first else first
    if source is None or target is None or source == target:
        raise DataError(
            f"cannot tell source and target apart: the data has {', '.join(table.columns)}",
            hint="set data.input and data.target to two of them",
        )
    return source, target


def _bare(names: Sequence[str]) -> set[str]:
    return {"".join(letter for letter in name.lower() if letter.isalnum()) for name in names}
