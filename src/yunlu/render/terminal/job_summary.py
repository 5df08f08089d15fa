"""A job in a few lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.core.units import show_number

if TYPE_CHECKING:
    from yunlu.spec.job import Job


def job_summary(job: Job) -> str:
    """How a job was read, one line for each part."""
    lines = {
        "name": job.name or "–",
        "task": job.task,
        "model": _with_details(job.model.name, job.model.args),
        "data": _describe_data(job),
        "goal": _describe_goal(job),
        "optimiser": _with_details(job.train.optimizer.name, _set_by_user(job.train.optimizer)),
        "schedule": _with_details(job.train.schedule.name, _set_by_user(job.train.schedule)),
        "trackers": ", ".join(["tensorboard", *job.trackers]),
    }
    return "\n".join(f"  {name:<10}{text}" for name, text in lines.items())


def _describe_data(job: Job) -> str:
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


def _describe_goal(job: Job) -> str:
    train = job.train
    length = f"{train.steps} steps" if train.steps else f"{show_number(train.epochs or 10)} epochs"
    stop = train.early_stopping
    parts = [length, f"batch {train.batch}", f"precision {train.precision}"]
    if stop:
        parts.append(f"stops early after {stop.patience} evaluations without improvement")
    return ", ".join(parts)


def _with_details(name: str, details: dict[str, Any]) -> str:
    text = ", ".join(f"{key} {value}" for key, value in details.items() if key != "name")
    return f"{name} ({text})" if text else name


def _set_by_user(spec: Any) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True)
