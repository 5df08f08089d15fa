"""Trials of earlier studies to learn from: ours by name, others by the URL of an Optuna storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState as OptunaState

from yunlu.tuning.records import open_study, turn_values
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.values import Point, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optuna.study._frozen import FrozenStudy

    from yunlu.tuning.study_dir import StudyRequest


def read_past(request: StudyRequest, sources: Sequence[str]) -> list[Trial]:
    """Trials of these studies with a value, renumbered."""
    matching_trials = [
        trial
        for source in sources
        for trial in (_foreign(request, source) if "://" in source else _own(request, source))
    ]
    return [
        Trial(number=number, params=trial.params, state=trial.state, points=trial.points)
        for number, trial in enumerate(matching_trials)
    ]


def _own(request: StudyRequest, name: str) -> Iterator[Trial]:
    try:
        earlier = open_study(name)
    except StudyError as error:
        raise StudyError(f"search.warm_start: {error.message}", hint=error.hint) from None
    if (
        earlier.request.metrics != request.metrics
        or earlier.request.directions != request.directions
    ):
        raise StudyError(
            f"the study {name} sought {', '.join(earlier.request.metrics)}, not "
            f"{', '.join(request.metrics)}: nothing can be learned from it",
            hint="remove it from search.warm_start",
        )
    for trial in earlier.trials():
        if trial.points and trial.state.is_over:
            yield trial
        elif trial.points:  # equivalent to a pruned one there
            yield replace(trial, state=TrialState.PRUNED)


def _foreign(request: StudyRequest, url: str) -> Iterator[Trial]:
    """Of each study with as many objectives; a value without a curve is that of a full training."""
    kind, _, path = url.partition(":///")
    if kind == "sqlite" and not Path(path.partition("?")[0]).is_file():
        raise StudyError(f"search.warm_start: there is no file {path}")  # Optuna would create one
    try:
        storage = optuna.storages.get_storage(url)
        studies = storage.get_all_studies()
    except Exception as error:
        raise StudyError(
            f"search.warm_start: {url} cannot be read as an Optuna storage: {error}"
        ) from error
    wanted = [*request.directions]
    alike = [study for study in studies if _directions_of(study) == wanted]
    if not alike:
        raise StudyError(
            f"search.warm_start: {url} has no study that would {' and '.join(wanted)}",
            hint="nothing can be learned from it: leave it out",
        )
    for study in alike:
        study_id = storage.get_study_id_from_name(study.study_name)
        for trial in storage.get_all_trials(study_id, deepcopy=False):
            if trial.state not in {OptunaState.COMPLETE, OptunaState.PRUNED} or not trial.values:
                continue
            steps = sorted(trial.intermediate_values.items())
            from_0 = int(bool(steps) and steps[0][0] == 0)  # epochs are often counted from 0
            points = [
                Point(step + from_0, turn_values((value,), wanted), 0.0) for step, value in steps
            ]
            if len(wanted) > 1 or not points:
                points = [Point(max(request.rungs, 1), turn_values(trial.values, wanted), 0.0)]
            is_done = trial.state is OptunaState.COMPLETE
            yield Trial(
                number=trial.number,
                params=dict(trial.params),
                state=TrialState.DONE if is_done else TrialState.PRUNED,
                points=tuple(points),
            )


def _directions_of(study: FrozenStudy) -> list[str]:
    return [direction.name.lower() for direction in study.directions]
