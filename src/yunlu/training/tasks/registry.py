"""Lookup of tasks: by entry point, or the user's own class."""

from __future__ import annotations

from yunlu.core.errors import JobError
from yunlu.core.imports import make_object, names_object
from yunlu.spec.entry_points import TASKS, load_registered
from yunlu.training.tasks.task import Task


def open_task(name: str) -> Task:
    """The task that a job names."""
    task = make_object(name) if names_object(name) else load_registered(TASKS, name, kind="task")()
    if not isinstance(task, Task):
        needed = ("metric", "load", "build", "collate", "loss", "scorer")
        missing = ", ".join(attribute for attribute in needed if not hasattr(task, attribute))
        raise JobError(
            f"{name} is not a task: it lacks {missing}.",
            hint="See yunlu.training.tasks.task.Task; its contract test shows what each must do.",
        )
    return task
