"""The trials of a study in Optuna's storage, readable with Optuna's own tools; and those of earlier studies.

Fields that Optuna has are stored there (parameters with their distributions, values by rung with the
metric's own sign, states); the rest in user attributes. One process writes; its memory is authoritative.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError, missing_part
from yunlu.core.files import WRITABLE_HOME, check_regular, create_private, make_directory
from yunlu.tuning.facts import StudyView, TrialFacts, best_point, find_best, find_front
from yunlu.tuning.study_dir import StudyDir, StudyError, find_study
from yunlu.tuning.values import Point, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optuna.study._frozen import FrozenStudy

    from yunlu.tuning.study_dir import StudyRequest
    from yunlu.tuning.values import Dimension, Params, ParamValue

try:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
    from optuna.trial import FrozenTrial
    from optuna.trial import TrialState as OptunaState
    from sqlalchemy import event
    from sqlalchemy.exc import DatabaseError

    from yunlu.tuning.methods.optuna_samplers import distribution_of
except ImportError as error:
    raise missing_part("optuna", "tune", "A study") from error


_BUSY_S = 30
_STATES = {
    TrialState.WAITING: OptunaState.RUNNING,
    TrialState.RUNNING: OptunaState.RUNNING,
    TrialState.HELD: OptunaState.RUNNING,  # Optuna has no state from which a trial continues
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.DONE: OptunaState.COMPLETE,
    TrialState.FAILED: OptunaState.FAIL,
}


class Records:
    """The trials of one study. Safe to use from several threads of one process."""

    def __init__(self, directory: StudyDir) -> None:
        self.dir = directory
        self.request = directory.read_request()
        self._lock = threading.RLock()
        name, has_begun = self.request.name, directory.read_status().began_at is not None
        if has_begun and not directory.database.is_file():
            raise directory.damaged(directory.database)  # an empty one would repeat every trial
        for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite itself follows links
            check_regular(directory.database.with_name(directory.database.name + suffix))
        try:
            self._storage = _open_storage(directory)
            known = {study.study_name for study in self._storage.get_all_studies()}
        except DatabaseError as error:
            raise directory.damaged(directory.database) from error
        if name in known:
            self._study = self._storage.get_study_id_from_name(name)
        elif has_begun:
            raise directory.damaged(directory.database)
        else:
            directions = [_direction(word) for word in self.request.directions]
            self._study = self._storage.create_new_study(directions, name)
            self._storage.set_study_system_attr(
                self._study, "study:metric_names", list(self.request.metrics)
            )
        self._ids: list[int] = []
        self._facts: list[TrialFacts] = []
        self._over: dict[int, TrialFacts] = {}
        self.refresh()

    # Reading.

    def refresh(self) -> None:
        """Read what another process has written since; ended trials are not read again."""
        with self._lock:
            all_trials = self._storage.get_all_trials(self._study, deepcopy=False)
            self._ids = [trial._trial_id for trial in all_trials]
            self._facts = [
                self._over.get(trial.number) or self._read(trial) for trial in all_trials
            ]
            self._over = {facts.number: facts for facts in self._facts if facts.state.is_over}

    def facts(self) -> list[TrialFacts]:
        """All trials by number."""
        with self._lock:
            return list(self._facts)

    def trials(self) -> list[Trial]:
        """All trials by number, as the methods see them."""
        return [facts.trial for facts in self.facts()]

    def trial(self, number: int) -> Trial:
        """One trial."""
        return self._facts[number].trial

    def view(self) -> StudyView:
        """The study as of now."""
        request, status, facts = self.request, self.dir.read_status(), self.facts()
        dollars = [fact.dollars for fact in facts if fact.dollars is not None]
        best = find_best(facts)
        is_single = len(request.metrics) == 1
        deadline = request.deadline_s
        clock_at = status.clock_at
        return StudyView(
            name=request.name,
            path=self.dir.path,
            storage=self.dir.storage,
            source=request.source,
            overrides=request.overrides,
            extra=_find_extra(request),
            metrics=request.metrics,
            directions=request.directions,
            state=status.state,
            reason=status.reason,
            method=request.method,
            stop_rule=request.stop_rule,
            rungs=request.rungs,
            dimensions=request.dimensions,
            trials=tuple(facts),
            best=best,
            front=((best,) if best else ()) if is_single else find_front(facts),
            devices=status.devices,
            began_at=status.began_at,
            ended_at=status.ended_at,
            idle_s=status.idle_s,
            spent_s=sum(fact.device_seconds for fact in facts),
            spent_dollars=sum(dollars) if dollars else None,
            trials_limit=request.trials,
            dollars_limit=request.dollars,
            deadline_at=None if deadline is None or clock_at is None else clock_at + deadline,
            forecast=request.forecast,
        )

    # Writing.

    def change(self, **updates: Any) -> None:
        """Change fields of the request."""
        with self._lock:
            self.request = self.request.model_copy(update=updates)
            self.dir.write_request(self.request)

    def begin(
        self,
        params: Params,
        *,
        until: int = 0,
        copied_from: tuple[int, int] | None = None,
        points: Sequence[tuple[Point, float]] = (),
    ) -> int:
        """Record a new trial in one transaction; return its number."""
        with self._lock:
            start = datetime.fromtimestamp(time.time())  # noqa: DTZ006 - Optuna's are naive
            trial = Trial(
                number=len(self._facts),
                params=dict(params),
                state=TrialState.RUNNING,
                until=until,
                copied_from=copied_from,
                points=tuple(point for point, _ in points),
            )
            facts = TrialFacts(
                trial=trial,
                run=None,
                directions=self.request.directions,
                began_at=start.timestamp(),
                times=tuple(at for _, at in points),
            )
            distributions, is_exact = make_distributions(params, self.request.dimensions)
            attributes = _attributes(facts)
            if not is_exact:
                attributes["params"] = dict(params)
            template = FrozenTrial(
                number=-1,
                trial_id=-1,
                state=OptunaState.RUNNING,
                value=None,
                datetime_start=start,
                datetime_complete=None,
                params={name: params[name] for name in distributions},
                distributions=distributions,
                user_attrs=attributes,
                system_attrs={},
                intermediate_values=self._intermediate(facts),
            )
            trial_id = self._storage.create_new_trial(self._study, template)
            number = self._storage.get_trial_number_from_id(trial_id)
            if number != trial.number:
                raise StoreError(
                    f"trial {trial.number} of the study was stored as {number}: another process "
                    "writes into this study",
                    hint="end the other process; one at a time conducts a study",
                )
            self._ids.append(trial_id)
            self._facts.append(facts)
            return number

    def add_point(self, number: int, point: Point, *, at: float, **updates: Any) -> None:
        """Record an evaluation; ``updates`` are other fields of ``TrialFacts``."""
        with self._lock:
            facts = self._facts[number]
            trial = replace(facts.trial, points=(*facts.trial.points, point))
            changes = {"trial": trial, "times": (*facts.times, at), **updates}
            self._put(facts.model_copy(update=changes))
            if len(self.request.metrics) == 1:
                for rung, value in self._intermediate(self._facts[number], last=True).items():
                    self._storage.set_trial_intermediate_value(self._ids[number], rung, value)

    def change_trial(
        self,
        number: int,
        *,
        state: TrialState | None = None,
        until: int | None = None,
        copied_from: tuple[int, int] | None = None,
        **updates: Any,
    ) -> None:
        """Update a trial that is not over; ``updates`` are fields of ``TrialFacts``."""
        with self._lock:
            facts = self._facts[number]
            trial = replace(
                facts.trial,
                state=state or facts.trial.state,
                until=facts.trial.until if until is None else until,
                copied_from=copied_from or facts.trial.copied_from,
            )
            self._put(facts.model_copy(update={"trial": trial, **updates}))

    def end(self, number: int, state: TrialState, **updates: Any) -> None:
        """End a trial; ``updates`` are other fields of ``TrialFacts``."""
        with self._lock:
            facts = self._facts[number]
            point = best_point(facts.trial)
            if state is TrialState.DONE and point is None:
                state = TrialState.FAILED
                updates.setdefault("error", "none of its values is finite")
            trial = replace(facts.trial, state=state)
            changes = {"trial": trial, "ended_at": time.time(), **updates}
            facts = facts.model_copy(update=changes)
            self._put(facts)
            # The value of a pruned trial is its last one, by Optuna's convention; several have none.
            values = facts.values if state is TrialState.DONE else None
            if state is TrialState.PRUNED and point is not None and len(point.values) == 1:
                values = facts.curve[-1][1] if math.isfinite(facts.curve[-1][1][0]) else None
            self._storage.set_trial_state_values(self._ids[number], _STATES[state], values)
            self._over[number] = facts

    def close(self) -> None:
        """Close the database."""
        self._storage.remove_session()

    def _put(self, facts: TrialFacts) -> None:
        """Store in memory, and write changed attributes to the file."""
        before, after = _attributes(self._facts[facts.number]), _attributes(facts)
        for name in before | after:
            if after.get(name) != before.get(name):
                self._storage.set_trial_user_attr(self._ids[facts.number], name, after.get(name))
        self._facts[facts.number] = facts

    def _intermediate(self, facts: TrialFacts, *, last: bool = False) -> dict[int, float]:
        if len(self.request.metrics) > 1:  # Optuna has none of several objectives
            return {}
        return {rung: values[0] for rung, values in facts.curve[-1 if last else 0 :]}

    def _read(self, frozen: FrozenTrial) -> TrialFacts:
        about: Mapping[str, Any] = frozen.user_attrs
        points, times = _read_points(about.get("points"), frozen, self.request.directions)
        over = {value: key for key, value in _STATES.items() if key.is_over}
        default = TrialState.WAITING if frozen.state is OptunaState.WAITING else TrialState.RUNNING
        state = over.get(frozen.state) or TrialState(about.get("state", default))
        copied = about.get("copied_from")
        params: Params = about.get("params") or frozen.params
        if not points and frozen.state is OptunaState.COMPLETE:  # told by an external program
            points = (Point(1, turn_values(frozen.values, self.request.directions), 0.0),)
        return TrialFacts(
            trial=Trial(
                number=frozen.number,
                params=dict(params),
                state=state,
                points=points,
                until=about.get("until", 0),
                copied_from=None if copied is None else (copied[0], copied[1]),
            ),
            run=about.get("run"),
            directions=self.request.directions,
            times=times,
            began_at=frozen.datetime_start.timestamp() if frozen.datetime_start else None,
            ended_at=about.get("ended_at"),
            device_seconds=about.get("device_seconds", 0.0),
            dollars=about.get("cost_dollars"),
            devices=0 if state.is_over else about.get("devices", 0),
            reason=about.get("reason") or "",
            error=about.get("error"),
        )


def create_records(directory: StudyDir, request: StudyRequest) -> Records:
    """Create the directory of a new study."""
    try:
        make_directory(directory.path)
        directory.write_request(request)
    except OSError as error:
        raise StudyError(
            f"the study cannot be written to {directory.path}: {error.strerror or error}",
            hint=WRITABLE_HOME,
        ) from error
    return Records(directory)


def open_study(name: str) -> Records:
    """The trials of a study by its name; ``last`` is the newest."""
    directory = find_study(name)
    records = _opened.get(directory.path)
    if records is None or not directory.database.exists():
        records = _opened[directory.path] = Records(directory)
    else:  # read often: only trials that are not over are read again
        records.request = directory.read_request()
        records.refresh()
    return records


_opened: dict[Path, Records] = {}


def _open_storage(directory: StudyDir) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    create_private(directory.database)  # the database's other files get its mode
    backend = optuna.storages.RDBStorage(
        directory.storage, engine_kwargs={"connect_args": {"timeout": _BUSY_S}}
    )

    @event.listens_for(backend.engine, "connect")
    def configure(connection: Any, _entry: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        cursor = connection.cursor()
        # Readers do not wait, and what a killed process had written stays written.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    backend.engine.dispose()  # the connection opened before lacks these settings
    return optuna.storages.get_storage(backend)


def _find_extra(request: StudyRequest) -> Params:
    if request.job is None or request.target is None:
        return {}
    from yunlu.tuning.proxy import carry_over  # noqa: PLC0415 - rarely needed

    return carry_over({}, request.job, request.target)


def _direction(word: str) -> Any:
    return optuna.study.StudyDirection[word.upper()]


def _attributes(facts: TrialFacts) -> dict[str, Any]:
    """Fields that Optuna lacks, as user attributes; empty ones are left out."""
    trial = facts.trial
    attributes: dict[str, Any] = {
        "state": trial.state.value,
        "until": trial.until,
        "run": facts.run,
        "points": [
            [point.rung, point.seconds, at, *map(_as_json, point.values)]
            for point, at in zip(trial.points, facts.times, strict=True)
        ],
        "copied_from": trial.copied_from,
        "device_seconds": facts.device_seconds,
        "cost_dollars": facts.dollars,
        "devices": facts.devices,
        "reason": facts.reason,
        "error": facts.error,
        "ended_at": facts.ended_at,
    }
    return {name: value for name, value in attributes.items() if value not in (None, "", [])}


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no other numbers


def _read_points(
    rows: Any, frozen: FrozenTrial, directions: Sequence[str]
) -> tuple[tuple[Point, ...], tuple[float, ...]]:
    if rows is not None:
        points = tuple(
            Point(rung, tuple(map(float, values)), seconds) for rung, seconds, _, *values in rows
        )
        return points, tuple(at for _, _, at, *_ in rows)
    # Of a study that somebody else's program wrote.
    values = sorted(frozen.intermediate_values.items())
    points = tuple(Point(rung, turn_values((value,), directions), 0.0) for rung, value in values)
    return points, tuple(0.0 for _ in points)


def turn_values(values: Sequence[float], directions: Sequence[str]) -> tuple[float, ...]:
    """Values with the metrics' own signs as the methods see them, or the other way round."""
    return tuple(
        (-value if direction == "maximize" else value) + 0.0
        for value, direction in zip(values, directions, strict=False)
    )


