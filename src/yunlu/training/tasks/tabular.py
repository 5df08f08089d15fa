"""Classification and regression of tabular data."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError, did_you_mean
from yunlu.core.files import write_atomically
from yunlu.training.data.sources import load_tables
from yunlu.training.data.table import (
    FeatureMap,
    find_column,
    fit_features,
    is_numeric,
    rows_to_table,
)
from yunlu.training.models.build import build_model
from yunlu.training.models.initial_weights import read_artifacts, read_exported
from yunlu.training.models.networks import MLP
from yunlu.training.tasks.scoring import ClassScorer, RegressionScorer, loss_sum, predict_labels
from yunlu.training.tasks.task import Batch, ModelPrediction, Splits, call, logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.data.sources import Tables
    from yunlu.training.data.table import DataTable

TARGETS = ("label", "target", "y", "class", "category", "species", "outcome", "output", "labels")


class Rows(NamedTuple):
    """Features and targets of several samples."""

    features: Tensor
    targets: Tensor


class RowSamples:
    """A split in memory, as tensors."""

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        self._features, self._targets = features, targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Rows:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Rows]:
        """Torch's convention for batched fetching; all rows as one ``Rows``."""
        chosen = torch.tensor(indices)
        return [Rows(self._features[chosen], self._targets[chosen])]


class _Tabular(ABC):
    """Base of both tasks: features, batches, model interface."""

    _features: FeatureMap
    _target: str

    def load(self, job: Job) -> Splits:
        """Read the table, find the target, fit the features on the training split."""
        tables = load_tables(job.data, seed=job.train.seed)
        train, held_out, test = tables.train, tables.validation, tables.test
        self._target = find_column(train, job.data.target, TARGETS, key="data.target")
        requested = [job.data.input] if isinstance(job.data.input, str) else job.data.input
        names = requested or [name for name in train.columns if name != self._target]
        if self._target in names:
            raise DataError(f"column {self._target!r} is both input and target")
        # Other models do not embed category indices: they get plain features.
        # Initial weights keep the statistics they were trained with.
        base = read_artifacts(job.model)
        self._features = (
            FeatureMap.model_validate(base["features"])
            if "features" in base
            else fit_features(train, names, embed=job.model.name == "mlp")
        )
        self._prepare(job, tables)
        return Splits(
            train=self._samples(train, "training"),
            validation=None if held_out is None else self._samples(held_out, "validation"),
            test=None if test is None else self._samples(test, "test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "target": self._target,
                "inputs": [name for name in names if name not in self._features.left_out],
                "left_out": self._features.left_out,
                "features": self._features.width,
                **self._meaning(),
            },
        )

    def build(self, job: Job) -> nn.Module:
        """Build ``mlp``, or a user's model that takes ``(features,)``."""
        sizes: dict[str, Any] = {"inputs": self._features.width, "outputs": self._outputs}
        if self._features.embedded_sizes:
            sizes["categories"] = self._features.embedded_sizes
        return build_model(job.model, builtins={"mlp": MLP}, sizes=sizes)

    def collate(self, samples: Sequence[Rows]) -> Batch:
        """Rows to one batch."""
        features, targets = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*samples, strict=True)
        )
        return Batch(inputs=(features,), targets=targets, samples=len(targets), items=len(targets))

    def save_artifacts(self, directory: Path) -> None:
        """Save ``tabular.json``: columns, statistics, and the meaning of the outputs."""
        parts = {
            "target": self._target,
            "features": self._features.model_dump(mode="json"),
            **self._meaning(),
        }
        text = json.dumps(parts, ensure_ascii=False, indent=1)
        write_atomically(directory / "tabular.json", text)

    def restore(self, job: Job, directory: Path) -> None:
        """Read ``tabular.json``."""
        del job
        settings = read_exported(directory)
        self._target = settings["target"]
        self._features = FeatureMap.model_validate(settings["features"])
        self._restore_meaning(settings)

    def _encode_rows(self, inputs: Sequence[Any], targets: torch.dtype) -> list[Rows]:
        """Rows as mappings from column to value, or values in the order of the training columns."""
        names = [part.name for part in (*self._features.numeric, *self._features.categories)]
        table = rows_to_table(inputs, names)
        features = torch.from_numpy(self._features.encode(table))
        return [Rows(features, torch.zeros(len(features), dtype=targets))]

    def _samples(self, table: DataTable, part: str) -> RowSamples:
        features = torch.from_numpy(self._features.encode(table))
        return RowSamples(features, self._targets(table, part))

    def _scores(self, model: nn.Module, batch: Batch, *, width: int) -> tuple[Tensor, Any]:
        """The model's scores ``(samples, width)``, checked, and its raw outputs."""
        outputs = call(model, batch)
        scores = logits_of(outputs)
        if scores.numel() != batch.samples * width:
            raise ModelError(
                f"the model returned scores of shape {tuple(scores.shape)} for {batch.samples} "
                f"samples; expected ({batch.samples}, {width})"
            )
        return scores.reshape(batch.samples, width), outputs

    @property
    @abstractmethod
    def _outputs(self) -> int: ...

    @abstractmethod
    def _prepare(self, job: Job, tables: Tables) -> None:
        """Fit the target encoding."""

    @abstractmethod
    def _targets(self, table: DataTable, part: str) -> Tensor: ...

    @abstractmethod
    def _meaning(self) -> dict[str, Any]:
        """Meaning of the outputs, as JSON."""

    @abstractmethod
    def _restore_meaning(self, settings: dict[str, Any]) -> None:
        """Read back the meaning of the outputs."""


