"""The result of checking a job file: the job, or every problem of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import field_serializer

from yunlu.core.errors import JobError
from yunlu.core.value import Value
from yunlu.spec.job import Job
from yunlu.spec.load import InvalidJobError, load_job

if TYPE_CHECKING:
    from collections.abc import Sequence


class JobProblem(Value):
    """One problem of a job file; line and column count from 1, and are absent for overrides."""

    file: str
    line: int | None = None
    column: int | None = None
    key: str | None = None
    message: str
    override: str | None = None
    """The key of the ``--set`` that brought it in."""


class Validation(Value):
    """A job, or why a file does not hold one."""

    job: Job | None = None
    problems: tuple[JobProblem, ...] = ()
    message: str = ""
    """All problems in one text; empty where there are none."""
    hint: str | None = None

    @field_serializer("job")
    def _dump_job(self, job: Job | None) -> dict[str, Any] | None:
        # What the file does not set stays unset: a default may depend on other fields.
        return None if job is None else job.model_dump(mode="json", exclude_unset=True)

    @property
    def is_valid(self) -> bool:
        """Whether there is a job."""
        return self.job is not None

    def require(self) -> Job:
        """The job; raises where there is none."""
        if self.job is None:
            raise JobError(self.message, hint=self.hint)
        return self.job


def check_job(file: str, *, overrides: Sequence[str] = ()) -> Validation:
    """Load a job file and collect its problems."""
    try:
        return Validation(job=load_job(file, overrides=overrides))
    except InvalidJobError as error:
        problems = tuple(JobProblem(file=file, **asdict(problem)) for problem in error.problems)
        return Validation(problems=problems, message=error.message, hint=error.hint)
    except JobError as error:
        problem = JobProblem(file=file, message=str(error))
        return Validation(problems=(problem,), message=error.message, hint=error.hint)
