"""Optuna's samplers on a snapshot: TPE, Gaussian processes, NSGA-II.

Optuna's own storages do not let a finished trial continue, as a held one does, and keep attributes that
samplers write; here a query leaves nothing behind, so that the same snapshot gives the same answer.
"""

from __future__ import annotations

import warnings
from datetime import datetime
from decimal import Decimal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from optuna import distributions, samplers
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from yunlu.core.errors import missing_part
from yunlu.tuning.methods.samplers import SettingDraws, has_result, mix_seed, rank_values, result_of
from yunlu.tuning.space import list_values
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study._frozen import FrozenStudy

    from yunlu.tuning.values import Dimension, Params, ParamValue, StudySnapshot, Trial

Kind = Literal["tpe", "gp", "nsga2"]

_OPENING = 10
"""Trials with a result before the model is used, as in Optuna."""
_ATTEMPTS = 20
"""Suggestions before an allowed one is drawn at random instead."""


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution of a dimension."""
    if dimension.choices:
        return distributions.CategoricalDistribution(dimension.choices)
    low, high, step = dimension.low, dimension.high, dimension.step
    if step:
        # Optuna warns of a range that does not end on a step.
        whole = (Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step))
        high = float(Decimal(str(low)) + whole * Decimal(str(step)))
    if dimension.is_int:
        return distributions.IntDistribution(
            int(low), int(high), log=dimension.log, step=int(step or 1)
        )
    return distributions.FloatDistribution(low, high, log=dimension.log, step=step)


class OptunaSampler:
    """One of Optuna's samplers, created anew for each query so that only the snapshot counts.

    The first trials are drawn at random, by the user's beliefs where there are some.
    """

    def __init__(
        self,
        kind: Kind,
        draws: SettingDraws,
        *,
        seed: int,
        objectives: int = 1,
        past: Sequence[Trial] = (),
        population: int = 16,
    ) -> None:
        """With these draws for the opening; ``population`` is of NSGA-II."""
        # Optuna's Gaussian processes compute with it, and it alone imports it.
        if kind == "gp" and find_spec("torch") is None:
            raise missing_part("torch", "train", "The method gp")
        self._kind: Kind = kind
        self._draws = draws
        self._seed = seed
        self._objectives = objectives
        self._past = tuple(past)
        self._population = population
        self._distributions = {d.name: distribution_of(d) for d in draws.dimensions}
        self._opening = population if kind == "nsga2" else _OPENING
        self._is_conditional = any(d.when for d in draws.dimensions)
        self._frozen: dict[int, tuple[Trial, float, FrozenTrial]] = {}

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        """The next one."""
        number = len(snapshot.trials)
        taken = self._draws.taken(snapshot.trials)
        known = [trial for trial in self._past if self._fits(trial.params)]
        result = sum(has_result(trial) for trial in (*known, *snapshot.trials))
        if result >= self._opening:
            frozen = self._freeze([*known, *snapshot.trials])
            for attempt in range(_ATTEMPTS):
                params = self._ask(list(frozen), mix_seed(self._seed, number, attempt))
                if self._draws.accepts(params, taken):
                    return params
        return self._draws.draw(mix_seed(self._seed, number), taken)

    def _ask(self, trials: list[FrozenTrial], seed: int) -> Params:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            shelf = ReadOnlyStorage(trials, objectives=self._objectives)
            study = Study(NAME, shelf, sampler=self._make(seed))
            return self._walk(study)

    def _walk(self, study: Study) -> Params:
        """Suggest dimension by dimension, without those that do not exist for the other values."""
        trial = study.ask()
        params: Params = {}
        for dimension in self._draws.dimensions:
            exists = all(
                parent in params and params[parent] in values
                for parent, values in dimension.when.items()
            )
            if exists:
                params[dimension.name] = _to_param(dimension, _suggest(trial, dimension))
        return params

    def _make(self, seed: int) -> BaseSampler:
        if self._kind == "nsga2":
            return samplers.NSGAIISampler(population_size=self._population, seed=seed)
        if self._kind == "gp":
            return samplers.GPSampler(
                seed=seed, n_startup_trials=1, warn_independent_sampling=False
            )
        is_one = self._objectives == 1
        return samplers.TPESampler(
            seed=seed,
            n_startup_trials=1,
            multivariate=is_one,
            group=is_one and self._is_conditional,
            constant_liar=True,
        )

    def _freeze(self, trials: list[Trial]) -> list[FrozenTrial]:
        """The trials as Optuna's, in order; those that have not changed are kept from last time."""
        results = [result_of(trial)[0] if has_result(trial) else 0.0 for trial in trials]
        worst = float(rank_values(results).max(initial=0.0))
        frozen: list[FrozenTrial] = []
        for index, trial in enumerate(trials):
            retained = self._frozen.get(index)
            if retained is None or retained[0] is not trial or retained[1] != worst:
                retained = (trial, worst, self._freeze_one(index, trial, worst))
                self._frozen[index] = retained
            frozen.append(retained[2])
        if self._kind == "nsga2":
            _number_generations(frozen, self._population)
        return frozen

    def _freeze_one(self, index: int, trial: Trial, worst: float) -> FrozenTrial:
        params = {
            name: value for name, value in trial.params.items() if name in self._distributions
        }
        known = {name: self._distributions[name] for name in params}
        if not has_result(trial):
            failed = trial.state is TrialState.FAILED or trial.state.is_over
            state = OptunaState.FAIL if failed else OptunaState.RUNNING
            return make_frozen(index, state, params, known)
        # Only TPE handles pruned trials.
        if self._kind == "tpe" and self._objectives == 1 and trial.state is not TrialState.DONE:
            course = {p.rung: float(_finite(p.value, worst)) for p in trial.points}
            return make_frozen(index, OptunaState.PRUNED, params, known, course=course)
        values = [float(_finite(value, worst)) for value in result_of(trial)[: self._objectives]]
        return make_frozen(index, OptunaState.COMPLETE, params, known, values=values)

    def _fits(self, params: Params) -> bool:
        """Whether an earlier study's setting is one of this space."""
        needed = {d.name for d in self._draws.dimensions if not d.when}
        return needed <= params.keys() and all(
            _contains(distribution, params[name])
            for name, distribution in self._distributions.items()
            if name in params
        )