class TabularClassification(_Tabular):
    """Classification of rows."""

    metric = "accuracy"
    special_keys = frozenset({"train.label_smoothing"})
    _labels: list[str]
    _label_smoothing: float

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Cross-entropy summed over the rows."""
        scores, outputs = self._scores(model, batch, width=self._outputs)
        return loss_sum(scores, batch.targets, label_smoothing=self._label_smoothing), outputs

    def scorer(self) -> ClassScorer:
        """Accuracy, macro-F1, confusion."""
        return ClassScorer(self._labels)

    @property
    def _outputs(self) -> int:
        return len(self._labels)

    def _prepare(self, job: Job, tables: Tables) -> None:
        self._label_smoothing = job.train.label_smoothing
        column = tables.full_train[self._target]
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            filled = column[~np.isnan(column)]
            fractions = filled[filled != np.round(filled)]
            if len(fractions):
                raise DataError(
                    f"column {self._target!r} holds fractions, such as {fractions[0]:g}: not labels",
                    hint="task: tabular-regression predicts numbers",
                )
        self._labels = sort_labels(label_names(tables.full_train, self._target, "training"))
        if len(self._labels) < 2:
            raise DataError(
                f"column {self._target!r} has one label only, {self._labels[0]!r}: at least two are needed"
            )

    def _targets(self, table: DataTable, part: str) -> Tensor:
        index = {label: number for number, label in enumerate(self._labels)}
        labels = label_names(table, self._target, part)
        for row, label in enumerate(labels):
            if label not in index:
                raise DataError(
                    f"row {table.source_row(row)} of the {part} data has the label {label!r}, "
                    "which does not occur in the training data",
                    hint=did_you_mean(label, self._labels[:50]),
                )
        return torch.tensor([index[label] for label in labels])

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The most likely label of each row."""
        batch = self.collate(self._encode_rows(inputs, torch.int64))
        return predict_labels(self.loss(model, batch)[1], self._labels)

    def _meaning(self) -> dict[str, Any]:
        return {"labels": self._labels}

    def _restore_meaning(self, settings: dict[str, Any]) -> None:
        self._labels, self._label_smoothing = settings["labels"], 0.0


class TabularRegression(_Tabular):
    """Regression of rows; trained on standardised targets, scored in their own units."""

    metric = "rmse"
    special_keys = frozenset[str]()
    _mean: float
    _std: float

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Squared error summed over the rows."""
        scores, outputs = self._scores(model, batch, width=1)
        return (scores.squeeze(-1).float() - batch.targets).square().sum(), outputs

    def scorer(self) -> RegressionScorer:
        """RMSE, MSE, MAE, R²."""
        return RegressionScorer(scale=self._std)

    @property
    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the target."""
        return self._mean, self._std

    @property
    def _outputs(self) -> int:
        return 1

    def _prepare(self, job: Job, tables: Tables) -> None:
        values = self._numbers(tables.train, "training")
        base = read_artifacts(job.model)
        self._mean = base.get("mean", float(values.mean()))
        self._std = base.get("std", float(values.std()) or 1.0)

    def _targets(self, table: DataTable, part: str) -> Tensor:
        scaled = (self._numbers(table, part) - self._mean) / self._std
        return torch.from_numpy(scaled.astype(np.float32))

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The number of each row, in the target's own units."""
        batch = self.collate(self._encode_rows(inputs, torch.float32))
        scores, _ = self._scores(model, batch, width=1)
        values = scores.double().squeeze(-1) * self._std + self._mean
        return [ModelPrediction(value=value) for value in values.tolist()]

    def _meaning(self) -> dict[str, Any]:
        return {"mean": self._mean, "std": self._std}

    def _restore_meaning(self, settings: dict[str, Any]) -> None:
        self._mean, self._std = settings["mean"], settings["std"]

    def _numbers(self, table: DataTable, part: str) -> np.ndarray:
        column = table[self._target]
        if not is_numeric(column) or np.ndim(column) != 1:
            odd = next((i for i, cell in enumerate(column) if not _is_number(cell)), 0)
            raise DataError(
                f"column {self._target!r} of the {part} data is not one number per row: "
                f"row {table.source_row(odd)} has {column[odd]!r}",
                hint="correct the row, or let task: tabular-classification predict labels",
            )
        values = np.asarray(column, dtype=np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            row = table.source_row(int(bad[0]))
            raise DataError(
                f"row {row} of the {part} data has no number in {self._target!r}, its target"
                f"{count_others(len(bad))}",
                hint="fill it in, or leave such rows out: what is to be predicted cannot be guessed",
            )
        return values


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def label_names(table: DataTable, name: str, part: str) -> list[str]:
    """A column of labels as strings: ``3`` for 3 and for 3.0; a missing one is an error."""
    names: list[str] = []
    for index, value in enumerate(table[name]):
        if value is None or value == "" or value != value:  # noqa: PLR0124 - NaN alone differs from itself
            row = table.source_row(index)
            raise DataError(
                f"row {row} of the {part} data has no label in column {name!r}",
                hint="fill it in, or leave such rows out: what is to be predicted cannot be guessed",
            )
        is_whole = isinstance(value, (float, np.floating)) and float(value).is_integer()
        names.append(str(int(value)) if is_whole else str(value))
    return names


def count_others(rows: int) -> str:
    """How many more rows have the same problem."""
    return f", and {rows - 1} more" if rows > 1 else ""


def sort_labels(names: Sequence[str]) -> list[str]:
    """Unique labels: by value if all are integers, else alphabetically."""
    labels = set(names)
    if all(label.lstrip("-").isdecimal() for label in labels):
        return sorted(labels, key=int)
    return sorted(labels)
