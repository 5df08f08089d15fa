"""``yunlu tune``: search for good settings of a job, and watch the search."""

from __future__ import annotations

import re
import signal
import sys
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from yunlu.client.api import source_of, validate
from yunlu.core.errors import JobError, YunluError
from yunlu.render.terminal.page import ACCENT, make_console, to_json
from yunlu.render.terminal.study_display import LiveStudy, PlainStudy, QuietStudy
from yunlu.render.terminal.study_tables import (
    answer_block,
    failure_lines,
    forecast_block,
    print_block,
)
from yunlu.tuning.study_dir import StudyError

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from yunlu.render.terminal.study_display import Watch
    from yunlu.spec.job import Job
    from yunlu.tuning.conducting.places import Places
    from yunlu.tuning.study import Study
    from yunlu.tuning.view import StudyView

RESTS_CODE = 130
"""What a shell gives a program that Ctrl-C ended."""

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
    """Search for good settings of a job: many trials, each trained as far as it is worth.

    The job's `search` says which fields vary. Ctrl-C lets the study rest; the same command goes on.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        trials: The most trials.
        budget: The most that all of them may cost, in dollars.
        deadline: The longest that the study may take: 90min, 36h, 1d 12h.
        parallel: How many trials may train at once.
        devices: Devices that all trials share.
        method: How settings are found: auto, grid, random, sobol, tpe, gp, cmaes, nsga2, frontier.
        stop: When trials are given up early: auto, none, median, asha, hyperband, patience, pbt.
        metric: What to make good: loss, or a metric of the task.
        name: Name the study.
        overrides: Change the job: --set train.epochs=3; may be repeated.
        proxy: Search on a narrow copy of the model, and carry the best over (µP).
        resume: Go on with the study of this name, instead of a job.
        plan: Tell what the study would take, and start nothing.
        json: Print one JSON document at the end, and nothing else.
    """
    limits = {"trials": trials, "budget": budget, "deadline": deadline, "parallel": parallel}
    fields = {"devices": devices, "method": method, "stop": stop, "metric": metric}
    if resume is not None:
        if job is not None or overrides or proxy or name or method or stop or metric or plan:
            raise JobError(
                "--resume names a study that has its job and its search already.",
                hint="with it go only --trials, --budget, --deadline, --parallel, --devices, --json",
            )
        study = _reopen(resume, limits, devices)
    elif job is None:
        raise JobError("There is nothing to tune.", hint="name a job file: yunlu tune job.yaml")
    else:
        asked = _read_job(job, overrides, {**limits, **fields, "proxy": proxy or None})
        if plan:
            return _only_foretell(asked, name, json=json)
        study = _open(asked, job, name, overrides)
    return _search(study, json=json)


def _read_job(job: str, overrides: tuple[str, ...], options: dict[str, Any]) -> Job:
    said = [f"search.{key}={_word(value)}" for key, value in options.items() if value is not None]
    # In this order: --set search={...} --stop median --set search.stop.trials=3.
    whole = [each for each in overrides if each.startswith("search=")]
    inside = [each for each in overrides if each.startswith("search.")]
    plain = validate(job, overrides=[each for each in overrides if each not in inside])
    if plain.search is None and not inside:
        raise JobError(
            f"{job} has no search section: nothing in it varies.",
            hint="add one, such as: search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}}",
        )
    others = [each for each in overrides if each not in whole]
    try:
        asked = validate(job, overrides=[*whole, *said, *others])
    except JobError as error:
        raise _in_own_words(error, options) from None
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", getattr(source_of(job), "stem", "")).strip("-._")
    return asked if asked.name or not stem else asked.model_copy(update={"name": stem[:28]})


def _in_own_words(error: JobError, options: dict[str, Any]) -> JobError:
    """The fault of an option is told by the option's name."""
    message = error.message
    for key in (key for key, value in options.items() if value is not None):
        message = message.replace(f"--set search.{key}:", f"--{key}:")
    return JobError(message, hint=error.hint)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _open(job: Job, source: str, name: str | None, said: tuple[str, ...]) -> Study:
    # Optuna is slow to import: whoever only misspelt an option need not wait for it.
    from yunlu.tuning.founding import open_or_create  # noqa: PLC0415
    from yunlu.tuning.study import Study  # noqa: PLC0415

    records = open_or_create(job, name=name, source=source, said=said)
    return Study(name=records.asked.name)


def _reopen(name: str, limits: dict[str, Any], devices: int | None) -> Study:
    from yunlu.tuning.founding import find_limits, with_search  # noqa: PLC0415 (as above)
    from yunlu.tuning.study import Study  # noqa: PLC0415

    study = Study(name=name)
    view, asked = study.view(), study.records.asked
    said = {
        key: value for key, value in {**limits, "devices": devices}.items() if value is not None
    }
    if asked.job is None or asked.job.search is None or view.is_told:
        raise StudyError(
            f"the trials of {view.name} are carried out by a program of your own",
            hint=f"in that program yunlu.Study(name={view.name!r}) goes on: ask, or optimize(function)",
        )
    if view.state == "finished" and not said:
        raise StudyError(
            f"{view.name} is finished: {view.reason}",
            hint=f"yunlu tune --resume {view.name} --trials N goes on with more of them",
        )
    if said:
        search = with_search(asked.job, None, said).search
        assert search is not None
        wanted = {key: value for key, value in find_limits(search).items() if value is not None}
        study.records.change(**wanted)
    return study


