"""Rehearsal of a job before it is queued for devices that are rented: its errors, before anyone pays.

A job is refused only for an error of its own. Whatever else keeps it from being rehearsed is a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import JobError, ModelError, YunluError
from yunlu.core.units import show_bytes
from yunlu.executors.registry import LOCAL, scheme_of
from yunlu.jobs.model_profile import rehearse

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan, Rehearsal
    from yunlu.spec.job import Job

LIMIT_S = 180.0
"""Longest rehearsal; a model of 70 billion weights takes less on an idle core."""


def check_before_paying(
    job: Job, plan: Plan | None, *, executor: str, limit_s: float = LIMIT_S
) -> str:
    """Raise the error that the job's step would raise on this executor's devices; else what to note.

    Args:
        job: The job.
        plan: The plan that it is submitted with; the best option where there is none.
        executor: Address of the executor; on this machine errors show at once, and cost nothing.
        limit_s: Seconds after which it is submitted without.
    """
    if scheme_of(executor) == LOCAL:
        return ""
    plan = plan or _best_option(job)
    if plan is None:
        return "not rehearsed: no hardware of the catalog is known to suit it"
    try:
        rehearsal = rehearse(job, plan, limit_s=limit_s)
    except (JobError, ModelError) as error:
        hint = "rehearse=False or --no-rehearse submits it all the same"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
        raise
    except YunluError as error:
        return f"not rehearsed: {error.message}"
    return _note_memory(plan, rehearsal)


def _best_option(job: Job) -> Plan | None:
    from yunlu.jobs.plan_options import plan_options  # noqa: PLC0415 (slow to import)

    try:
        return plan_options(job, top=1).best
    except YunluError:
        return None  # what is rented may suit it all the same


def _note_memory(plan: Plan, rehearsal: Rehearsal) -> str:
    room = plan.hardware.memory_bytes
    if not 0 < room < rehearsal.peak_bytes:
        return ""
    return (
        f"the tensors of a step take {show_bytes(rehearsal.peak_bytes)} on worker "
        f"{max(rehearsal.ranks, key=lambda rank: rank.peak_bytes).rank}, more than the "
        f"{show_bytes(room)} of {plan.hardware}"
    )
