"""``yunlu validate JOB``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import print_json, print_text


def validate(
    job: str,
    /,
    *,
    set_: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check a job file and show how it was read.

    Args:
        job: A job file: job.yaml, job.py or jobs.py:name.
        set_: Change a value first, such as train.epochs=3; may be repeated.
        json_: Print the result as JSON.
    """
    result = default_client().validate(job, overrides=set_)
    if json_:
        problems = [problem.model_dump() for problem in result.problems]
        print_json({"valid": result.is_valid, "problems": problems})
        return 0 if result.is_valid else 1
    from yunlu.render.terminal.plan_options import job_summary  # noqa: PLC0415 (slow to import)

    print_text(f"{job} is valid.\n{job_summary(result.require())}")
    return 0
