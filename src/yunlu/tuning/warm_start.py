"""Trials of earlier studies to learn from: ours by name, anybody's by the URL of an Optuna storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState as OptunaState

from yunlu.tuning.records import open_study, turn_values
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.values import Point, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.tuning.study_dir import StudyAsked


def read_past(asked: StudyAsked, sources: Sequence[str]) -> list[Trial]:
    """The trials of these studies that are over, numbered anew."""
    found = [
        trial
        for source in sources
        for trial in (_foreign(asked, source) if "://" in source else _own(asked, source))
    ]
    return [
        Trial(number=number, params=trial.params, state=trial.state, points=trial.points)
        for number, trial in enumerate(found)
    ]


def _own(asked: StudyAsked, name: str) -> Iterator[Trial]:
    earlier = open_study(name)
    if earlier.asked.metrics != asked.metrics or earlier.asked.directions != asked.directions:
        raise StudyError(
            f"the study {name} sought {', '.join(earlier.asked.metrics)}, not "
            f"{', '.join(asked.metrics)}: nothing can be learned from it",
            hint="remove it from search.warm_start",
        )
    yield from (trial for trial in earlier.trials() if trial.state.is_over and trial.points)


def _foreign(asked: StudyAsked, url: str) -> Iterator[Trial]:
    """Of each study there that has as many objectives; a value without a curve is that of a whole training."""
    try:
        storage = optuna.storages.get_storage(url)
        studies = storage.get_all_studies()
    except Exception as error:
        raise StudyError(f"{url} cannot be read as an Optuna storage: {error}") from error
    for study in studies:
        directions = [direction.name.lower() for direction in study.directions]
        if directions != [*asked.directions]:
            continue
        study_id = storage.get_study_id_from_name(study.study_name)
        for trial in storage.get_all_trials(study_id, deepcopy=False):
            if trial.state not in {OptunaState.COMPLETE, OptunaState.PRUNED} or not trial.values:
                continue
            rungs = sorted(trial.intermediate_values.items())
            last = max(asked.rungs, 1)
            points = [Point(rung, turn_values((value,), directions), 0.0) for rung, value in rungs]
            if len(directions) > 1 or not points:
                points = [Point(last, turn_values(trial.values, directions), 0.0)]
            is_done = trial.state is OptunaState.COMPLETE
            yield Trial(
                number=trial.number,
                params=dict(trial.params),
                state=TrialState.DONE if is_done else TrialState.PRUNED,
                points=tuple(points),
            )