def _search(study: Study, *, json: bool) -> int:
    from yunlu.tuning.conducting.places import find_places  # noqa: PLC0415 (looks for a pool)

    console = make_console()
    places = find_places(devices=study.records.asked.devices)
    if not study.trials:
        with _measuring(console, json=json):
            study.foretell(places=places)
    if not json:
        _print_head(console, study.view(), places)
        _print_doubts(console, study)
    watch = _open_watch(console, study, json=json)
    presses: list[int] = []
    try:
        with _counted_signals(presses, watch):
            study.optimize(
                places=places, on_change=watch.show, is_asked_to_stop=lambda: bool(presses)
            )
    except YunluError:
        watch.close()
        _write_reports(study.view())
        raise
    finally:
        watch.close()
    return _conclude(study.view(), None if json else console, asked=bool(presses))


def _only_foretell(job: Job, name: str | None, *, json: bool) -> int:
    from yunlu.tuning.conducting.places import find_places  # noqa: PLC0415 (as above)
    from yunlu.tuning.forecast import foretell_study  # noqa: PLC0415 (as above)
    from yunlu.tuning.founding import prepare_study  # noqa: PLC0415 (as above)

    console = make_console()
    with _measuring(console, json=json):
        asked = prepare_study(job, name=name)
        places = find_places(devices=asked.devices)
        told = foretell_study(asked, devices=places.devices).model_dump(mode="json")
    if json:
        print(to_json({"study": asked.name, "rungs": asked.rungs, "forecast": told}))
        return 0
    _print_title(console, asked.name, len(asked.fields), places)
    print_block(console, forecast_block(told))
    return 0


def _measuring(console: Console, *, json: bool) -> AbstractContextManager[object]:
    """Where nothing is known of the machine or the model, a worker measures them: that takes a moment."""
    is_seen = console.is_terminal and not json
    return console.status("looking at one training") if is_seen else nullcontext()


def _print_head(console: Console, view: StudyView, places: Places) -> None:
    _print_title(console, view.name, len(view.dimensions), places)
    if view.trials:
        console.print(f" goes on after {len(view.trials)} trials", style="dim")
    elif view.forecast:
        print_block(console, forecast_block(view.forecast))
    console.print()


def _print_title(console: Console, name: str, dimensions: int, places: Places) -> None:
    counts = {"dimension": dimensions, "device": places.devices}
    about = ", ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
    console.print(f"\n [bold {ACCENT}]云炉[/]  [bold]{name}[/]  [dim]{about}[/]\n")


def _print_doubts(console: Console, study: Study) -> None:
    """What a search on a proxy may not tell of its target."""
    job = study.records.asked.job
    if job is None or job.search is None or not job.search.proxy:
        return
    from yunlu.tuning.proxy import find_doubts  # noqa: PLC0415 (used by few)

    for doubt in find_doubts(job.search.space):
        console.print(Text(f" {doubt}", style="yellow"))


def _open_watch(console: Console, study: Study, *, json: bool) -> Watch:
    if json:
        return QuietStudy()
    return LiveStudy(console) if console.is_terminal else PlainStudy(console, study.trials)


@contextmanager
def _counted_signals(presses: list[int], watch: Watch) -> Generator[None]:
    """The first Ctrl-C asks the study to rest; the second ends the command, and trials go on alone."""

    def count(number: int, _frame: Any) -> None:
        presses.append(number)
        if len(presses) > 1:
            raise KeyboardInterrupt
        watch.note("resting: trials save and hold (again to leave them)")

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, reaction in before.items():
            signal.signal(number, reaction)


def _conclude(view: StudyView, console: Console | None, *, asked: bool) -> int:
    page = _write_reports(view)
    if console is None:
        from yunlu.render.study_report.dump import dump_study  # noqa: PLC0415 (needed only here)

        print(to_json(dump_study(view)))
    else:
        console.print()
        for line in failure_lines(view):
            print_block(console, line)
        print_block(console, answer_block(view, now=time.time()))
        if page is not None:
            console.print(f" page    {page}", style="dim", soft_wrap=True)
    if view.state == "stopped":
        words = f"{view.name} rests; go on with: yunlu tune --resume {view.name}"
        if console is None:
            sys.stderr.write(f"{words}\n")
        else:
            console.print(Text(f"\n {words}", style="yellow"))
        return RESTS_CODE if asked else 0
    if view.best is None:
        raise StudyError(
            f"no trial of {view.name} came to a value ({len(view.trials)} made): {view.reason}",
            hint=f"yunlu study show {view.name} tells why",
        )
    return 0


def _write_reports(view: StudyView) -> Any:
    """The page of the study and those of its runs; the study is worth more than they are."""
    from yunlu.render.study_report.page import write_report, write_run_reports  # noqa: PLC0415 (slow)

    with suppress(OSError, YunluError):
        write_run_reports(view)
        return write_report(view)
    return None
