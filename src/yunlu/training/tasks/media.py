"""What classification and speech tasks share: labels, their loss, what a Hugging Face model expects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError, missing_part
from yunlu.training.data.audio import LogMelFrontEnd, WaveformFrontEnd, read_audio
from yunlu.training.data.table import FileRef
from yunlu.training.models.hf import find_hf_directory, names_hf
from yunlu.training.tasks.scoring import ClassScorer, loss_sum
from yunlu.training.tasks.task import Batch, call, logits_of

if TYPE_CHECKING:
    from yunlu.spec.job import DataSpec, Job, ModelSpec
    from yunlu.training.data.table import Column
    from yunlu.training.tasks.task import Samples

SOUND_NAMES = ("audio", "sound", "wav", "speech", "x")
LABEL_NAMES = ("label", "labels", "target", "y", "class", "category", "word")
RowOf = Callable[[int], int]

HF_SAMPLE_RATE = 16_000
"""What nearly every pretrained speech model listens at."""


def _from_one(index: int) -> int:
    return index + 1


class Labels:
    """The labels of a classification, in a fixed order: numbers by value, words by spelling."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._indices = {name: index for index, name in enumerate(self.names)}

    @classmethod
    def learn(cls, column: Column, *, row_of: RowOf = _from_one) -> Labels:
        """The labels that occur in the training data; ``row_of`` tells a sample's row in its source."""
        found = {_label(value, row_of(row), "training") for row, value in enumerate(column)}
        if len(found) < 2:
            raise DataError(
                f"the training data has the single label {next(iter(found))!r}",
                hint="two or more are needed to tell apart; is data.target the right column?",
            )
        numeric = all(name.lstrip("-").isdecimal() for name in found)
        return cls(sorted(found, key=int if numeric else None))

    def __len__(self) -> int:
        return len(self.names)

    def encode(
        self, column: Column, inputs: Column, *, part: str, row_of: RowOf = _from_one
    ) -> Tensor:
        """Their indices; a label that training has not seen is refused with its row or file."""
        indices = torch.empty(len(column), dtype=torch.int64)
        for row, value in enumerate(column):
            name = _label(value, row_of(row), part)
            if name not in self._indices:
                source = f" ({inputs[row]})" if isinstance(inputs[row], FileRef) else ""
                raise DataError(
                    f"the {part} data has the label {name!r} in row {row_of(row)}{source}, "
                    "which the training data has not",
                    hint=f"known labels: {_listing(self.names)}",
                )
            indices[row] = self._indices[name]
        return indices


Inputs = TypeVar("Inputs", bound="Samples")


class LabelledSamples(Generic[Inputs]):
    """Pairs of an input and the index of its label."""

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One pair."""
        return self.inputs[index], int(self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Several pairs, the inputs by one gather where they allow it."""
        many = getattr(self.inputs, "__getitems__", None)
        inputs = many(indices) if many else [self.inputs[index] for index in indices]
        return list(zip(inputs, self.targets[torch.as_tensor(indices)].tolist(), strict=True))


def sole_input(data: DataSpec) -> str | None:
    """The one column a job names as input, if it names any."""
    if not isinstance(data.input, list):
        return data.input
    if len(data.input) != 1:
        raise DataError(f"data.input names {len(data.input)} columns; this task reads one")
    return data.input[0]


def classification_loss(
    outputs: Any, targets: Tensor, *, classes: int, label_smoothing: float, are_shares: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the samples, and the scores; the model must know every label.

    ``are_shares`` says that the model ends in a softmax already, as Keras models often do.
    """
    scores = logits_of(outputs)
    if scores.shape != (len(targets), classes):
        raise ModelError(
            f"the model gives scores of shape {tuple(scores.shape)}; "
            f"{(len(targets), classes)} was expected: one per sample and label",
            hint=f"its last layer needs {classes} outputs",
        )
    if are_shares:
        scores = scores.float().clamp(min=1e-7).log()
    return loss_sum(scores, targets, label_smoothing=label_smoothing), scores


class SingleLabelTask:
    """What tasks that answer each sample with one label do alike."""

    metric = "accuracy"
    labels: Labels
    _label_smoothing: float
    _gives_shares: bool

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Cross-entropy summed over the samples."""
        return classification_loss(
            self._answers(model, batch),
            batch.targets,
            classes=len(self.labels),
            label_smoothing=self._label_smoothing,
            are_shares=self._gives_shares,
        )

    def scorer(self) -> ClassScorer:
        """Accuracy, macro-F1 and confusion."""
        return ClassScorer(self.labels.names)

    def _answers(self, model: nn.Module, batch: Batch) -> Any:
        return call(model, batch)


def ends_in_softmax(model: Any) -> bool:
    """Whether a Keras model's last layer gives shares that add up to one instead of scores."""
    layers = getattr(getattr(model, "keras_model", None), "layers", None)
    if not layers:
        return False
    activation = getattr(layers[-1], "activation", None)
    is_softmax_layer = type(layers[-1]).__name__ == "Softmax"
    return is_softmax_layer or getattr(activation, "__name__", "") == "softmax"


def read_hf_config(spec: ModelSpec) -> Any:
    """The configuration of an ``hf:`` model with the job's arguments, before it is built."""
    try:
        from transformers import AutoConfig  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("transformers", "hf", f"The model {spec.name}") from error
    directory = find_hf_directory(spec.name)
    try:
        return AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True, **spec.args
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise ModelError(
            f"{directory / 'config.json'} is not a configuration that can be used: {reason}"
        ) from error


def read_hf_preprocessor(spec: ModelSpec) -> dict[str, Any]:
    """How pretrained weights expect their inputs; empty where the directory does not say."""
    path = find_hf_directory(spec.name) / "preprocessor_config.json"
    if not spec.pretrained or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def choose_front(job: Job, first: Any) -> LogMelFrontEnd | WaveformFrontEnd:
    """What the model hears: waves for Hugging Face models, log-mel frames for all others.

    The rate is the job's, else the one a pretrained model was trained at, else the first file's.
    """
    wanted = job.data.sample_rate
    if names_hf(job.model.name):
        usual = read_hf_preprocessor(job.model).get("sampling_rate", HF_SAMPLE_RATE)
        return WaveformFrontEnd(usual if wanted == "auto" else wanted)
    return LogMelFrontEnd(read_audio(first)[1] if wanted == "auto" else wanted)


def wants_mask(config: Any) -> bool:
    """Whether a Hugging Face speech model was trained with padding masked.

    Those that normalise each channel over time (``group``) were not, and answer worse with it.
    """
    return getattr(config, "feat_extract_norm", "layer") == "layer"


def label_config(labels: Labels) -> dict[str, Any]:
    """What a Hugging Face classifier needs to know of the labels; it is exported with them."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels.names)),
        "label2id": {name: index for index, name in enumerate(labels.names)},
    }


def _label(value: Any, row: int, part: str) -> str:
    number = value.item() if hasattr(value, "item") else value
    if number is None or (isinstance(number, float) and math.isnan(number)) or number == "":
        raise DataError(f"row {row} of the {part} data has no label")
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return str(number)


def _listing(names: Any, most: int = 10) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (f", … ({len(shown)} in all)" if len(shown) > most else "")
