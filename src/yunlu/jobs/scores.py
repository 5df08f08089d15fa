"""How well the model did: evaluations, the figure to quote, confusion and scores by label."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from yunlu.core.metrics import lower_is_better
from yunlu.jobs.recorded import number, numbers
from yunlu.jobs.report_model import (
    ClassScore,
    ConfusionMatrix,
    EvaluationExample,
    EvaluationRow,
    Headline,
)
from yunlu.runs.run_dir import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.jobs.recorded import Recorded


def read_evaluations(recorded: Recorded, *, asked: str) -> tuple[str, tuple[EvaluationRow, ...]]:
    """The metric to quote, and all evaluations: validation by step, the test split last.

    The metric is the one ``asked`` for, else the one that the task names first.
    """
    found = _by_split_and_step(recorded)
    order = sorted(found, key=lambda key: (key[0] == "test", key[0] != "validation", key[1]))
    rows = [_row(*key, found[key]) for key in order]
    names = [name for row in rows for name in row.metrics]
    metric = asked if asked in {*names, "loss"} else next(iter(names), "loss")
    best = _best([row for row in rows if row.split == "validation"], metric)
    return metric, tuple(row.model_copy(update={"best": row is best}) for row in rows)


def quote(metric: str, rows: Sequence[EvaluationRow]) -> Headline | None:
    """The metric on the test split where there is one, else the best on the validation split."""
    tested = [row for row in rows if row.split == "test"]
    quoted = tested or [row for row in rows if row.best] or list(rows)
    if not quoted:
        return None
    row = quoted[-1]
    return Headline(metric=metric, value=_score(row, metric), split=row.split, step=row.step)


def detailed(recorded: Recorded, rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The evaluation worth a closer look: the test's, else the best one's, else the last."""
    found = _by_split_and_step(recorded)
    for row in sorted(
        rows, key=lambda row: (row.split == "test", row.best, row.step), reverse=True
    ):
        data = found[row.split, row.step]
        if data.get("confusion") or data.get("examples"):
            return data
    return {}


def confusion_of(evaluation: dict[str, Any]) -> ConfusionMatrix | None:
    """The confusion matrix with precision, recall and F1 of each label."""
    matrix = evaluation.get("confusion")
    if not matrix or not matrix.get("labels"):
        return None
    labels = [str(label) for label in matrix["labels"]]
    counts = [[int(count) for count in row] for row in matrix["counts"]]
    columns = [sum(column) for column in zip(*counts, strict=True)]
    return ConfusionMatrix(
        split=str(evaluation.get("split")),
        step=int(evaluation.get("step", 0)),
        labels=tuple(labels),
        counts=tuple(tuple(row) for row in counts),
        classes=tuple(
            _class_score(label, counts[i][i], taken=columns[i], support=sum(counts[i]))
            for i, label in enumerate(labels)
        ),
    )


def example_of(data: dict[str, Any]) -> EvaluationExample:
    """One sample with what was expected and what the model said."""
    return EvaluationExample(**{key: str(data.get(key, "")) for key in ("input", "expected", "predicted")})


def _by_split_and_step(recorded: Recorded) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (str(each.get("split")), int(each.get("step", 0))): each
        for each in recorded.by_step(EventKind.EVALUATION)
    }


def _row(split: str, step: int, data: dict[str, Any]) -> EvaluationRow:
    return EvaluationRow(
        split=split,
        step=step,
        loss=number(data.get("loss")),
        metrics=numbers(data.get("metrics")),
        seconds=number(data.get("seconds")),
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
