"""Metrics of the user's own: functions of all outputs and targets of an evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from yunlu.core.errors import JobError, TrainingError
from yunlu.core.imports import import_object
from yunlu.core.units import show_bytes
from yunlu.training.tasks.scoring import IGNORED
from yunlu.training.tasks.task import StandardisesTargets, logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from yunlu.training.tasks.task import Batch, Evaluation, Scorer, Task

    Metrics = Callable[[NDArray[Any], NDArray[Any]], Mapping[str, float] | float]

MAX_BYTES = 4 << 30
"""Outputs of one evaluation that are kept for the functions, at most."""


@dataclass(frozen=True, slots=True)
class OwnMetric:
    """A function of the user's own, and the name of what it measures."""

    name: str
    function: Metrics


def open_metrics(metrics: Sequence[str | Metrics]) -> tuple[OwnMetric, ...]:
    """The functions; those that ``module:function`` names are imported."""
    return tuple(OwnMetric(name_of(metric), _function(metric)) for metric in metrics)


def open_scorer(task: Task, metrics: Sequence[OwnMetric]) -> Scorer:
    """A fresh scorer of the task, with the user's metrics."""
    scorer = task.scorer()
    return OwnMetricsScorer(scorer, metrics, task) if metrics else scorer


def name_of(metric: str | Metrics) -> str:
    """Name of a function, which is its metric's where it returns one number."""
    if isinstance(metric, str):
        return metric.rpartition(":")[2].rpartition(".")[2]
    return getattr(metric, "__name__", type(metric).__name__)


def _function(metric: str | Metrics) -> Metrics:
    function: Any = import_object(metric) if isinstance(metric, str) else metric
    name = metric if isinstance(metric, str) else name_of(metric)
    if not callable(function):
        raise JobError(
            f"metrics: {name} is not a function, but of {type(function).__name__}.",
            hint="def quality(outputs, targets): return {'my_metric': ...}",
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise JobError(
            f"metrics: {name} cannot be called with two arguments.",
            hint="it is given the outputs and the targets of a whole evaluation, as arrays",
        ) from None
    except ValueError:  # of what is written in C, the arguments may not be known
        pass
    return cast("Metrics", function)


class OwnMetricsScorer:
    """The task's own scorer, and functions that see the whole evaluation at once."""

    def __init__(self, scorer: Scorer, metrics: Sequence[OwnMetric], task: Task) -> None:
        self._scorer, self._metrics, self._task = scorer, metrics, task
        self._outputs: list[NDArray[Any]] = []
        self._targets: list[NDArray[Any]] = []
        self._bytes = 0

    def add(self, outputs: Any, batch: Batch) -> None:
        """Keep the outputs of a batch."""
        self._scorer.add(outputs, batch)
        predictions, targets = _pair(outputs, batch)
        if isinstance(self._task, StandardisesTargets):
            mean, std = self._task.target_scale
            predictions, targets = (
                predictions.reshape(targets.shape) * std + mean,
                targets * std + mean,
            )
        self._outputs.append(predictions)
        self._targets.append(targets)
        self._bytes += predictions.nbytes + targets.nbytes
        if self._bytes > MAX_BYTES:
            raise TrainingError(
                f"metrics: the outputs of one evaluation take more than {show_bytes(MAX_BYTES)}.",
                hint="evaluate less data (data.validation, data.split), or write a task whose scorer "
                "counts batch by batch",
            )

    def result(self) -> Evaluation:
        """The task's metrics, and those of the functions."""
        evaluation = self._scorer.result()
        outputs, targets = np.concatenate(self._outputs), np.concatenate(self._targets)
        metrics = dict(evaluation.metrics)
        for metric in self._metrics:
            metrics |= _read(metric.name, _call(metric, outputs, targets))
        return evaluation.model_copy(update={"metrics": metrics})


def _pair(outputs: Any, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs and targets of a batch as arrays, one row per item that counts."""
    targets = batch.targets
    if isinstance(targets, (tuple, list)) and targets and isinstance(targets[0], Tensor):
        targets = targets[0]
    try:
        logits = logits_of(getattr(outputs, "logits", outputs))
    except TypeError:
        logits = None
    if logits is None or not isinstance(targets, Tensor):
        raise TrainingError(
            "metrics: this task's outputs and targets are not two tensors.",
            hint="write a task with a scorer of your own; docs/tasks.md shows one",
        )
    predictions, true = logits.detach().float().cpu(), targets.detach().cpu()
    if (
        true.ndim
        and predictions.shape[: true.ndim] == true.shape
        and predictions.ndim == true.ndim + 1
    ):
        # Tokens of a batch and of all batches stand in one row; padding is left out.
        predictions, true = predictions.reshape(-1, predictions.shape[-1]), true.reshape(-1)
        if not true.is_floating_point():
            counted = true != IGNORED
            predictions, true = predictions[counted], true[counted]
    return predictions.numpy(), (true.float() if true.dtype is torch.bfloat16 else true).numpy()


def _call(metric: OwnMetric, outputs: NDArray[Any], targets: NDArray[Any]) -> Any:
    try:
        return metric.function(outputs, targets)
    except Exception as error:
        raise TrainingError(
            f"metrics: {metric.name} failed: {type(error).__name__}: {error}",
            hint=f"it was given outputs of shape {outputs.shape} and targets of shape {targets.shape}",
        ) from error


def _read(name: str, result: Any) -> dict[str, float]:
    """One number, or several by name."""
    figures = dict(result) if isinstance(result, Mapping) else {name: result}
    try:
        return {str(key): float(value) for key, value in figures.items()}
    except (TypeError, ValueError):
        raise TrainingError(
            f"metrics: {name} returned {str(result)[:80]!r}; a number was expected, or a mapping of "
            "names to numbers."
        ) from None
