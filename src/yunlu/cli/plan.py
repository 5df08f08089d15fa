"""``yunlu plan``: on what a job could run, how, and what it would take."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.client.api import validate
from yunlu.core.errors import JobError
from yunlu.jobs import lifecycle
from yunlu.render.terminal.event_lines import describe, plan_block
from yunlu.render.terminal.page import make_console, to_json
from yunlu.render.terminal.plan_options import comparison_table, notes_block, options_table
from yunlu.render.terminal.run_display import Course
from yunlu.runs.events import DataOpened, ModelBuilt, ProgressReported, WarningRaised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.plan import Plan
    from yunlu.planning.search.options import PlanOptions
    from yunlu.runs.events import Event
    from yunlu.spec.job import Job

_PREDICT = "predict"
_USUAL_TOP = 3


def plan(
    *jobs: str,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    top: Annotated[int | None, Parameter(show_default=False)] = None,
    objective: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    gpu: tuple[str, ...] = (),
    cloud: tuple[str, ...] = (),
    region: tuple[str, ...] = (),
    spot: bool = False,
    max_devices: Annotated[int | None, Parameter(show_default=False)] = None,
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    explain: bool = False,
    compare: bool = False,
    plot: Annotated[Path | None, Parameter(show_default=False)] = None,
    measure: bool = False,
    json: bool = False,
) -> int:
    """Choose hardware, layout and precision for a job; foretell memory, time and cost.

    plan JOB shows the best options; plan JOB --measure lets a worker measure it on this machine and
    settle every setting; plan predict ROWS.csv foretells the rows of a table.

    Args:
        jobs: The job file: YAML, or Python (jobs.py:name); two of them with --compare; or predict
            ROWS.csv, which foretells the rows of a table.
        overrides: Change the job: --set train.batch=64; may be repeated.
        top: How many options to show; 3 unless told otherwise.
        objective: What to make small: cost, time, or both (balanced).
        budget: The most it may cost, in dollars.
        deadline: The longest it may take: 90min, 36h, 2d.
        gpu: Devices to choose from, such as H100; may be repeated.
        cloud: Clouds to choose from; here is this machine; may be repeated.
        region: Regions to choose from; may be repeated.
        spot: Also consider machines that the cloud can take back at any time.
        max_devices: The most devices.
        devices: Workers that share the training, one for each device.
        explain: Also show memory and time by what takes them.
        compare: Compare two jobs.
        plot: Draw cost against time into a file: out.png, out.svg or out.html.
        measure: Let a worker measure the job on this machine, without training it.
        json: Print the answer as JSON.
    """
    said = {
        "objective": objective,
        "budget": budget,
        "deadline": deadline,
        "gpu": _names(gpu),
        "cloud": _names(cloud),
        "region": _names(region),
        "spot": spot or None,
        "max_devices": max_devices,
    }
    shown = {"top": top, "explain": explain or None, "plot": plot}
    if jobs[:1] == (_PREDICT,):
        job_says = {"set": overrides or None, "devices": devices}
        ways = {"compare": compare or None, "measure": measure or None}
        _refuse("plan predict", "it foretells rows as they are", said | shown | job_says | ways)
        return _predict(jobs[1:], json=json)
    if compare:
        _refuse("--compare", "it shows the best of each job", shown | {"measure": measure or None})
    if measure:
        _refuse("--measure", "it settles one plan on this machine", said | shown)
    changes = [
        f"goal.{name}={json_module.dumps(value)}"
        for name, value in said.items()
        if value is not None
    ]
    changes += [f"devices={devices}"] if devices is not None else []
    if len(jobs) != (2 if compare else 1):
        expected = "two job files" if compare else "one job file"
        raise JobError(f"plan takes {expected}, got {len(jobs)}.", hint="yunlu plan --help")
    asked = [_read(job, (*overrides, *changes), said) for job in jobs]
    if measure:
        return _measure(asked[0], json=json)
    if compare:
        return _compare(jobs, asked, json=json)
    most = _USUAL_TOP if top is None else top
    return _foresee(asked[0], top=most, explain=explain, plot=plot, json=json)


def _read(job: str, overrides: tuple[str, ...], said: Mapping[str, object]) -> Job:
    """The job; what is wrong with an option is told by its own name."""
    try:
        return validate(job, overrides=overrides)
    except JobError as error:
        message = error.message
        for name in (name for name, value in said.items() if value is not None):
            flag = f"--{name.replace('_', '-')} (goal.{name})"
            message = message.replace(f"--set goal.{name}", flag)
        if message == error.message:
            raise
        raise JobError(message, hint=error.hint) from error


def _refuse(way: str, why: str, said: Mapping[str, object]) -> None:
    """What was said would change nothing: better told than left out without a word."""
    useless = [f"--{name.replace('_', '-')}" for name, value in said.items() if value is not None]
    if useless:
        names, verb = ", ".join(useless), "does" if len(useless) == 1 else "do"
        raise JobError(f"{names} {verb} not go with {way}: {why}.", hint=f"leave out {names}")


def _foresee(job: Job, *, top: int, explain: bool, plot: Path | None, json: bool) -> int:
    from yunlu.jobs.outlook import look_ahead  # noqa: PLC0415 (arrays are slow to import)

    began = time.process_time()
    outlook = look_ahead(job, top=top, everything=plot is not None)
    took_s = time.process_time() - began
    options = outlook.options
    if plot is not None:
        from yunlu.render.plan_plot import write_plan_plot  # noqa: PLC0415

        write_plan_plot(outlook, plot, title=job.name or job.task)
    if json:
        print(options.to_json())
    else:
        _show_options(options, took_s=took_s, explain=explain)
        if plot is not None:
            print(f" picture in {plot}")
    return 1 if options.problems else 0


def _show_options(options: PlanOptions, *, took_s: float, explain: bool) -> None:
    console = make_console()
    console.print(options_table(options))
    if explain:
        # Not wrapped: a command that stands among the lines can be copied as it is.
        console.print(f"\n{indent(options.explain(), ' ')}", soft_wrap=True, markup=False)
    console.print(notes_block(options, took_s=took_s))


def _compare(names: tuple[str, ...], jobs: list[Job], *, json: bool) -> int:
    from yunlu.jobs.outlook import foresee  # noqa: PLC0415 (arrays are slow to import)

    found = [foresee(job, top=1) for job in jobs]
    if json:
        print(
            to_json(
                {
                    name: each.model_dump(mode="json")
                    for name, each in zip(names, found, strict=True)
                }
            )
        )
    else:
        short = [Path(name).name for name in names]
        titles = short if len(set(short)) == len(short) else names
        make_console().print(comparison_table(titles, [each.best for each in found]))
        for title, each in zip(titles, found, strict=True):
            for problem in each.problems:
                print(f" {title}: {problem}")
    return 1 if any(each.problems for each in found) else 0


def _predict(files: tuple[str, ...], *, json: bool) -> int:
    from yunlu.jobs.predict_table import foretell_file  # noqa: PLC0415
    from yunlu.render.terminal.predicted_rows import rows_table  # noqa: PLC0415

    if len(files) != 1:
        raise JobError(
            f"plan predict takes one table, got {len(files)}.", hint="yunlu plan predict ROWS.csv"
        )
    told = foretell_file(Path(files[0]))
    if json:
        print(to_json(told))
    else:
        make_console().print(rows_table(told))
    return 0


def _measure(job: Job, *, json: bool) -> int:
    if json:
        print(lifecycle.make_plan(job).model_dump_json(indent=2))
    else:
        _show_measured(job)
    return 0


def _show_measured(job: Job) -> Plan:
    console = make_console()
    course = Course()
    with console.status("starting") as status:

        def show(event: Event) -> None:
            if isinstance(event, ProgressReported):
                status.update(event.phase)
            elif isinstance(event, DataOpened | ModelBuilt | WarningRaised):
                console.print(describe(event, course))

        made = lifecycle.make_plan(job, on_event=show)
    console.print(plan_block(made))
    return made


def _names(said: tuple[str, ...]) -> list[str] | None:
    names = [name.strip() for each in said for name in each.split(",") if name.strip()]
    return names or None
