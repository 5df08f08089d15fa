"""The plan that is submitted with a job: a chosen one, which pins the job, or the one of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from yunlu.core.errors import JobError, YunluError
from yunlu.core.limits import read_json
from yunlu.hardware.catalog import HERE
from yunlu.jobs.model_profile import find_shape
from yunlu.planning.plan import Plan
from yunlu.spec.load import apply_overrides, job_from_mapping
from yunlu.spec.source import SourceDocument

if TYPE_CHECKING:
    from yunlu.spec.job import Job


def resolve_plan(job: Job, plan: Plan | None) -> tuple[Job, Plan | None]:
    """The job and the plan to submit: a chosen plan pins its choices in the job."""
    return (job, plan_here(job)) if plan is None else (pin_job(job, plan), plan)


def pin_job(job: Job, plan: Plan) -> Job:
    """The job with the choices of a plan: devices, layout, batch, micro-batch, precision, ..."""
    document = SourceDocument(data=job.model_dump(mode="json", exclude_unset=True))
    pinned = apply_overrides(document, plan.overrides)
    return job_from_mapping(pinned.data, where="the job with its plan")


def plan_here(job: Job, *, measure: bool = False) -> Plan | None:
    """The plan of a job on this machine; None where too little is known.

    Unless it may ``measure``, only what is known at once is used: a probed machine, a described model,
    data that can be counted.
    """
    try:
        described = find_shape(job, measure=measure)
        # Slow to import, and of use only where the model is known.
        from yunlu.jobs.calibration import this_machine  # noqa: PLC0415
        from yunlu.jobs.plan_options import plan_options  # noqa: PLC0415
        from yunlu.planning.planner import DEFAULT_BATCH  # noqa: PLC0415

        if this_machine() is None:
            return None  # never probed
        # Only what a worker on this machine would choose: a larger batch has to be asked for.
        limits = dict.fromkeys(("gpu", "region", "budget", "deadline"))
        most = min(job.goal.max_batch or DEFAULT_BATCH, DEFAULT_BATCH)
        goal = job.goal.model_copy(update={**limits, "cloud": [HERE], "max_batch": most})
        here = job.model_copy(update={"goal": goal})
        return plan_options(here, top=1, described=described).best
    except YunluError:
        return None


def load_plan(text: str) -> Plan:
    """A plan from a file; ``FILE:2`` is the second of the options that `yunlu plan --json` printed."""
    path, number = Path(text), 1
    name, _, last = text.rpartition(":")
    if not path.exists() and name and last.isdecimal():
        path, number = Path(name), int(last)
    content: Any = read_json(path, kind=JobError)
    options: Any = content.get("options", [content]) if isinstance(content, dict) else [content]
    if not 1 <= number <= len(options):
        raise _not_a_plan(text, f"it has no option {number}")
    try:
        return Plan.model_validate(options[number - 1])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _not_a_plan(text, f"{where}: {first['msg']}") from error


def _not_a_plan(text: str, why: str) -> JobError:
    return JobError(f"{text} is not a plan: {why}.", hint="yunlu plan JOB --json > FILE writes one")
