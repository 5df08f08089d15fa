"""Devices, metrics and evaluations of a training of the job, before any trial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError
from yunlu.jobs.dataset_size import measure_dataset
from yunlu.jobs.lifecycle import make_plan
from yunlu.planning.planner import DEFAULT_EPOCHS, choose_batch, count_steps
from yunlu.spec.task_traits import traits_of
from yunlu.tuning.study_dir import StudyError

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.spec.search import SearchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """Metrics and evaluations of a full training of the job."""

    metrics: tuple[str, ...]
    """Objectives by name."""
    rungs: int
    """Its evaluations."""
    plan: Plan | None = None
    """Plan, where a worker had to be asked."""


def measure_training(job: Job, search: SearchSpec, *, probes: bool) -> TrainingShape:
    """Metrics and number of evaluations; ``probes``: whether a worker may be started to find out."""
    rungs, metrics = count_rungs(_longest(job, search)), search.aims
    if (rungs is not None and "auto" not in metrics) or not probes:
        named = tuple("loss" if name == "auto" else name for name in metrics)
        return TrainingShape(metrics=named, rungs=rungs or 1)
    plan = plan_alone(job)
    if not plan.evaluate_every:
        raise StudyError(
            "the job has no validation data: settings cannot be compared",
            hint="name data.validation, or hold out a share (data.split.validation)",
        )
    named = tuple(plan.best_metric if name == "auto" else name for name in metrics)
    result = math.ceil(plan.steps / plan.evaluate_every - 1e-9)
    return TrainingShape(metrics=named, rungs=rungs or result, plan=plan)


def _longest(job: Job, search: SearchSpec) -> Job:
    """The job with the longest training and the smallest batches of the search."""
    changes: dict[str, Any] = {}
    for field, choose in (("epochs", max), ("steps", max), ("batch", min)):
        spec = search.space.get(f"train.{field}")
        if spec is None:
            continue
        values = [*(spec.choice or ()), spec.low, spec.high]
        numbers = [value for value in values if isinstance(value, int | float)]
        if numbers:
            changes[field] = choose(numbers)
    return job.model_copy(update={"train": job.train.model_copy(update=changes)})


def find_size(job: Job) -> tuple[int, bool]:
    """Fewest devices of a trial, and whether their number is fixed."""
    devices = job.devices
    least = job.layout.said_workers if devices == "auto" else devices
    return least, devices != "auto" or job.layout.is_whole


def plan_alone(job: Job) -> Plan:
    """Plan of the job on one device; nothing is trained."""
    return make_plan(job.model_copy(update={"search": None, "devices": 1}))


def count_rungs(job: Job) -> int | None:
    """Evaluations of a training, where known without loading its data."""
    train = job.train
    if train.evaluate == "epoch" and train.steps is None:
        return math.ceil((train.epochs or DEFAULT_EPOCHS) - 1e-9)
    if isinstance(train.evaluate, int) and train.steps is not None:
        return math.ceil(train.steps / train.evaluate)
    if train.evaluate == "never" or traits_of(job.task).is_stream:
        return None  # how many blocks a text has depends on its tokens
    try:
        samples = measure_dataset(job, seq=1).train
        batch = choose_batch(job, samples)
    except DataError:
        return None
    every = math.ceil(samples / batch) if train.evaluate == "epoch" else train.evaluate
    return math.ceil(count_steps(job, samples=samples, batch=batch) / every)
