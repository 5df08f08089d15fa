"""The ``Task`` extension point: the interface between a kind of learning and the engine.

A task turns data into batches, builds the model, and gives the *sum* of the loss over a batch with
the number of items (samples or tokens) in it. The engine divides by the true count of the whole
global batch, so accumulation and uneven batches never change the objective.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor, nn

from yunlu.core.errors import DataError, JobError, ModelError
from yunlu.core.imports import TASKS, load_registered, make_object, names_object
from yunlu.core.value import Value
from yunlu.training.data.batches import lengths_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.tasks.own_metrics import OwnMetric


class Samples(Protocol):
    """A map-style data set; the engine determines the order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The three parts of a data set, after ``Task.load``."""

    train: Samples
    validation: Samples | None
    test: Samples | None
    fingerprint: str
    """Changes whenever the data changes: for lineage, and checked when a run resumes."""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    """Details for the report: source, labels, vocabulary size, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch."""

    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    """Arguments of the model: by position, or by name."""
    targets: Any
    """Targets of the loss: a tensor, or a tuple or dict of tensors."""
    samples: int
    items: int
    """Number of items the loss is averaged over: samples, or counted tokens."""
    tokens: int = 0
    """Computed positions, padding included; 0 if samples are all of one size."""
    padding: int = 0
    """Padding positions among them."""
    counts: bool = True
    """False for a placeholder: a worker without samples runs another's sample at weight zero."""
    digest: int = 0
    """Digest of its samples, if a ledger is kept: see ``communication.step_sync``."""
    on_host: tuple[int | str, ...] = ()
    """Inputs, by position or name, and targets, by name, that stay there: lengths, whose values the host
    needs to shape what the device computes, and would wait for."""

    @property
    def num_values(self) -> int:
        """Input values, padding included: what a pass over it costs, more or less."""
        inputs = self.inputs.values() if isinstance(self.inputs, dict) else self.inputs
        return sum(value.numel() for value in inputs)

    def to(self, device: torch.device) -> Batch:
        """The same batch on the device."""
        if device.type == "cpu":
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        def move_all(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: self._move_part(key, item, move) for key, item in value.items()}
            return map_tensors(value, move)

        inputs = self.inputs
        if isinstance(inputs, tuple):
            moved = tuple(self._move_part(at, item, move) for at, item in enumerate(inputs))
        else:
            moved = move_all(inputs)
        return replace(self, inputs=moved, targets=move_all(self.targets))

    def _move_part(self, key: int | str, value: Any, move: Callable[[Tensor], Tensor]) -> Any:
        return value if key in self.on_host else map_tensors(value, move)


class Confusion(Value):
    """Confusion matrix: counts of true labels (rows) by predicted labels (columns)."""

    labels: list[str]
    counts: list[list[int]]


class Example(Value):
    """One sample of an evaluation, for display."""

    input: str
    expected: str
    predicted: str


class Evaluation(Value):
    """Result of a scorer on one split."""

    metrics: dict[str, float]
    confusion: Confusion | None = None
    examples: list[Example] = Field(default_factory=list[Example])


class Scorer(Protocol):
    """Accumulates metrics over the batches of one split."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the model's outputs for one batch."""
        ...

    def result(self) -> Evaluation:
        """The metrics over everything added."""
        ...


@runtime_checkable
class Task(Protocol):
    """A kind of learning. ``load`` is called first, once; it may store statistics of the data."""

    metric: str
    """Headline metric of this task (a key of ``Evaluation.metrics``, or ``loss``)."""

    def load(self, job: Job) -> Splits:
        """Read the data and split it. Deterministic: a resumed run calls it again."""
        ...

    def build(self, job: Job) -> nn.Module:
        """Build the model, with random or pretrained weights."""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples to one batch of tensors on the CPU. Draws no random numbers."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss *summed* over the batch's items, and the outputs that a scorer reads."""
        ...

    def scorer(self) -> Scorer:
        """A fresh scorer."""
        ...


@runtime_checkable
class SavesArtifacts(Protocol):
    """A task with more to export than weights: labels, a tokenizer, feature statistics."""

    def save_artifacts(self, directory: Path) -> None:
        """Write them beside the exported weights; no pickles."""
        ...


