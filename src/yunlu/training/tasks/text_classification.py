"""Text classification."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import conventional_column, find_column
from yunlu.training.data.text import (
    TokenLists,
    call_packed,
    can_pack_hf,
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
from yunlu.training.models.transformer import TransformerClassifier
from yunlu.training.tasks.media import (
    Labels,
    SingleLabelTask,
    ends_in_softmax,
    label_config,
)
from yunlu.training.tasks.scoring import ClassScorer, unwrapped
from yunlu.training.tasks.task import Batch, Evaluation, Example, Splits, logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from yunlu.spec.job import Job
    from yunlu.training.data.table import DataTable
    from yunlu.training.data.tokenizer import Tokenizer

TEXT_NAMES = (
    "text", "sentence", "review", "content", "document", "comment", "message", "body", "utterance",
    "question", "title", "input", "x",
)  # fmt: skip
LABEL_NAMES = (
    "label",
    "labels",
    "target",
    "category",
    "class",
    "sentiment",
    "intent",
    "topic",
    "y",
)
_EXAMPLES, _SEARCHED = 6, 500


class TextClassification(SingleLabelTask):
    """Text classification: one label per text, scored by accuracy.

    A Hugging Face model gets ``input_ids`` and ``attention_mask``; any other ``(ids, mask)``.
    """

    special_keys = frozenset(
        {"data.max_length", "data.tokenizer", "data.vocabulary", "train.label_smoothing"}
    )

    def __init__(self) -> None:
        self._by_name = self._gives_probabilities = False

    def load(self, job: Job) -> Splits:
        """Read, tokenise once, and collect the labels of the training split."""
        tables = load_tables(job.data, seed=job.train.seed)
        target = find_column(tables.train, job.data.target, LABEL_NAMES, key="data.target")
        inputs = _text_columns(tables.train, job, target)
        texts = texts_of(tables.train, inputs, part="training")
        self._label_smoothing = job.train.label_smoothing
        self._by_name = names_hf(job.model.name)
        self.labels = Labels.learn(tables.full_train[target], row_of=tables.full_train.source_row)
        self.tokenizer = choose_tokenizer(job.data, job.model, texts, small="bpe")
        train = encode(self.tokenizer, texts, max_length=fit_length(job, self.tokenizer))
        # Positions beyond the longest training text would never be trained.
        self.max_length = train.longest if job.data.max_length == "auto" else job.data.max_length
        held_out = {
            part: self._read_part(table, inputs, target, part)
            for part, table in (("validation", tables.validation), ("test", tables.test))
        }
        return Splits(
            train=LabelledTexts(
                train, self._encode_labels(tables.train, inputs, target, "training")
            ),
            validation=held_out["validation"],
            test=held_out["test"],
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "labels": self.labels.names,
                "tokenizer": self.tokenizer.name,
                "vocabulary": self.tokenizer.size,
                "max_length": self.max_length,
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build the model, with an output per label."""
        model = build_model(
            job.model,
            builtins={"transformer": TransformerClassifier},
            sizes={
                "vocabulary": self.tokenizer.size,
                "classes": len(self.labels),
                "max_length": self.max_length,
            },
            auto_class="AutoModelForSequenceClassification",
            hf_sizes={**label_config(self.labels), **token_config(job, self.tokenizer)},
        )
        if self._by_name:
            check_vocabulary(job, model, self.tokenizer)
        else:
            check_call(model, ("ids", "mask"))
        self._gives_probabilities = ends_in_softmax(model)
        return model

    def collate(self, samples: Sequence[tuple[np.ndarray, int]]) -> Batch:
        """Pad to the longest text of the batch."""
        ids, mask = pad([ids for ids, _ in samples], self.tokenizer.pad)
        named = {"input_ids": ids, "attention_mask": mask.long()}
        return Batch(
            inputs=named if self._by_name else (ids, mask),
            targets=torch.tensor([label for _, label in samples]),
            samples=len(samples),
            items=len(samples),
            tokens=ids.numel(),
            padding=ids.numel() - int(mask.sum()),
        )

    def can_pack(self, model: nn.Module) -> bool:
        """Whether it is the built-in model, or a Hugging Face encoder without windowed attention."""
        inner = unwrapped(model)
        return isinstance(inner, TransformerClassifier) or (self._by_name and can_pack_hf(inner))

    def pack(self, samples: Sequence[tuple[np.ndarray, int]]) -> Batch:
        """Pack texts; a Hugging Face model gets them padded, with their lengths."""
        ids, lengths = concatenate([ids for ids, _ in samples])
        padded = self.collate(samples)
        if isinstance(padded.inputs, dict):
            inputs, key = {**padded.inputs, "lengths": lengths}, "lengths"
        else:
            inputs, key = (ids, lengths), 1
        return replace(padded, inputs=inputs, tokens=len(ids), padding=0, on_host=(key,))

    def scorer(self) -> TextScorer:
        """Accuracy, macro-F1, confusion matrix, and example texts."""
        return TextScorer(self.labels.names, self.tokenizer)

    def save_artifacts(self, directory: Path) -> None:
        """Save the tokenizer and the labels."""
        save_tokenizer(
            self.tokenizer, directory, max_length=self.max_length, labels=self.labels.names
        )

    def restore(self, job: Job, directory: Path) -> None:
        """Read the tokenizer and the labels."""
        self.tokenizer, settings = restore_tokenizer(directory)
        self.labels, self.max_length = Labels(settings["labels"]), settings["max_length"]
        self._label_smoothing, self._by_name = 0.0, names_hf(job.model.name)

    def _encode_inputs(self, inputs: Sequence[Any]) -> Sequence[np.ndarray]:
        """Texts; several columns as a list of texts."""
        texts = ["\n".join(parts_of(text)) for text in inputs]
        ids = encode(self.tokenizer, texts, max_length=self.max_length)
        return [ids[index] for index in range(len(ids))]

    def _outputs_of(self, model: nn.Module, batch: Batch) -> Any:
        if not isinstance(batch.inputs, dict) or "lengths" not in batch.inputs:
            return super()._outputs_of(model, batch)
        inputs = dict(batch.inputs)
        return call_packed(model, inputs, lengths=inputs.pop("lengths").tolist())

    def _read_part(
        self, table: DataTable | None, inputs: Sequence[str], target: str, part: str
    ) -> LabelledTexts | None:
        if table is None:
            return None
        texts = texts_of(table, inputs, part=part)
        labels = self._encode_labels(table, inputs, target, part)
        return LabelledTexts(encode(self.tokenizer, texts, max_length=self.max_length), labels)

    def _encode_labels(
        self, table: DataTable, inputs: Sequence[str], target: str, part: str
    ) -> Tensor:
        return self.labels.encode(
            table[target], table[inputs[0]], part=part, row_of=table.source_row
        )


