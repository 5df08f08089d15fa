"""Typed documents of a run: its job and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from yunlu.core.errors import StoreError
from yunlu.core.json_decode import decode_json
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


def read_job(run: RunStore) -> Job:
    """The job; refused where there is none."""
    from yunlu.spec.job import Job  # noqa: PLC0415 (slow to import: many only list runs)

    content = run.read(Document.JOB)
    if content is None:
        raise not_a_run(run)
    try:
        return Job.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(run, Document.JOB, error) from error


def read_raw_job(run: RunStore) -> dict[str, Any] | None:
    """The job as plain JSON; None where it is missing or damaged."""
    return read_json(run, Document.JOB)


def write_job(run: RunStore, job: Job) -> None:
    """Store the job; only done while a run is created."""
    run.write(Document.JOB, job.model_dump_json(indent=2))


def read_plan(run: RunStore) -> Plan | None:
    """The plan; None where the run has not been planned yet."""
    return _read_plan(run, Document.PLAN)


def read_submitted_plan(run: RunStore) -> Plan | None:
    """The plan that was made before the run; None where there was none."""
    return _read_plan(run, Document.SUBMITTED_PLAN)


def _read_plan(run: RunStore, document: Document) -> Plan | None:
    from yunlu.planning.plan import Plan  # noqa: PLC0415 (slow to import: many only list runs)

    content = run.read(document)
    try:
        return None if content is None else Plan.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(run, document, error) from error


def require_plan(run: RunStore) -> Plan:
    """The plan; refused where the run has not been planned yet."""
    plan = read_plan(run)
    if plan is None:
        raise StoreError(f"{run.id} has no plan yet", hint="wait until its workers have planned it")
    return plan


def write_plan(run: RunStore, plan: Plan) -> None:
    """Store the plan."""
    run.write(Document.PLAN, plan.model_dump_json(indent=2))


def write_submitted_plan(run: RunStore, plan: Plan) -> None:
    """Store the plan that was made before the run; only done while a run is created."""
    run.write(Document.SUBMITTED_PLAN, plan.model_dump_json(indent=2))


def read_json(run: RunStore, document: str) -> dict[str, Any] | None:
    """A document that holds a JSON object; None where it is missing or damaged."""
    content = run.read(document)
    try:
        value = None if content is None else decode_json(content, replace_lone=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_number(run: RunStore, document: str) -> int | None:
    """A document that holds a whole number; None where it is missing or damaged."""
    content = run.read(document)
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


def _damaged(run: RunStore, document: Document, error: ValidationError) -> StoreError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    problem = f"{where}: {first['msg']}" if where else first["msg"]
    return StoreError(f"{run.address}: its {document} is damaged: {problem}")


def not_a_run(run: RunStore) -> StoreError:
    """The error of an address without a run."""
    return StoreError(f"{run.address} is not a run: its {Document.JOB} is missing or damaged")
