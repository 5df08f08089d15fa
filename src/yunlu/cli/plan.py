"""``yunlu plan``: what would be done, why, and what it would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.cli.display import Course
from yunlu.cli.lines import describe, plan_block
from yunlu.cli.page import make_console
from yunlu.client import validate
from yunlu.core.rundir import EventKind
from yunlu.jobs import service

if TYPE_CHECKING:
    from yunlu.core.rundir import Event
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job


def plan(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Plan a job without training it: each choice with its reason, memory, time and cost.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.batch=64; may be repeated.
        devices: Workers that share the training, one for each device.
        json: Print the plan as JSON.
    """
    said = [f"devices={devices}"] if devices is not None else []
    asked = validate(job, overrides=(*overrides, *said))
    if json:
        print(service.make_plan(asked).model_dump_json(indent=2))
    else:
        _show(asked)
    return 0


def _show(job: Job) -> Plan:
    console = make_console()
    course = Course()
    with console.status("starting") as status:

        def show(event: Event) -> None:
            if event.kind is EventKind.PROGRESS:
                status.update(str(event.data.get("phase")))
            elif event.kind in {EventKind.DATA, EventKind.MODEL, EventKind.WARNING}:
                console.print(describe(event, course))

        made = service.make_plan(job, on_event=show)
    console.print(plan_block(made))
    return made
