"""Objectives of a study in the evaluations of its trials, and errors when they are missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from yunlu.core.errors import did_you_mean
from yunlu.tuning.facts import best_point
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.facts import TrialFacts
    from yunlu.tuning.study_dir import StudyRequest
    from yunlu.tuning.study_runner.trial_events import RungScore, TrialEvents

ALIKE = 3
"""Equal failures without a success that end a study."""


def find_values(
    request: StudyRequest, events: TrialEvents, score: RungScore, *, dollars: float | None
) -> tuple[float, ...]:
    """Objectives of one evaluation, smaller is better; an error where one is not reported."""
    figures = score.metrics | {
        "seconds": score.device_seconds,
        "parameters": float(events.parameters),
    }
    figures |= {} if dollars is None else {"cost": dollars}
    for metric in request.metrics:
        if metric not in figures:
            raise StudyError(
                f"{metric} is never reported: the evaluations of this task do not give it",
                hint=did_you_mean(metric, figures),
            )
    return tuple(
        (-figures[metric] if direction == "maximize" else figures[metric]) + 0.0
        for metric, direction in zip(request.metrics, request.directions, strict=True)
    )


def check_metrics_reported(request: StudyRequest, events: TrialEvents) -> None:
    """Error for a run whose plan has no evaluations."""
    if events.plan and not events.plan.evaluate_every:
        raise StudyError(
            f"{request.metrics[0]} is never reported: the job has no evaluations on validation data",
            hint="name data.validation or hold out a share (data.split.validation), "
            "and set train.evaluate to steps or epoch",
        )


def check_failures(facts: Sequence[TrialFacts], message: str, *, hint: str | None = None) -> None:
    """End the study if a failed trial shows that none will succeed."""
    if any(best_point(fact.trial) or fact.state is TrialState.DONE for fact in facts):
        return
    if "asks for the metric" in message:  # the same for every setting
        raise StudyError(message, hint=hint)
    failed = [fact for fact in facts if fact.state is TrialState.FAILED]
    alike = [item for item in failed if _bare(item.error or "") == _bare(message)]
    if len(alike) >= ALIKE:
        first = failed[0]
        logs = f"yunlu logs {first.run} shows the whole of it" if first.run else None
        raise StudyError(
            f"the first {len(failed)} trials failed alike: {first.error}", hint=hint or logs
        )


def _bare(message: str) -> str:
    """Without numbers, which differ from trial to trial."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", message)
