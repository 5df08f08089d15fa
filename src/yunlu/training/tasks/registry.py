"""Lookup of tasks: by entry point, or the user's own class."""

from __future__ import annotations

from importlib.metadata import entry_points

from yunlu.core.errors import JobError, did_you_mean
from yunlu.core.imports import make_object, names_object
from yunlu.training.tasks.task import Task


def open_task(name: str) -> Task:
    """The task that a job names."""
    points = entry_points(group="yunlu.tasks", name=name)
    if points:
        task = next(iter(points)).load()()
    elif names_object(name):
        task = make_object(name)
    else:
        known = {point.name for point in entry_points(group="yunlu.tasks")}
        raise JobError(f"There is no task {name!r}.", hint=did_you_mean(name, known))
    if not isinstance(task, Task):
        needed = ("metric", "load", "build", "collate", "loss", "scorer")
        missing = ", ".join(attribute for attribute in needed if not hasattr(task, attribute))
        raise JobError(
            f"{name} is not a task: it lacks {missing}.",
            hint="See yunlu.training.tasks.task.Task; its contract test shows what each must do.",
        )
    return task
