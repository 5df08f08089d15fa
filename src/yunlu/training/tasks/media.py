"""Shared parts of classification and speech tasks: labels, loss, Hugging Face settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError, missing_part
from yunlu.core.limits import check_sample_rate, read_json, read_limits
from yunlu.training.data.audio import LogMelFrontEnd, WaveformFrontEnd, read_audio
from yunlu.training.data.table import FileRef
from yunlu.training.models.hf import check_config, find_hf_directory, names_hf
from yunlu.training.tasks.scoring import ClassScorer, loss_sum, predict_labels
from yunlu.training.tasks.task import Batch, ModelPrediction, call, logits_of

if TYPE_CHECKING:
    from yunlu.spec.job import DataSpec, Job, ModelSpec
    from yunlu.training.data.table import Column
    from yunlu.training.tasks.task import Samples

AUDIO_NAMES = ("audio", "sound", "wav", "speech", "x")
LABEL_NAMES = ("label", "labels", "target", "y", "class", "category", "word")
RowOf = Callable[[int], int]

HF_SAMPLE_RATE = 16_000
"""Sample rate of nearly every pretrained speech model."""


def _from_one(index: int) -> int:
    return index + 1


class Labels:
    """Labels of a classification in a fixed order: numbers by value, words alphabetically."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._indices = {name: index for index, name in enumerate(self.names)}

    @classmethod
    def learn(cls, column: Column, *, row_of: RowOf = _from_one) -> Labels:
        """Collect the labels of the training data; ``row_of`` gives a sample's row in its source."""
        names = {_label(value, row_of(row), "training") for row, value in enumerate(column)}
        if len(names) < 2:
            raise DataError(
                f"the training data has the single label {next(iter(names))!r}",
                hint="two or more are needed; is data.target the right column?",
            )
        numeric = all(name.lstrip("-").isdecimal() for name in names)
        return cls(sorted(names, key=int if numeric else None))

    def __len__(self) -> int:
        return len(self.names)

    def encode(
        self, column: Column, inputs: Column, *, part: str, row_of: RowOf = _from_one
    ) -> Tensor:
        """Indices of the labels; an unknown label is an error with its row or file."""
        indices = torch.empty(len(column), dtype=torch.int64)
        for row, value in enumerate(column):
            name = _label(value, row_of(row), part)
            if name not in self._indices:
                source = f" ({inputs[row]})" if isinstance(inputs[row], FileRef) else ""
                raise DataError(
                    f"the {part} data has the label {name!r} in row {row_of(row)}{source}, "
                    "which does not occur in the training data",
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
        """Several pairs; inputs in one call if supported."""
        getitems = getattr(self.inputs, "__getitems__", None)
        inputs = getitems(indices) if getitems else [self.inputs[index] for index in indices]
        return list(zip(inputs, self.targets[torch.as_tensor(indices)].tolist(), strict=True))


def sole_input(data: DataSpec) -> str | None:
    """The single input column of a job, if named."""
    if not isinstance(data.input, list):
        return data.input
    if len(data.input) != 1:
        raise DataError(f"data.input names {len(data.input)} columns; this task reads one")
    return data.input[0]


def classification_loss(
    outputs: Any, targets: Tensor, *, classes: int, label_smoothing: float, are_probabilities: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the samples, and the logits; checks their shape.

    ``are_probabilities``: the model ends in a softmax, as Keras models often do.
    """
    scores = logits_of(outputs)
    if scores.shape != (len(targets), classes):
        raise ModelError(
            f"the model gives scores of shape {tuple(scores.shape)}; "
            f"{(len(targets), classes)} was expected: one per sample and label",
            hint=f"its last layer needs {classes} outputs",
        )
    if are_probabilities:
        scores = scores.float().clamp(min=1e-7).log()
    return loss_sum(scores, targets, label_smoothing=label_smoothing), scores


class SingleLabelTask:
    """Base of tasks that predict one label per sample."""

    metric = "accuracy"
    labels: Labels
    _label_smoothing: float
    _gives_probabilities: bool

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Cross-entropy summed over the samples."""
        return classification_loss(
            self._outputs_of(model, batch),
            batch.targets,
            classes=len(self.labels),
            label_smoothing=self._label_smoothing,
            are_probabilities=self._gives_probabilities,
        )

    def scorer(self) -> ClassScorer:
        """Accuracy, macro-F1 and confusion."""
        return ClassScorer(self.labels.names)

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The most likely label of each input, and the probability of every label."""
        batch = self.collate([(encoded, 0) for encoded in self._encode_inputs(inputs)])
        return predict_labels(self.loss(model, batch)[1], self.labels.names)

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Pairs of an input and the index of its label to one batch."""
        raise NotImplementedError

    def _outputs_of(self, model: nn.Module, batch: Batch) -> Any:
        return call(model, batch)

    def _encode_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Inputs as in the samples of a split."""
        raise NotImplementedError


def ends_in_softmax(model: Any) -> bool:
    """Whether a Keras model's last layer gives probabilities instead of logits."""
    layers = getattr(getattr(model, "keras_model", None), "layers", None)
    if not layers:
        return False
    activation = getattr(layers[-1], "activation", None)
    is_softmax_layer = type(layers[-1]).__name__ == "Softmax"
    return is_softmax_layer or getattr(activation, "__name__", "") == "softmax"


def read_hf_config(spec: ModelSpec) -> Any:
    """Configuration of an ``hf:`` model with the job's arguments."""
    try:
        from transformers import AutoConfig  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("transformers", "hf", f"The model {spec.name}") from error
    directory = find_hf_directory(spec.name)
    check_config(directory / "config.json", spec.args)
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
    """Preprocessor settings of pretrained weights; empty if there are none."""
    path = find_hf_directory(spec.name) / "preprocessor_config.json"
    if not spec.pretrained or not path.is_file():
        return {}
    settings = read_json(path)
    return settings if isinstance(settings, dict) else {}


def choose_front_end(job: Job, first: Any) -> LogMelFrontEnd | WaveformFrontEnd:
    """The audio front end: waveforms for Hugging Face models, log-mel frames for all others.

    The sample rate is the job's, else the pretrained model's, else the first file's.
    """
    sample_rate = job.data.sample_rate
    if sample_rate != "auto":
        check_sample_rate("data.sample_rate", sample_rate, read_limits())
    if names_hf(job.model.name):
        usual = read_hf_preprocessor(job.model).get("sampling_rate", HF_SAMPLE_RATE)
        if type(usual) is not int:
            raise ModelError(
                f"{job.model.name}: its sampling_rate is {usual!r}, not a whole number."
            )
        check_sample_rate(job.model.name, usual, read_limits())
        return WaveformFrontEnd(usual if sample_rate == "auto" else sample_rate)
    return LogMelFrontEnd(read_audio(first)[1] if sample_rate == "auto" else sample_rate)


def restore_front_end(settings: dict[str, Any]) -> LogMelFrontEnd | WaveformFrontEnd:
    """The audio front end that an export describes."""
    check_sample_rate("preprocessing.json", settings["sample_rate"], read_limits())
    if settings["input"] == "wave":
        return WaveformFrontEnd(settings["sample_rate"])
    front = LogMelFrontEnd(settings["sample_rate"])
    front.restore(settings["mean"], settings["deviation"])
    return front


def wants_mask(config: Any) -> bool:
    """Whether a Hugging Face speech model was trained with padding masked.

    Those with group normalisation over time were not, and are less accurate with a mask.
    """
    return getattr(config, "feat_extract_norm", "layer") == "layer"


def label_config(labels: Labels) -> dict[str, Any]:
    """Label settings for a Hugging Face configuration; exported with the model."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels.names)),
        "label2id": {name: index for index, name in enumerate(labels.names)},
    }


def _label(value: Any, row: int, part: str) -> str:
    number = value.item() if hasattr(value, "item") else value
    if number is None or (isinstance(number, float) and math.isnan(number)) or number == "":
        raise DataError(
            f"row {row} of the {part} data has no label",
            hint="fill it in, or leave such rows out: what is to be predicted cannot be guessed",
        )
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return str(number)


def _listing(names: Any, most: int = 10) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (f", … ({len(shown)} in all)" if len(shown) > most else "")
