"""``yunlu validate JOB``."""

import json
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from yunlu.core.errors import JobError
from yunlu.core.units import show_number
from yunlu.spec.job import Job
from yunlu.spec.load import InvalidJobError, load_job


def validate(
    job: str,
    /,
    *,
    set_: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check a job file and say how it was understood.

    Args:
        job: A job file: job.yaml, job.py or jobs.py:name.
        set_: Change a value first, such as train.epochs=3; may be repeated.
        json_: Print the result as JSON.
    """
    try:
        loaded = load_job(job, overrides=set_)
    except JobError as error:
        if not json_:
            raise
        print(json.dumps({"valid": False, "problems": _problems(job, error)}, ensure_ascii=False))
        return 1
    if json_:
        print(json.dumps({"valid": True, "problems": []}))
    else:
        print(f"{job} is valid.\n{summary(loaded)}")
    return 0


def summary(job: Job) -> str:
    """What was understood, one line per question."""
    lines = {
        "name": job.name or "–",
        "task": job.task,
        "model": _with_details(job.model.name, job.model.args),
        "data": _data_words(job),
        "goal": _goal_words(job),
        "optimiser": _with_details(job.train.optimizer.name, _set_by_user(job.train.optimizer)),
        "schedule": _with_details(job.train.schedule.name, _set_by_user(job.train.schedule)),
        "trackers": ", ".join(["tensorboard", *job.trackers]),
    }
    return "\n".join(f"  {name:<10}{words}" for name, words in lines.items())


def _problems(file: str, error: JobError) -> list[dict[str, Any]]:
    if not isinstance(error, InvalidJobError):
        return [_as_json(file, {"message": str(error)})]
    return [_as_json(file, asdict(problem)) for problem in error.problems]


def _as_json(file: str, problem: dict[str, Any]) -> dict[str, Any]:
    keys = ("line", "column", "key", "message", "override")
    return {"file": file, **{key: problem.get(key) for key in keys}}


def _data_words(job: Job) -> str:
    data = job.data
    parts = [data.train]
    for name, path, share in (
        ("validation", data.validation, data.split.validation),
        ("test", data.test, data.split.test),
    ):
        parts.append(f"{name} {path}" if path else f"{share * 100:.3g} % held out for {name}")
    if data.target:
        parts.append(f"target {data.target}")
    return ", ".join(parts)


def _goal_words(job: Job) -> str:
    train = job.train
    length = f"{train.steps} steps" if train.steps else f"{show_number(train.epochs or 10)} epochs"
    stop = train.early_stopping
    parts = [length, f"batch {train.batch}", f"precision {train.precision}"]
    if stop:
        parts.append(f"stops early after {stop.patience} evaluations without improvement")
    return ", ".join(parts)


def _with_details(name: str, details: dict[str, Any]) -> str:
    words = ", ".join(f"{key} {value}" for key, value in details.items() if key != "name")
    return f"{name} ({words})" if words else name


def _set_by_user(spec: Any) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True)
