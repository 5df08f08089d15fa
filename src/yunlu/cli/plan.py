"""``yunlu plan``: hardware and layouts for a job, with predicted time and cost."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.client import default_client
from yunlu.core.errors import JobError
from yunlu.render.terminal.page import (
    make_console,
    print_json,
    print_json_text,
    print_lines,
    print_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    rehearse: bool = False,
    json: bool = False,
) -> int:
    """Choose hardware, layout and precision for a job; predict memory, time and cost.

    plan JOB shows the best options; plan JOB --measure lets a worker measure it on this machine and
    choose every setting; plan predict ROWS.csv predicts the rows of a table.

    Args:
        jobs: The job file: YAML, or Python (jobs.py:name); two of them with --compare; or: predict ROWS.csv.
        overrides: Change the job: --set train.batch=64; may be repeated.
        top: Number of options to show. Default: 3.
        objective: What to minimise: cost, time, or both (balanced).
        budget: Most it may cost, in dollars.
        deadline: Longest time it may take: 90min, 36h, 2d.
        gpu: Devices to choose from, such as H100; may be repeated.
        cloud: Clouds to choose from; here is this machine; may be repeated.
        region: Regions to choose from; may be repeated.
        spot: Also consider spot machines, which the cloud can take back at any time.
        max_devices: Most devices.
        devices: Number of workers, one for each device.
        explain: Also break down memory and time.
        compare: Compare two jobs.
        plot: Plot cost against time into a file: out.png, out.svg or out.html.
        measure: Let a worker measure the job on this machine, without training it.
        rehearse: Also run one step of the best option on fake tensors: its memory, and its errors.
        json: Print the answer as JSON.
    """
    goal = {
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
        job_options = {"set": overrides or None, "devices": devices}
        modes = {
            "compare": compare or None,
            "measure": measure or None,
            "rehearse": rehearse or None,
        }
        _refuse("plan predict", "it predicts rows as they are", goal | shown | job_options | modes)
        return _predict(jobs[1:], json=json)
    if compare:
        _refuse(
            "--compare",
            "it shows the best of each job",
            shown | {"measure": measure or None, "rehearse": rehearse or None},
        )
    if measure:
        _refuse(
            "--measure",
            "it makes one plan on this machine",
            goal | shown | {"rehearse": rehearse or None},
        )
    changes = [
        f"goal.{name}={json_module.dumps(value)}"
        for name, value in goal.items()
        if value is not None
    ]
    changes += [f"devices={devices}"] if devices is not None else []
    if len(jobs) != (2 if compare else 1):
        expected = "two job files" if compare else "one job file"
        raise JobError(f"plan takes {expected}, got {len(jobs)}.", hint="yunlu plan --help")
    loaded = [_read(job, (*overrides, *changes), goal) for job in jobs]
    if measure:
        return _measure(loaded[0], json=json)
    if compare:
        return _compare(jobs, loaded, json=json)
    most = _USUAL_TOP if top is None else top
    if rehearse:
        _refuse("--rehearse", "it shows one option", {"plot": plot})
        return _rehearse(loaded[0], top=most, explain=explain, json=json)
    return _show_options(loaded[0], top=most, explain=explain, plot=plot, json=json)


def _read(job: str, overrides: tuple[str, ...], goal: Mapping[str, object]) -> Job:
    """The job; an error of an option is reported under the name of the option."""
    from yunlu.spec.load import load_job  # noqa: PLC0415 (slow to import)

    try:
        return load_job(job, overrides=overrides)
    except JobError as error:
        message = error.message
        for name in (name for name, value in goal.items() if value is not None):
            flag = f"--{name.replace('_', '-')} (goal.{name})"
            message = message.replace(f"--set goal.{name}", flag)
        if message == error.message:
            raise
        raise JobError(message, hint=error.hint) from error


def _refuse(mode: str, why: str, options: Mapping[str, object]) -> None:
    """Refuse options that would change nothing."""
    useless = [
        f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None
    ]
    if useless:
        names, verb = ", ".join(useless), "does" if len(useless) == 1 else "do"
        raise JobError(f"{names} {verb} not go with {mode}: {why}.", hint=f"leave out {names}")


def _show_options(job: Job, *, top: int, explain: bool, plot: Path | None, json: bool) -> int:
    outlook = default_client().plan(job, top=top, candidates=plot is not None)
    options = outlook.options
    if plot is not None:
        from yunlu.render.plots import write_plan_plot  # noqa: PLC0415 (slow to import)

        write_plan_plot(outlook, plot, title=job.name or job.task)
    if json:
        print_json_text(options.to_json())
        return 1 if options.problems else 0
    from yunlu.render.terminal.plan_options import (  # noqa: PLC0415 (slow to import)
        explained_lines,
        notes_block,
        options_table,
    )

    console = make_console()
    console.print(options_table(options, width=console.width))
    if explain:
        console.print()
        for line in explained_lines(options, console):
            print_lines(console, line, hang=5)
    console.print(notes_block(options, took_s=outlook.computed_s))
    if plot is not None:
        print_text(f" picture in {plot}")
    return 1 if options.problems else 0


def _rehearse(job: Job, *, top: int, explain: bool, json: bool) -> int:
    client = default_client()
    options = client.plan(job, top=top).options
    rehearsal = client.rehearse(job, options.best)
    if json:
        print_json(
            {
                "plan": options.best.model_dump(mode="json"),
                "rehearsal": rehearsal.model_dump(mode="json"),
            }
        )
        return 1 if options.problems else 0
    from yunlu.render.terminal.plan_options import rehearsal_block  # noqa: PLC0415 (slow to import)

    code = _show_options(job, top=top, explain=explain, plot=None, json=False)
    make_console().print(rehearsal_block(options.best, rehearsal))
    return code


def _compare(names: tuple[str, ...], jobs: list[Job], *, json: bool) -> int:
    client = default_client()
    plans = [client.plan(job, top=1).options for job in jobs]
    if json:
        dumps = (options.model_dump(mode="json") for options in plans)
        print_json(dict(zip(names, dumps, strict=True)))
    else:
        from yunlu.render.terminal.plan_options import comparison_table  # noqa: PLC0415 (slow)

        short = [Path(name).name for name in names]
        titles = short if len(set(short)) == len(short) else names
        make_console().print(comparison_table(titles, [options.best for options in plans]))
        for title, options in zip(titles, plans, strict=True):
            for problem in options.problems:
                print_text(f" {title}: {problem}")
    return 1 if any(options.problems for options in plans) else 0


def _predict(files: tuple[str, ...], *, json: bool) -> int:
    if len(files) != 1:
        raise JobError(
            f"plan predict takes one table, got {len(files)}.", hint="yunlu plan predict ROWS.csv"
        )
    rows = default_client().predict(Path(files[0]))
    if json:
        print_json([row.model_dump(mode="json", exclude_unset=True) for row in rows])
    else:
        from yunlu.render.terminal.plan_options import rows_table  # noqa: PLC0415 (slow)

        make_console().print(rows_table(rows))
    return 0


def _measure(job: Job, *, json: bool) -> int:
    client = default_client()
    if json:
        print_json_text(client.measure(job).model_dump_json(indent=2))
        return 0
    from yunlu.render.terminal.event_lines import plan_block  # noqa: PLC0415 (slow to import)
    from yunlu.render.terminal.plan_options import measure_progress  # noqa: PLC0415

    console = make_console()
    with measure_progress(console) as on_event:
        plan = client.measure(job, on_event=on_event)
    console.print(plan_block(plan))
    return 0


def _names(texts: tuple[str, ...]) -> list[str] | None:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return names or None