class LabelledTexts:
    """Pairs of a text's ids and the index of its label."""

    def __init__(self, texts: TokenLists, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each text."""
        return self.texts.lengths

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """One pair."""
        return self.texts[index], int(self.labels[index])


class TextScorer(ClassScorer):
    """A class scorer with example texts: the first errors, then correct ones."""

    def __init__(self, labels: Sequence[str], tokenizer: Tokenizer) -> None:
        super().__init__(labels)
        self._names, self._tokenizer = list(labels), tokenizer
        self._searched = 0
        self._wrong: list[Example] = []
        self._right: list[Example] = []

    def add(self, outputs: Any, batch: Batch | Tensor) -> None:
        """Count, and collect examples until there are enough."""
        super().add(outputs, batch)
        # Do not search a large data set for errors.
        if isinstance(batch, Batch) and self._searched < _SEARCHED:
            self._searched += batch.samples
            self._collect_examples(logits_of(outputs).argmax(dim=-1), batch)

    def result(self) -> Evaluation:
        """The metrics with the examples."""
        examples = [*self._wrong, *self._right][:_EXAMPLES]
        return super().result().model_copy(update={"examples": examples})

    def _collect_examples(self, predictions: Tensor, batch: Batch) -> None:
        inputs = batch.inputs
        ids, mask = inputs.values() if isinstance(inputs, dict) else inputs
        for row, predicted, truth in zip(
            range(len(ids)), predictions.tolist(), batch.targets.tolist(), strict=True
        ):
            examples = self._right if predicted == truth else self._wrong
            if len(examples) < _EXAMPLES:
                text = self._tokenizer.decode(ids[row][mask[row].bool()].tolist())
                examples.append(
                    Example(
                        input=text, expected=self._names[truth], predicted=self._names[predicted]
                    )
                )


def _text_columns(table: DataTable, job: Job, target: str) -> list[str]:
    """Text columns: as named, by convention, or the only one with text."""
    requested = job.data.input
    if requested is not None:
        names = [requested] if isinstance(requested, str) else requested
        for name in names:
            table[name]  # raises for an unknown name, with a suggestion
        return names
    others = [name for name in table.columns if name != target]
    name = conventional_column(table, [name for name in TEXT_NAMES if name != target])
    if name is not None and name != target:
        return [name]
    text_columns = [name for name in others if isinstance(table[name], list)]
    if len(text_columns) == 1:
        return text_columns
    raise DataError(
        f"cannot tell which column is the text: the data has {', '.join(table.columns)}",
        hint="set data.input to one of them",
    )
