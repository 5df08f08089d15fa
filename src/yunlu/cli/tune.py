"""``yunlu tune``: search for good settings of a job, and watch the search."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from yunlu.cli.train import STOPPED_CODE, counted_signals
from yunlu.client import default_client
from yunlu.core.errors import JobError, error_of_code
from yunlu.render.terminal.page import (
    make_console,
    padded_label,
    print_json,
    print_lines,
    print_note,
    title_text,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from yunlu.client.protocol import Client
    from yunlu.render.terminal.study_tables import StudyDisplay
    from yunlu.spec.job import Job
    from yunlu.tuning.session import StudyResult, StudyStart

Number = Annotated[int | None, Parameter(show_default=False)]
Word = Annotated[str | None, Parameter(show_default=False)]


def tune(
    job: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    trials: Number = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    deadline: Word = None,
    parallel: Number = None,
    devices: Number = None,
    method: Word = None,
    stop: Word = None,
    metric: Word = None,
    name: Word = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    proxy: bool = False,
    resume: Word = None,
    plan: bool = False,
    json: bool = False,
) -> int:
    """Search for good settings of a job: many trials, poor ones stopped early.

    The job's `search` lists the fields that vary. Ctrl-C stops the study; the same command continues it.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        trials: Most trials.
        budget: Most that all trials may cost, in dollars.
        deadline: Longest time the study may take: 90min, 36h, 1d 12h.
        parallel: Most trials that train at once.
        devices: Devices that all trials share.
        method: Search method: auto, grid, random, sobol, tpe, gp, cmaes, nsga2, frontier, or module:Class.
        stop: Early stopping rule: auto, none, median, asha, hyperband, patience, pbt.
        metric: Metric to optimise: loss, or a metric of the task.
        name: Name of the study.
        overrides: Change the job: --set train.epochs=3; may be repeated.
        proxy: Search on a narrow copy of the model, and transfer the best setting (µP).
        resume: Continue the study of this name, instead of a job.
        plan: Forecast trials, time and cost, and start nothing.
        json: Print one JSON document at the end, and nothing else.
    """
    limits = {"trials": trials, "budget": budget, "deadline": deadline, "parallel": parallel}
    client, console = default_client(), make_console()
    if resume is not None:
        if job is not None or overrides or proxy or name or method or stop or metric or plan:
            raise JobError(
                "--resume names a study that has its job and its search already.",
                hint="with it go only --trials, --budget, --deadline, --parallel, --devices, --json",
            )
        with _measuring(console, json=json):
            start = client.tune_again(
                resume,
                trials=trials,
                budget=budget,
                deadline=deadline,
                parallel=parallel,
                devices=devices,
            )
        return _search(client, start, console, json=json)
    if job is None:
        raise JobError("There is nothing to tune.", hint="name a job file: yunlu tune job.yaml")
    fields = {"devices": devices, "method": method, "stop": stop, "metric": metric}
    loaded = _read_job(job, overrides, {**limits, **fields, "proxy": proxy or None})
    if plan:
        return _forecast(client, loaded, name, console, json=json)
    with _measuring(console, json=json):
        start = client.tune(loaded, name=name, source=job, overrides=overrides)
    return _search(client, start, console, json=json)


def _read_job(job: str, overrides: tuple[str, ...], options: dict[str, Any]) -> Job:
    from yunlu.spec.load import load_job, source_of  # noqa: PLC0415 (slow to import)

    given = [
        f"search.{key}={_as_text(value)}" for key, value in options.items() if value is not None
    ]
    # In this order: --set search={...} --stop median --set search.stop.trials=3.
    whole = [override for override in overrides if override.startswith("search=")]
    inside = [override for override in overrides if override.startswith("search.")]
    plain = load_job(
        job, overrides=[one_override for one_override in overrides if one_override not in inside]
    )
    if plain.search is None and not inside:
        raise JobError(
            f"{job} has no search section: nothing in it varies.",
            hint="add one, such as: search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}}",
        )
    others = [override for override in overrides if override not in whole]
    try:
        loaded = load_job(job, overrides=[*whole, *given, *others])
    except JobError as error:
        raise _name_options(error, options) from None
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", getattr(source_of(job), "stem", "")).strip("-._")
    return loaded if loaded.name or not stem else loaded.model_copy(update={"name": stem[:28]})


def _name_options(error: JobError, options: dict[str, Any]) -> JobError:
    """An error of an option is reported under the name of the option."""
    message = error.message
    for key in (key for key, value in options.items() if value is not None):
        message = message.replace(f"--set search.{key}:", f"--{key}:")
    return JobError(message, hint=error.hint)


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _search(client: Client, start: StudyStart, console: Console, *, json: bool) -> int:
    if not json:
        _print_head(console, start)
    display = _open_display(console, start, json=json)

    def answer(presses: int) -> None:
        if presses > 1:  # leave: the trials continue without this command
            raise KeyboardInterrupt
        display.note("stopping: trials save and hold (again to leave them)")

    try:
        with counted_signals(answer) as presses:
            result = client.run_study(
                start.view.name, on_change=display.show, should_stop=lambda: bool(presses)
            )
    finally:
        display.close()
    return _conclude(result, None if json else console, is_interrupted=bool(presses))


def _forecast(client: Client, job: Job, name: str | None, console: Console, *, json: bool) -> int:
    with _measuring(console, json=json):
        outlook = client.forecast_study(job, name=name)
    if json:
        fields = {"study": outlook.study, "rungs": outlook.rungs, "forecast": outlook.forecast}
        print_json(fields)
        return 0
    from yunlu.render.terminal.study_tables import forecast_block, print_block  # noqa: PLC0415

    _print_title(console, outlook.study, outlook.dimensions, outlook.devices)
    print_block(console, forecast_block(outlook.forecast))
    return 0


def _measuring(console: Console, *, json: bool) -> AbstractContextManager[object]:
    """A worker measures the machine and the model where nothing is known of them: that takes a moment."""
    is_shown = console.is_terminal and not json
    return console.status("measuring one training") if is_shown else nullcontext()


def _print_head(console: Console, start: StudyStart) -> None:
    from yunlu.render.terminal.study_tables import forecast_block, print_block  # noqa: PLC0415

    view = start.view
    _print_title(console, view.name, len(view.dimensions), start.devices)
    if view.trials:
        print_lines(console, Text(f" continues after {len(view.trials)} trials", style="dim"))
    elif view.forecast:
        print_block(console, forecast_block(view.forecast))
    console.print()
    for warning in start.warnings:
        print_lines(console, Text(f" {warning}", style="yellow"))


def _print_title(console: Console, name: str, dimensions: int, devices: int) -> None:
    counts = {"dimension": dimensions, "device": devices}
    about = ", ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
    print_lines(console, title_text(name, about).append("\n"))


def _open_display(console: Console, start: StudyStart, *, json: bool) -> StudyDisplay:
    from yunlu.render.terminal import study_tables  # noqa: PLC0415 (slow to import)

    if json:
        return study_tables.QuietStudy()
    if console.is_terminal:
        return study_tables.LiveStudy(console)
    return study_tables.PlainStudy(console, start.view.trials)


def _conclude(result: StudyResult, console: Console | None, *, is_interrupted: bool) -> int:
    from yunlu.render.study_report import dump_study  # noqa: PLC0415 (slow to import)
    from yunlu.render.terminal import study_tables  # noqa: PLC0415 (as above)

    view = result.view
    if console is None:
        print_json(dump_study(view))
    else:
        console.print()
        for line in study_tables.failure_lines(view):
            study_tables.print_block(console, line)
        study_tables.print_block(console, study_tables.answer_block(view, now=time.time()))
        if result.report is not None:
            label = padded_label("page", 8)
            print_lines(console, Text(f" {label}{result.report}", style="dim"), hang=9)
    if view.state == "stopped":
        text = f"{view.name} is stopped; resume with: yunlu tune --resume {view.name}"
        if console is None:
            print_note(text)
        else:
            console.print()
            print_lines(console, Text(f" {text}", style="yellow"))
        return STOPPED_CODE if is_interrupted else 0
    if view.best is None:
        raise error_of_code(
            "study",
            f"no trial of {view.name} came to a value ({len(view.trials)} made): {view.reason}",
            hint=f"yunlu study show {view.name} tells why",
        )
    return 0
