"""Creates a study from a job: objectives, rungs, limits."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from yunlu.core.settings import read_settings
from yunlu.spec.fields import read_span_s
from yunlu.spec.search import SearchSpec, direction_of
from yunlu.tuning.records import Records, create_records
from yunlu.tuning.rungs import measure_training
from yunlu.tuning.study_dir import (
    StudyDir,
    StudyError,
    StudyRequest,
    check_name,
    dump_dimension,
    list_studies,
    studies_home,
)
from yunlu.tuning.study_runner.slots import check_cpu_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.spec.job import Job
    from yunlu.tuning.values import Dimension, Method, Trial

_LIMITS = ("trials", "dollars", "deadline_s", "parallel", "devices")


def open_or_create(
    job: Job,
    *,
    name: str | None = None,
    source: str | None = None,
    overrides: tuple[str, ...] = (),
) -> Records:
    """Open the study of a job with a ``search``, or create it.

    Args:
        job: The job to tune.
        name: Of the study; default: the job's, with a number where that is taken.
        source: The job's file, as the user named it.
        overrides: Overrides of the job, as typed.
    """
    assert job.search is not None
    known = _find_same(job, name)
    if known is not None:
        limits = find_limits(job.search)
        known.change(**{key: value for key, value in limits.items() if value is not None})
        return known
    return create_study(job, name=name, source=source, overrides=overrides)


def create_study(
    job: Job,
    *,
    name: str | None = None,
    source: str | None = None,
    overrides: tuple[str, ...] = (),
) -> Records:
    """A new study of a job with a ``search``."""
    request = prepare_study(job, name=name, source=source, overrides=overrides)
    return create_records(StudyDir(studies_home() / request.name), request)


def prepare_study(
    job: Job,
    *,
    name: str | None = None,
    source: str | None = None,
    overrides: tuple[str, ...] = (),
    probes: bool = True,
) -> StudyRequest:
    """Build the request of a study; refuse what cannot work. Writes nothing.

    ``probes``: whether a worker may be started to measure what the job does not specify.
    """
    from yunlu.tuning.methods.factory import name_method  # noqa: PLC0415 - imports Optuna
    from yunlu.tuning.space import find_dimensions  # noqa: PLC0415 - as above

    search = job.search
    if search is None:
        raise StudyError(
            "the job has no search section: there is nothing to tune",
            hint="add one, such as search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}}",
        )
    dimensions = find_dimensions(job)
    target, job = (job, _narrow(job)) if search.proxy else (None, job)
    _check_evaluates(job)
    _check_population(search)
    limits = find_limits(search)
    price = read_settings().dollars_per_hour
    if limits["dollars"] is not None and price is None:
        raise StudyError(
            f"the study may cost {limits['dollars']:g} dollars, but no price is known",
            hint="set YUNLU_DOLLARS_PER_HOUR to what this machine costs an hour, "
            "or limit it by --trials or --deadline",
        )
    training = measure_training(job, search, probes=probes)
    # Without a price, the cost of a trial is its device time, and is named so.
    unpriced = {"cost": "seconds"} if price is None else {}
    metrics = tuple(
        dict.fromkeys(unpriced.get(one_metric, one_metric) for one_metric in training.metrics)
    )
    directions = tuple(direction_of(metric, search.direction) for metric in metrics)
    method, stop = name_method(search, len(metrics))
    return make_study_request(
        job=job,
        target=target,
        name=_free_name(name, target or job),
        source=source,
        overrides=tuple(overrides),
        metrics=metrics,
        directions=directions,
        rungs=training.rungs,
        plan=training.plan,
        dimensions=dimensions,
        method=method,
        stop_rule="" if stop.name in {"auto", "none"} else stop.name,
        seed=search.seed,
        dollars_per_hour=price,
        **limits,
    )


def make_study_request(
    *, name: str, dimensions: tuple[Dimension, ...], **fields: Any
) -> StudyRequest:
    """A request made now; ``fields`` are those of ``StudyRequest``."""
    request = StudyRequest(
        id=uuid.uuid4().hex,
        name=check_name(name),
        created_at=time.time(),
        fields=tuple(dump_dimension(dimension) for dimension in dimensions),
        **fields,
    )
    if request.job is not None and request.job.search is not None:
        make_method_of(request)  # refused by the method: no study is written
    return request


def make_method_of(request: StudyRequest) -> Method:
    """Build the search method of a study."""
    from yunlu.tuning.methods.factory import make_method  # noqa: PLC0415 - imports Optuna
    from yunlu.tuning.space import SettingCheck  # noqa: PLC0415 - as above

    assert request.job is not None
    search = request.job.search
    assert search is not None
    past: list[Trial] = []
    if search.warm_start:
        from yunlu.tuning.records import read_past  # noqa: PLC0415 - as above

        past = read_past(request, search.warm_start)
    return make_method(
        search,
        request.dimensions,
        seed=request.seed,
        objectives=len(request.metrics),
        allowed=SettingCheck(request.job),
        past=past,
    )


def find_limits(search: SearchSpec) -> dict[str, Any]:
    """Limits of a study, as fields of ``StudyRequest``."""
    deadline = search.deadline
    check_cpu_share(None if search.devices == "auto" else search.devices)
    return {
        "trials": search.trials,
        "dollars": search.budget,
        "deadline_s": None if deadline is None else read_span_s(deadline),
        "parallel": None if search.parallel == "auto" else search.parallel,
        "devices": None if search.devices == "auto" else search.devices,
    }


def with_search(job: Job, search: Any, options: Mapping[str, Any]) -> Job:
    """The job with this search, or its own, and these options of it changed."""
    before = search if search is not None else job.search
    known: Mapping[str, Any]
    if isinstance(before, SearchSpec):
        known = before.model_dump(mode="json", exclude_unset=True)
    else:
        known = before or {}
        if known and "space" not in known:  # the space alone
            known = {"space": known}
    overrides = {key: value for key, value in options.items() if value is not None}
    if not known and not overrides:
        return job
    mapping = job.model_dump(mode="json", exclude_unset=True) | {"search": {**known, **overrides}}
    from yunlu.spec.load import job_from_mapping  # noqa: PLC0415 - reads YAML: slow to import

    return job_from_mapping(mapping, where="search")


def _check_population(search: SearchSpec) -> None:
    size = search.stop.population
    if search.stop.name == "pbt" and search.trials is not None and search.trials <= size:
        raise StudyError(
            f"search.trials: {search.trials} leaves none for copies in a population of {size}; "
            "each copy is a trial of its own",
            hint="raise it, lower search.stop.population, or leave it out: pbt ends by itself",
        )


def _narrow(job: Job) -> Job:
    """The narrow proxy of a wide model, to which settings transfer."""
    from yunlu.tuning.proxy import check_fields, make_proxy  # noqa: PLC0415 - rarely needed

    assert job.search is not None
    check_fields(job.search.space)
    return make_proxy(job)


def _check_evaluates(job: Job) -> None:
    if job.train.evaluate == "never":
        raise StudyError(
            "train.evaluate is never: no metric is reported to compare settings by",
            hint="set train.evaluate to epoch, or to a number of steps",
        )
    if job.data.validation is None and job.data.split.validation == 0:
        raise StudyError(
            "the job holds out no validation data: settings cannot be compared",
            hint="name data.validation, or hold out a share (data.split.validation)",
        )


def _find_same(job: Job, name: str | None) -> Records | None:
    """The study of the very same job, so that the same command continues it."""
    if name is not None:
        directory = StudyDir(studies_home() / check_name(name))
        if not directory.request.exists():
            return None
        if _is_of(directory, job):
            return Records(directory)
        raise StudyError(
            f"there is a study {name} already, of another job or search",
            hint=f"give another name, or continue it: yunlu tune --resume {name}",
        )
    base = _base_name(None, job)
    for known in list_studies():  # the newest first
        directory = StudyDir(studies_home() / known)
        is_ours = known == base or re.fullmatch(rf"{re.escape(base)}-\d+", known)
        if is_ours and directory.read_status().state != "finished" and _is_of(directory, job):
            return Records(directory)
    return None


def _is_of(directory: StudyDir, job: Job) -> bool:
    request = directory.read_request()
    before = request.target or request.job
    return before is not None and before.search is not None and _plain(before) == _plain(job)


def _plain(job: Job) -> Job:
    """The job without the limits of its study."""
    assert job.search is not None
    none = dict.fromkeys(("trials", "budget", "deadline"))
    search = job.search.model_copy(update={**none, "parallel": "auto", "devices": "auto"})
    return job.model_copy(update={"search": search})


def _base_name(name: str | None, job: Job) -> str:
    return check_name(name) if name else (job.name or job.task.partition(":")[0])[:28]


def _free_name(name: str | None, job: Job) -> str:
    base, taken = _base_name(name, job), studies_home()
    if name or not (taken / base).exists():
        return base
    return next(
        f"{base}-{number}"
        for number in range(2, 1 << 20)
        if not (taken / f"{base}-{number}").exists()
    )