@runtime_checkable
class StandardisesTargets(Protocol):
    """A task whose model answers numbers in standard deviations from their mean."""

    @property
    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the targets."""
        ...


class ModelPrediction(Value):
    """Answer of a model to one input."""

    value: str | float
    """A label, a number, or a text."""
    scores: dict[str, float] | None = None
    """Probability of each label, where there are labels."""


@runtime_checkable
class Predicts(SavesArtifacts, Protocol):
    """A task whose exported models can be used: ``restore`` takes the place of ``load``."""

    def restore(self, job: Job, directory: Path) -> None:
        """Read back what ``load`` learned, from the artifacts beside the exported weights."""
        ...

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The model's answers, in order; with the same numbers as an evaluation."""
        ...


@runtime_checkable
class DeclaresKeys(Protocol):
    """A task that declares which special keys of a job it reads, so that others give a warning."""

    special_keys: frozenset[str]
    """Some of ``SPECIAL_KEYS``."""


@runtime_checkable
class SupportsPacking(Protocol):
    """A task that can pack samples instead of padding them."""

    def can_pack(self, model: nn.Module) -> bool:
        """Whether this model gives the same outputs for packed samples."""
        ...

    def pack(self, samples: Sequence[Any]) -> Batch:
        """As ``collate``, without padding; the loss and its gradient are the same."""
        ...


Padding = Literal["pad", "bucket", "pack"]
"""Samples of different length: padded, bucketed by length and padded, or packed."""


def padding_options(task: Task, model: nn.Module, splits: Splits) -> list[Padding]:
    """Padding modes that apply here; only ``pad`` for data of one size."""
    lengths = lengths_of(splits.train)
    if lengths is None or (lengths == lengths[:1]).all():
        return ["pad"]
    packs = isinstance(task, SupportsPacking) and task.can_pack(model)
    return ["pad", "bucket", "pack"] if packs else ["pad", "bucket"]


def check_padding(requested: Padding, options: Sequence[Padding]) -> None:
    """Check that the requested padding mode is among the options."""
    if requested in options:
        return
    if "bucket" in options:
        raise ModelError(
            "train.padding: pack needs a model and a task that support packed samples, and these do "
            "not.",
            hint="use train.padding: bucket, which batches samples by length",
        )
    raise DataError(
        f"train.padding: {requested} is for samples of different length; these are all of one size, "
        "or have no lengths.",
        hint="remove train.padding",
    )


def collate_for(task: Task, padding: Padding) -> Callable[[Sequence[Any]], Batch]:
    """The collate function for training; evaluation always pads."""
    if padding != "pack":
        return task.collate
    assert isinstance(task, SupportsPacking)
    return task.pack


SPECIAL_KEYS = (
    "data.max_length",
    "data.tokenizer",
    "data.vocabulary",
    "data.image_size",
    "data.sample_rate",
    "train.label_smoothing",
)
"""Keys that only some tasks read."""


def call(model: nn.Module, batch: Batch) -> Any:
    """Run the model on the batch's inputs."""
    if isinstance(batch.inputs, dict):
        return model(**batch.inputs)
    return model(*batch.inputs)


def logits_of(outputs: Any) -> Tensor:
    """The logits, bare or inside a Hugging Face output."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(outputs, tuple) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise TypeError(f"the model returned {type(outputs).__name__}, which has no tensor of logits")


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch's inputs or targets with each tensor changed; what is no tensor stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """A task with its data loaded and its model built."""

    task: Task
    model: nn.Module
    splits: Splits
    metrics: Sequence[OwnMetric] = ()
    """The user's own."""


def open_task(name: str) -> Task:
    """The task that a job names."""
    task = make_object(name) if names_object(name) else load_registered(TASKS, name, kind="task")()
    if not isinstance(task, Task):
        needed = ("metric", "load", "build", "collate", "loss", "scorer")
        missing = ", ".join(attribute for attribute in needed if not hasattr(task, attribute))
        raise JobError(
            f"{name} is not a task: it lacks {missing}.",
            hint="See yunlu.training.tasks.task.Task; its contract test shows what each must do.",
        )
    return task
