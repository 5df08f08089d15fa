"""Losses, scorers and greedy decoding that several tasks share.

Shapes: B batch, P prompt, L length of the window.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from yunlu.training.tasks.task import (
    Batch,
    Confusion,
    Evaluation,
    ModelPrediction,
    logits_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


IGNORED = -100
"""Target of padding: ignored by loss and metrics."""
_CONFUSION_LIMIT = 100


def loss_sum(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over the counted targets, in float32 whatever the model's precision.

    ``logits`` are ``(..., classes)`` and ``targets`` ``(...)``.
    """
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        targets.reshape(-1),
        reduction="sum",
        label_smoothing=label_smoothing,
        ignore_index=IGNORED,
    )


def predict_labels(outputs: Any, labels: list[str]) -> list[ModelPrediction]:
    """The most likely label of each sample, by the outputs that a scorer would read."""
    logits = logits_of(outputs).reshape(-1, len(labels))
    rows: list[list[float]] = logits.float().softmax(dim=-1).tolist()
    bests: list[int] = logits.argmax(dim=-1).tolist()
    return [
        ModelPrediction(value=labels[best], scores=dict(zip(labels, row, strict=True)))
        for row, best in zip(rows, bests, strict=True)
    ]


class ClassScorer:
    """Accuracy, macro-F1, top-k accuracy and confusion matrix; stores counts only."""

    def __init__(self, labels: Sequence[str], top: int = 5) -> None:
        self._labels = [str(label) for label in labels]
        self._top = top if len(self._labels) > top else 0
        self._with_confusion = len(self._labels) <= _CONFUSION_LIMIT
        # Counts stay on the model's device until the result: no synchronisation per batch.
        self._counts: dict[str, Tensor] = {}

    def add(self, outputs: Any, batch: Batch | Tensor) -> None:
        """Add logits ``(..., classes)``, bare or in a model output, and a batch or its targets."""
        classes = len(self._labels)
        truth = batch.targets if isinstance(batch, Batch) else batch
        scores = logits_of(outputs).detach().reshape(-1, classes)
        truth = truth.to(scores.device).reshape(-1)
        counted = truth != IGNORED
        scores, truth = scores[counted], truth[counted]
        predicted = scores.argmax(dim=-1)
        self._count("true", torch.bincount(truth, minlength=classes))
        self._count("guessed", torch.bincount(predicted, minlength=classes))
        self._count("right", torch.bincount(truth[predicted == truth], minlength=classes))
        if self._top:
            best = scores.topk(self._top, dim=-1).indices
            self._count("top", (best == truth[:, None]).any(dim=-1).sum())
        if self._with_confusion:
            cells = torch.bincount(truth * classes + predicted, minlength=classes * classes)
            self._count("confusion", cells)

    def result(self) -> Evaluation:
        """``accuracy``, ``macro_f1`` over occurring labels, ``top5_accuracy`` for many labels."""
        if not self._counts:
            return Evaluation(metrics={"accuracy": math.nan, "macro_f1": math.nan})
        counts = {name: tensor.cpu() for name, tensor in self._counts.items()}
        total = max(int(counts["true"].sum()), 1)
        occurring = counts["true"] + counts["guessed"]
        f1 = 2 * counts["right"].double() / occurring.clamp(min=1)
        metrics = {
            "accuracy": int(counts["right"].sum()) / total,
            "macro_f1": float(f1[occurring > 0].mean()),
        }
        if self._top:
            metrics[f"top{self._top}_accuracy"] = int(counts["top"]) / total
        return Evaluation(metrics=metrics, confusion=self._confusion(counts.get("confusion")))

    def _count(self, name: str, counts: Tensor) -> None:
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def _confusion(self, cells: Tensor | None) -> Confusion | None:
        if cells is None:
            return None
        size = len(self._labels)
        return Confusion(labels=self._labels, counts=cells.reshape(size, size).tolist())


class RegressionScorer:
    """MSE, RMSE, MAE and R², in the target's own units.

    The model predicts standardised targets (divided by ``scale``); sums are accumulated in float64 and
    scaled back at the end.
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self._scale = scale
        self._count = 0
        self._squared = self._absolute = 0.0
        self._mean = self._spread = 0.0

    def add(self, outputs: Any, batch: Batch | Tensor) -> None:
        """Add scaled predictions and a batch, or its scaled targets."""
        truth = batch.targets if isinstance(batch, Batch) else batch
        truth = truth.detach().cpu().double().reshape(-1)
        predicted = logits_of(outputs).detach().cpu().double().reshape(-1)
        error = predicted - truth
        self._squared += float(error.square().sum())
        self._absolute += float(error.abs().sum())
        self._merge(truth)

    def result(self) -> Evaluation:
        """``rmse``, ``mse``, ``mae``, ``r2`` (``nan`` for constant targets)."""
        count = max(self._count, 1)
        mse = self._squared / count * self._scale**2
        r2 = 1 - self._squared / self._spread if self._spread > 0 else math.nan
        mae = self._absolute / count * self._scale
        return Evaluation(metrics={"rmse": math.sqrt(mse), "mse": mse, "mae": mae, "r2": r2})

    def _merge(self, truth: Tensor) -> None:
        # Chan, Golub and LeVeque (1983): merge of squared deviations.
        added = truth.numel()
        if not added:
            return
        mean = float(truth.mean())
        difference, total = mean - self._mean, self._count + added
        self._spread += float((truth - mean).square().sum())
        self._spread += difference**2 * self._count * added / total
        self._mean += difference * added / total
        self._count = total


def edit_distance(truth: Sequence[Any], predicted: Sequence[Any]) -> int:
    """Levenshtein distance: insertions, deletions and replacements (Levenshtein, 1966)."""
    above = list(range(len(predicted) + 1))
    for row, expected in enumerate(truth, start=1):
        current = [row]
        for column, actual in enumerate(predicted, start=1):
            replaced = above[column - 1] + (expected != actual)
            current.append(min(replaced, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]


@dataclass(frozen=True, slots=True)
class GenerativeOutputs:
    """Logits of a batch, and a function that generates text."""

    logits: Tensor
    generate: Callable[..., Tensor]


@torch.no_grad()
def extend(
    logits_for: Callable[[Tensor], Tensor],
    prompts_BP: Tensor,
    *,
    count: int,
    length: int,
    fill: int,
) -> Tensor:
    """Greedy decoding of ``count`` tokens: ``(B, count)``.

    The window keeps its full ``length`` (causal models ignore later positions), so that
    a compiled model sees only one shape.
    """
    start = prompts_BP.shape[1]
    window_BL = prompts_BP.new_full((len(prompts_BP), length), fill)
    window_BL[:, :start] = prompts_BP
    end = min(start + count, length)
    for position in range(start, end):
        window_BL[:, position] = logits_for(window_BL)[:, position - 1].argmax(dim=-1)
    return window_BL[:, start:end]


def unwrapped(model: nn.Module) -> Any:
    """The module inside a data-parallel wrapper."""
    return getattr(model, "module", model)
