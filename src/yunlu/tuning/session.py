"""Start, continue, run, forecast, list and stop studies: values in, values out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.core.value import Value
from yunlu.tuning.facts import StudyView
from yunlu.tuning.study_dir import StudyError, find_study, list_studies, studies_home
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.spec.job import Job
    from yunlu.tuning.study import Study

_POLL_S = 0.1
_STOP_S = 150.0
"""Longer than trials may take to save."""


class StudyList(Value):
    """Studies, newest first."""

    home: str
    """Directory of all studies."""
    studies: tuple[StudyView, ...] = ()
    damaged: tuple[str, ...] = ()
    """Why others cannot be read."""


class StudyStart(Value):
    """A study that is ready to run, with its forecast."""

    view: StudyView
    devices: int
    warnings: tuple[str, ...] = ()
    """Of a search on a narrow copy of the model: what may not carry over."""


class StudyOutlook(Value):
    """Forecast of a study that was not started."""

    study: str
    dimensions: int
    rungs: int
    devices: int
    forecast: dict[str, Any]


class StudyResult(Value):
    """A study that ended or was stopped."""

    view: StudyView
    report: str | None = None
    """The page; None where it could not be written."""


class StoppedStudy(Value):
    """A study that no process runs any more."""

    name: str
    was_running: bool
    active_runs: tuple[str, ...] = ()
    """Runs of its trials that continue without it."""


def list_views() -> StudyList:
    """All studies, newest first."""
    views, damaged = list[StudyView](), list[str]()
    for name in list_studies():
        from yunlu.tuning.records import open_study  # noqa: PLC0415 (imports Optuna: slow)

        try:
            views.append(open_study(name).view())
        except (StudyError, StoreError) as error:
            damaged.append(error.message)
    return StudyList(home=str(studies_home()), studies=tuple(views), damaged=tuple(damaged))


def start_study(
    job: Job, *, name: str | None = None, source: str | None = None, overrides: Sequence[str] = ()
) -> StudyStart:
    """Create the study of a job, or open the one that exists; forecast it before the first trial."""
    from yunlu.tuning.setup import open_or_create  # noqa: PLC0415 (imports Optuna: slow)
    from yunlu.tuning.study import Study  # noqa: PLC0415 (as above)

    records = open_or_create(job, name=name, source=source, overrides=tuple(overrides))
    return _prepare(Study(name=records.request.name))


def continue_study(name: str, limits: dict[str, Any]) -> StudyStart:
    """Open a study to continue it, with other limits where some are given."""
    from yunlu.tuning.setup import find_limits, with_search  # noqa: PLC0415 (imports Optuna)
    from yunlu.tuning.study import Study  # noqa: PLC0415 (as above)

    study = Study(name=name)
    view, request = study.view(), study.records.request
    given = {key: value for key, value in limits.items() if value is not None}
    if request.job is None or request.job.search is None or view.is_external:
        raise StudyError(
            f"the trials of {view.name} are carried out by a program of your own",
            hint=f"in that program yunlu.Study(name={view.name!r}) continues it: ask, or optimize(function)",
        )
    if view.state == "finished" and not given:
        raise StudyError(
            f"{view.name} is finished: {view.reason}",
            hint=f"yunlu tune --resume {view.name} --trials N continues with more of them",
        )
    if given:
        search = with_search(request.job, None, given).search
        assert search is not None
        changes = {key: value for key, value in find_limits(search).items() if value is not None}
        study.records.change(**changes)
    return _prepare(study)


def run_study(
    name: str,
    *,
    on_change: Callable[[StudyView], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> StudyView:
    """Run trials until a limit is reached, nothing is worth trying, or a stop is requested."""
    from yunlu.tuning.study import Study  # noqa: PLC0415 (imports Optuna: slow)
    from yunlu.tuning.study_runner.slots import find_slots  # noqa: PLC0415 (looks for a pool)

    study = Study(name=name)
    slots = find_slots(devices=study.records.request.devices)
    study.optimize(slots=slots, on_change=on_change, is_asked_to_stop=should_stop)
    return study.view()


def forecast_study(job: Job, *, name: str | None = None) -> StudyOutlook:
    """Trials, time and cost of a study, without starting it."""
    from yunlu.tuning.forecast import predict_study  # noqa: PLC0415 (slow to import)
    from yunlu.tuning.setup import prepare_study  # noqa: PLC0415 (as above)
    from yunlu.tuning.study_runner.slots import find_slots  # noqa: PLC0415 (looks for a pool)

    request = prepare_study(job, name=name)
    slots = find_slots(devices=request.devices)
    forecast = predict_study(request, devices=slots.devices)
    return StudyOutlook(
        study=request.name,
        dimensions=len(request.fields),
        rungs=request.rungs,
        devices=slots.devices,
        forecast=forecast.model_dump(mode="json"),
    )


def stop_study(name: str) -> StoppedStudy:
    """Ask whoever runs a study to stop, and wait; its trials save and can continue later."""
    directory = find_study(name)
    if not directory.is_running():
        from yunlu.tuning.records import open_study  # noqa: PLC0415 (imports Optuna: slow)

        trials = open_study(directory.name).view().trials
        active = [facts.run for facts in trials if facts.state is TrialState.RUNNING and facts.run]
        return StoppedStudy(name=directory.name, was_running=False, active_runs=tuple(active))
    directory.request_stop()
    deadline = time.monotonic() + _STOP_S
    while directory.is_running():
        if time.monotonic() > deadline:
            raise StudyError(
                f"{directory.name} was asked to stop, but has not done so yet",
                hint=f"yunlu study show {directory.name} shows what it waits for",
            )
        time.sleep(_POLL_S)
    return StoppedStudy(name=directory.name, was_running=True)


def _prepare(study: Study) -> StudyStart:
    from yunlu.tuning.study_runner.slots import find_slots  # noqa: PLC0415 (looks for a pool)

    slots = find_slots(devices=study.records.request.devices)
    if not study.trials:
        study.forecast(slots=slots)
    return StudyStart(view=study.view(), devices=slots.devices, warnings=_find_warnings(study))


def _find_warnings(study: Study) -> tuple[str, ...]:
    job = study.records.request.job
    if job is None or job.search is None or not job.search.proxy:
        return ()
    from yunlu.tuning.proxy import find_doubts  # noqa: PLC0415 (used by few)

    return tuple(find_doubts(job.search.space))
