"""A read-only Optuna storage over a snapshot of trials, for one query of a sampler.

Optuna's own storages do not let a finished trial continue, as a held one does, and keep attributes that
samplers write; here a query leaves nothing behind, so that the same snapshot gives the same answer.
"""
# ruff: noqa: ARG002 - the signatures are Optuna's

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.study._frozen import FrozenStudy

NAME = "snapshot"
_BEGAN = datetime(2000, 1, 1)  # noqa: DTZ001 - Optuna's instants have no zone; never read


def make_frozen(
    index: int,
    state: TrialState,
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    *,
    values: Sequence[float] | None = None,
    course: dict[int, float] | None = None,
) -> FrozenTrial:
    """A trial of Optuna's, as the storage keeps it."""
    return FrozenTrial(
        number=index,
        trial_id=index,
        state=state,
        value=None,
        values=values,
        datetime_start=_BEGAN,
        datetime_complete=_BEGAN if state.is_finished() else None,
        params=params,
        distributions=distributions,
        user_attrs={},
        system_attrs={},
        intermediate_values=course or {},
    )


class ReadOnlyStorage(BaseStorage):
    """Given trials; one more may be suggested."""

    def __init__(self, trials: list[FrozenTrial], *, objectives: int) -> None:
        """All objectives are to be small."""
        self._trials = trials
        self._directions = [StudyDirection.MINIMIZE] * objectives
        self._notes: dict[str, Any] = {}

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """One more, about to be suggested."""
        assert template_trial is None
        self._trials.append(make_frozen(len(self._trials), TrialState.RUNNING, {}, {}))
        return len(self._trials) - 1

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """What was suggested."""
        trial = self._trials[trial_id]
        trial.params[param_name] = distribution.to_external_repr(param_value_internal)
        trial.distributions[param_name] = distribution

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """A sampler's note on a trial."""
        self._trials[trial_id].system_attrs[key] = value

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """A sampler's note on the study."""
        self._notes[key] = value

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """A sampler's notes on the study."""
        return self._notes

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """None."""
        return {}

    def get_study_id_from_name(self, study_name: str) -> int:
        """There is one study."""
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        """There is one study."""
        return NAME

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Small is good."""
        return self._directions

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """By its index."""
        return self._trials[trial_id]

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Those in one of the states; never copied: they are not modified."""
        return [trial for trial in self._trials if states is None or trial.state in states]

    def get_all_studies(self) -> list[FrozenStudy]:
        """Not supported."""
        _refuse()

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """Not supported."""
        _refuse()

    def delete_study(self, study_id: int) -> None:
        """Not supported."""
        _refuse()

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Not supported."""
        _refuse()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Not supported."""
        _refuse()

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Not supported."""
        _refuse()

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Not supported."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("the snapshot is read-only")
