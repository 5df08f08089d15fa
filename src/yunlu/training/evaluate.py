"""One pass over a split: the mean loss, the task's metrics, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from yunlu.runs.events import Evaluated
from yunlu.training.data.batches import sequential_batches
from yunlu.training.device import random_kept
from yunlu.training.tasks.own_metrics import open_scorer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from yunlu.training.precision import Precision
    from yunlu.training.tasks.own_metrics import OwnMetric
    from yunlu.training.tasks.task import Evaluation, Samples, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of one evaluation."""

    loss: float
    evaluation: Evaluation
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """The loss and the task's own metrics."""
        return {"loss": self.loss, **self.evaluation.metrics}

    def as_event(self, *, split: str, step: int, rung: int | None = None) -> Evaluated:
        """The event that reports it."""
        scored = self.evaluation.model_dump()
        return Evaluated(
            split=split, step=step, loss=self.loss, seconds=self.seconds, rung=rung, **scored
        )


def evaluate(
    task: Task,
    model: nn.Module,
    samples: Samples,
    *,
    precision: Precision,
    device: torch.device,
    micro_batch: int,
    workers: int = 0,
    metrics: Sequence[OwnMetric] = (),
) -> Score:
    """Score the model without touching its mode or the training's random numbers.

    ``metrics``: those of the user's own.
    """
    started_at = perf_counter()
    was_training = model.training
    model.eval()
    scorer, total, items = open_scorer(task, metrics), torch.zeros((), device=device), 0
    try:
        with random_kept(), torch.no_grad():
            for batch in sequential_batches(
                samples, task.collate, micro_batch=micro_batch, workers=workers
            ):
                moved = batch.to(device)
                with precision.forward():
                    loss, outputs = task.loss(model, moved)
                total += loss
                items += moved.items
                scorer.add(outputs, moved)
            evaluation = scorer.result()
    finally:
        model.train(was_training)
    return Score(
        loss=float(total) / max(items, 1),
        evaluation=evaluation,
        seconds=perf_counter() - started_at,
    )