def _suggest(trial: Any, dimension: Dimension) -> ParamValue:
    distribution: Any = distribution_of(dimension)
    if dimension.choices:
        return trial.suggest_categorical(dimension.name, distribution.choices)
    ask = trial.suggest_int if dimension.is_int else trial.suggest_float
    return ask(
        dimension.name,
        distribution.low,
        distribution.high,
        log=distribution.log,
        step=distribution.step,
    )


def _to_param(dimension: Dimension, value: ParamValue) -> ParamValue:
    """The step of the range that is meant: sums of steps differ in the last digit."""
    if not dimension.step or dimension.is_int or not isinstance(value, float):
        return value
    steps = list_values(dimension)
    return steps[min(round((value - dimension.low) / dimension.step), len(steps) - 1)]


def _contains(distribution: Any, value: ParamValue) -> bool:
    try:
        internal = distribution.to_internal_repr(value)
    except ValueError:
        return False
    if hasattr(distribution, "low"):
        return distribution.low <= internal <= distribution.high
    return True


def _finite(value: float, worst: float) -> float:
    return value if value == value and abs(value) != float("inf") else worst  # noqa: PLR0124


def _number_generations(trials: list[FrozenTrial], population: int) -> None:
    """Which generation each trial belongs to: so many with a result are one, in order of number."""
    complete = [trial for trial in trials if trial.state is OptunaState.COMPLETE]
    for index, trial in enumerate(complete):
        trial.system_attrs["NSGAIISampler:generation"] = index // population


# ruff: noqa: ARG002 - the signatures are Optuna's


NAME = "snapshot"
_BEGAN = datetime(2000, 1, 1)  # noqa: DTZ001 - Optuna's instants have no zone; never read


def make_frozen(
    index: int,
    state: OptunaState,
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
        self._trials.append(make_frozen(len(self._trials), OptunaState.RUNNING, {}, {}))
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
        states: Container[OptunaState] | None = None,
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
        self, trial_id: int, state: OptunaState, values: Sequence[float] | None = None
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
