"""The stand as Optuna sees it: a storage that holds the trials it is given, for one question.

Optuna's own storages do not let a finished trial go on, as a held one does, and keep what samplers
note beside the trials; here a question leaves nothing behind, so that the same stand gives the same
answer.
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

NAME = "stand"
_BEGAN = datetime(2000, 1, 1)  # noqa: DTZ001 - Optuna's instants have no zone; nobody reads this one


def make_frozen(
    place: int,
    state: TrialState,
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    *,
    values: Sequence[float] | None = None,
    course: dict[int, float] | None = None,
) -> FrozenTrial:
    """A trial of Optuna's, as the storage keeps it."""
    return FrozenTrial(
        number=place,
        trial_id=place,
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
    """Trials to look at; one more may be asked for."""

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
        """By its place."""
        return self._trials[trial_id]

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Those in one of the states; never copied, for nobody changes them."""
        return [trial for trial in self._trials if states is None or trial.state in states]

    def get_all_studies(self) -> list[FrozenStudy]:
        """Not asked for."""
        _refuse()

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """Not asked for."""
        _refuse()

    def delete_study(self, study_id: int) -> None:
        """Not asked for."""
        _refuse()

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Not asked for."""
        _refuse()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Not asked for."""
        _refuse()

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Not asked for."""
        _refuse()

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Not asked for."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("the stand is only looked at")
