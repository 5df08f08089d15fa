"""Scores for the report: evaluations, headline metric, confusion matrix, scores by label."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.core.metrics import lower_is_better
from yunlu.jobs.report_model import (
    ClassScore,
    ConfusionMatrix,
    EvaluationRow,
    Headline,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.jobs.run_log import RunLog
    from yunlu.runs.events import Evaluated


def read_evaluations(log: RunLog, *, wanted: str) -> tuple[str, tuple[EvaluationRow, ...]]:
    """The headline metric and all evaluations: validation by step, the test split last.

    The metric is the one ``wanted`` for, else the one that the task names first.
    """
    result = _by_split_and_step(log)
    order = sorted(result, key=lambda key: (key[0] == "test", key[0] != "validation", key[1]))
    rows = [_row(result[key]) for key in order]
    names = [name for row in rows for name in row.metrics]
    metric = wanted if wanted in {*names, "loss"} else next(iter(names), "loss")
    best = _best([row for row in rows if row.split == "validation"], metric)
    return metric, tuple(row.model_copy(update={"best": row is best}) for row in rows)


def quote(metric: str, rows: Sequence[EvaluationRow]) -> Headline | None:
    """The metric on the test split, else the best on the validation split."""
    tested = [row for row in rows if row.split == "test"]
    quoted = tested or [row for row in rows if row.best] or list(rows)
    if not quoted:
        return None
    row = quoted[-1]
    return Headline(metric=metric, value=_score(row, metric), split=row.split, step=row.step)


def detailed(log: RunLog, rows: Sequence[EvaluationRow]) -> Evaluated | None:
    """The evaluation to show in detail: of the test split, else the best, else the last."""
    scored = _by_split_and_step(log)
    for row in sorted(
        rows, key=lambda row: (row.split == "test", row.best, row.step), reverse=True
    ):
        evaluation = scored[row.split, row.step]
        if evaluation.confusion or evaluation.examples:
            return evaluation
    return None


def confusion_of(evaluation: Evaluated | None) -> ConfusionMatrix | None:
    """The confusion matrix with precision, recall and F1 of each label."""
    confusion = evaluation.confusion if evaluation else None
    if evaluation is None or confusion is None or not confusion.labels:
        return None
    counts = confusion.counts
    columns = [sum(column) for column in zip(*counts, strict=True)]
    return ConfusionMatrix(
        split=evaluation.split,
        step=evaluation.step,
        labels=confusion.labels,
        counts=counts,
        classes=tuple(
            _class_score(label, counts[i][i], taken=columns[i], support=sum(counts[i]))
            for i, label in enumerate(confusion.labels)
        ),
    )


def _by_split_and_step(log: RunLog) -> dict[tuple[str, int], Evaluated]:
    return {(event.split, event.step): event for event in log.view.evaluations}


def _row(evaluation: Evaluated) -> EvaluationRow:
    return EvaluationRow(
        split=evaluation.split,
        step=evaluation.step,
        loss=evaluation.loss,
        metrics=evaluation.metrics,
        seconds=evaluation.seconds,
        best=False,
    )


def _best(rows: Sequence[EvaluationRow], metric: str) -> EvaluationRow | None:
    ranked = [row for row in rows if math.isfinite(_score(row, metric))]
    sign = 1 if lower_is_better(metric) else -1
    # As the worker ranks checkpoints: ties go to the lower loss, then to the earlier step.
    return min(
        ranked, key=lambda row: (sign * _score(row, metric), row.loss, row.step), default=None
    )


def _score(row: EvaluationRow, metric: str) -> float:
    value = row.metrics.get(metric, row.loss if metric == "loss" else None)
    return math.nan if value is None else value


def _class_score(label: str, right: int, *, taken: int, support: int) -> ClassScore:
    return ClassScore(
        label=label,
        precision=right / taken if taken else None,
        recall=right / support if support else None,
        f1=2 * right / (taken + support) if taken + support else None,
        support=support,
    )