def read_view(name: str) -> StudyView:
    """Read a study from its directory; ``last`` is the newest."""
    return open_study(name).view()


def make_distributions(
    params: Params, dimensions: Sequence[Dimension]
) -> tuple[dict[str, BaseDistribution], bool]:
    """Optuna's distribution of each parameter, and whether its values come back unchanged."""
    known = {dimension.name: dimension for dimension in dimensions}
    result: dict[str, BaseDistribution] = {}
    is_exact = True
    for name, value in params.items():
        distribution = _distribution(known[name], value) if name in known else None
        if distribution is None:
            is_exact = False
            continue
        result[name] = distribution
        back = distribution.to_external_repr(distribution.to_internal_repr(value))
        is_exact = is_exact and back == value and type(back) is type(value)
    return result, is_exact


def _distribution(dimension: Dimension, value: ParamValue) -> BaseDistribution | None:
    """None for a value that Optuna's dimension of this kind cannot hold."""
    if dimension.choices:
        return distribution_of(dimension) if value in dimension.choices else None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if (dimension.is_int and value != int(value)) or (dimension.log and value <= 0):
        return None
    usual = distribution_of(dimension)
    if usual._contains(value):  # pyright: ignore[reportPrivateUsage] - as its own trials ask
        return usual
    # A value beyond the bounds or between the steps (a perturbed copy) widens them.
    low, high = min(dimension.low, value), max(dimension.high, value)
    if dimension.is_int:
        return IntDistribution(int(low), int(high), dimension.log)
    return FloatDistribution(low, high, dimension.log)


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
