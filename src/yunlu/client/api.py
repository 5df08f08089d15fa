"""The public calls: train, finetune, plan, submit, resume, and the runs they return."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from yunlu.client import default_client
from yunlu.client.watching import watch, watch_here
from yunlu.core.errors import JobError, StoreError, missing_part
from yunlu.core.settings import read_settings
from yunlu.jobs import lifecycle
from yunlu.jobs.job_input import (
    build_job,
    find_model_directory,
    finetuning_job,
    plain,
    read_options,
)
from yunlu.jobs.launch import find_launch, train_to_end
from yunlu.jobs.run import move
from yunlu.jobs.run_log import MetricRecord
from yunlu.jobs.submitted_plan import resolve_plan
from yunlu.runs.events import Evaluated, RunEvent
from yunlu.runs.home import open_if_run, open_run
from yunlu.runs.run_store import Document, read_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job, ModelSpec
from yunlu.spec.load import job_from_mapping, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.jobs.run_log import LogCursor
    from yunlu.planning.plan import Plan
    from yunlu.planning.search.options import PlanOptions
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import GoalSpec
    from yunlu.training.export import LoadedModel

_LIVE_TASK = "yunlu.training.tasks.python_objects"
_WORKER = "yunlu.training.worker"
_LOADING = "yunlu.training.export"
_CALLBACKS = "yunlu.training.hooks.callback"


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run, seen from outside: every property reads its current state."""

    dir: Path
    """Its directory: events, metrics, checkpoints, model, report."""

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {self.state})"

    @property
    def id(self) -> str:
        """Its name in the store."""
        return self.dir.name

    @property
    def state(self) -> RunState:
        """State of the run: pending, planning, running, ..."""
        return default_client().run(str(self.dir)).state

    @property
    def metrics(self) -> dict[str, float]:
        """The final evaluation: on the test data where there is some, else on the validation data."""
        scored = [event for event in self.events() if isinstance(event, Evaluated)]
        tested = [event for event in scored if event.split == "test"] or scored
        if not tested:
            return {}
        return {"loss": tested[-1].loss, **tested[-1].metrics}

    @property
    def plan(self) -> Plan | None:
        """Decisions and predictions, once they are made."""
        return default_client().show(str(self.dir)).plan

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until it is no longer active; raise the worker's error if it failed or was lost."""
        client, run = default_client(), str(self.dir)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in client.follow(run, since=client.events(run).cursor):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is still active after {timeout_s:g} s")
        if (state := self.state).is_failure:
            failure = client.failure(run)
            raise failure.to_error() if failure else StoreError(f"{self.id} is {state}")
        return self

    def stop(self, *, now: bool = False) -> Run:
        """Save a checkpoint and stop, and wait for that; ``now``: without saving."""
        default_client().stop(str(self.dir), now=now)
        return self

    def resume(self, *, wait: bool = True) -> Run:
        """Continue from its newest good checkpoint; in the pool, if it came from there."""
        default_client().resume(str(self.dir), detach=not wait)
        return self.wait() if wait else self

    def events(self) -> list[Event]:
        """All events so far."""
        items = default_client().events(str(self.dir)).items
        return [item for item in items if isinstance(item, RunEvent)]

    def history(self) -> list[dict[str, Any]]:
        """One record per step; a step that a later attempt repeated appears once."""
        from yunlu.jobs.logged_steps import read_run_log  # noqa: PLC0415 (used by few)

        log = read_run_log(open_run(self.dir))
        return [record for batch in log.batches() for record in batch.records()]

    def load(self) -> LoadedModel:
        """Load the model that it exported, to predict with it."""
        return load_model(self.dir)

    def report(self) -> Path:
        """Write the report, and return the path of the page; as the last line of a cell it is shown."""
        default_client().report(str(self.dir))
        return ReportPath(self.dir / Document.REPORT_PAGE)

    def _repr_html_(self) -> str:
        """State, curves, evaluations and plan, for a notebook."""
        from yunlu.render.notebook import NotebookView  # noqa: PLC0415 (slow to import)

        store = open_run(self.dir)
        view = NotebookView(self.id).take_all(event for event, _ in store.read_events())
        view.take_all(MetricRecord(record={**record}) for record, _ in store.read_metrics())
        return view.to_html()


class ReportPath(type(Path())):
    """Path of a report; a notebook shows the page itself."""

    def _repr_html_(self) -> str | None:
        if not self.is_file():  # a path beside it is none of ours
            return None
        page = escape(self.read_text(encoding="utf-8"), quote=True)
        # Sandboxed: the page may run its own script, but belongs to no site and reaches none.
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" loading="lazy" title="{escape(self.parent.name)}" '
            'style="width:100%;height:720px;border:1px solid rgb(128 128 128 / 40%);border-radius:8px">'
            "</iframe>"
        )


def train(
    job: str | Path | Job | None = None,
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    devices: int | None = None,
    plan: Plan | None = None,
    callbacks: Sequence[Any] = (),
    wait: bool = True,
    progress: bool = True,
    **train_options: Any,
) -> Run:
    """Train a job and return its run.

    Plan, progress, evaluations and result are shown: in a notebook as a live block, in a script on
    standard error.

    Args:
        job: A job file or a ``Job``. Without it, say ``model``, ``data`` and ``task``.
        model: A name as in a job file, or a model object, which is trained in this process.
        data: A path or name as in a job file; with a model object, the samples themselves.
        loss: With a model object: what to minimise.
        metrics: Your own: a function of all outputs and targets of an evaluation, as arrays; with a
            model object itself, or functions of a batch by name; else as ``module:function``.
        task: The task's name.
        overrides: ``a.b=c``, as with ``--set``.
        name: Name of the run.
        devices: Number of workers, one for each device.
        plan: A plan that ``yunlu.plan`` returned: its choices are pinned.
        callbacks: Called as the run trains: names as in a job file; with a model object also objects.
        wait: Return when the run is no longer active (and raise if it failed), or at once.
        progress: Show the run while this call waits for it.
        train_options: Keys of the job's ``train`` part, such as ``epochs=3``; ``lr`` is the
            optimiser's.
    """
    if _is_live(model):
        if job is not None or task is not None or overrides or plan is not None:
            raise JobError(
                "a model object brings its own task: job, task, overrides and plan do not go with it"
            )
        if devices not in {None, 1} or find_launch() is not None:
            raise JobError(
                "a model object is trained in this process, on one device",
                hint="for several, put the model in a module: model='module:Class'",
            )
        if not wait:
            raise JobError(
                "a model object is trained in this process, which therefore waits",
                hint="for a run in the background, put the model in a module: model='module:Class'",
            )
        live = _live_task(model=model, data=data, loss=loss, metrics=metrics)
        objects = _live_callbacks(callbacks)
        made = _live_job(model, name, train_options)
        run = lifecycle.submit(made)
        return _train_here(run, live, callbacks=objects, progress=progress)
    parts = {"model": model, "data": data, "task": task, "name": name, "devices": devices}
    parts |= {
        "callbacks": _by_name(callbacks, "callbacks", "module:Class"),
        "metrics": _by_name(metrics, "metrics", "module:function"),
    }
    built = build_job(job, overrides, train_options, **parts)
    return _train_elsewhere(built, source_of(job), plan=plan, wait=wait, progress=progress)


def finetune(
    start: str | Path | Run,
    job: str | Path | Job | None = None,
    *,
    data: Any = None,
    task: str | None = None,
    adapter: Any = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    devices: int | None = None,
    wait: bool = True,
    progress: bool = True,
    **train_options: Any,
) -> Run:
    """Fine-tune a trained model on other data, and return the new run.

    Args:
        start: A run or its id, a model directory, or ``hf:NAME``. Its model, tokenizer and
            whatever else its weights depend on are taken over.
        job: A job file, where ``model`` may be left out, or a ``Job``. Without it, say ``data``.
        data: A path or name as in a job file.
        task: Name of the task; that of the trained model when not given.
        adapter: ``"lora"``, or a mapping with its rank and targets; without it every weight is trained.
        overrides: ``a.b=c``, as with ``--set``.
        name: Name of the run.
        devices: Number of workers, one for each device.
        wait: Return when the run is no longer active (and raise if it failed), or at once.
        progress: Show the run while this call waits for it.
        train_options: Keys of the job's ``train`` part, as with ``train``.
    """
    parts = {"data": data, "task": task, "name": name, "devices": devices}
    base = start.dir if isinstance(start, Run) else start
    whole = finetuning_job(base, job, overrides, train_options, adapter=adapter, **parts)
    return _train_elsewhere(whole, source_of(job), wait=wait, progress=progress)


@overload
def plan(job: str | Path | Job | None = ..., *, measure: Literal[True], **parts: Any) -> Plan: ...
@overload
def plan(
    job: str | Path | Job | None = ...,
    *,
    top: int = ...,
    goal: GoalSpec | Mapping[str, Any] | None = ...,
    measure: Literal[False] = ...,
    **parts: Any,
) -> PlanOptions: ...
def plan(
    job: str | Path | Job | None = None,
    *,
    top: int = 3,
    goal: GoalSpec | Mapping[str, Any] | None = None,
    measure: bool = False,
    model: Any = None,
    data: Any = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    **train_options: Any,
) -> PlanOptions | Plan:
    """Predict without training: hardware and layouts a job could run on, with time and cost.

    Args:
        job: A job file or a ``Job``. Without it, say ``model``, ``data`` and ``task``.
        top: Number of options to return.
        goal: Keys of the job's ``goal`` part: ``{"budget": 50, "deadline": "36h", "gpu": "H100"}``.
        measure: Instead let a worker measure the job on this machine, and return its ``Plan``.
        model: A name as in a job file.
        data: A path or name as in a job file.
        task: The task's name.
        overrides: ``a.b=c``, as with ``--set``.
        devices: Number of workers, one for each device.
        train_options: Keys of the job's ``train`` part, as with ``train``.
    """
    if _is_live(model):
        raise JobError("a model object cannot be planned apart from training it: use yunlu.train")
    parts = {"model": model, "data": data, "task": task, "devices": devices}
    built = build_job(job, overrides, train_options, **parts)
    if goal is not None:
        changed = {**built.goal.model_dump(mode="json"), **plain(goal)}
        built = job_from_mapping({**built.model_dump(mode="json"), "goal": changed})
    client = default_client()
    return client.measure(built) if measure else client.plan(built, top=top).options


def validate(job: str | Path | Job, *, overrides: Sequence[str] = ()) -> Job:
    """The job, if it is valid; else an error that names every problem."""
    return build_job(job, overrides, {})


def list_runs() -> list[Run]:
    """All runs, newest first."""
    return [Run(Path(run.dir)) for run in default_client().ps().runs]


def load_run(run_id: str) -> Run:
    """The run with this id, a unique prefix of it, or the ``last`` one."""
    return Run(Path(default_client().run(run_id).dir))


def load_model(run: str | Path | Run, *, trust_code: bool = False) -> LoadedModel:
    """Load a trained model, to predict with it.

    Args:
        run: The run, its id, a unique prefix of it or ``last``; or the path of an exported model.
        trust_code: Import a task or model class that a directory from elsewhere names; that of your
            own runs is imported in any case.
    """
    directory = find_model_directory(run.dir if isinstance(run, Run) else run)
    try:
        loading = import_module(_LOADING)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_part("torch", "train", "Predicting") from error
    return loading.load_model(directory, trust_code=trust_code or _is_own(directory))


def resume(
    run_id: str,
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    callbacks: Sequence[Any] = (),
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Start another attempt at a stopped, failed or lost run.

    A run of live objects needs the same objects again.
    """
    run = load_run(run_id)
    if model is not None:
        store = open_run(run.dir)
        live = _live_task(model=model, data=data, loss=loss, metrics=metrics)
        objects = _live_callbacks(callbacks)
        lifecycle.reopen(store)
        return _train_here(store, live, callbacks=objects, progress=progress)
    if metrics is not None or callbacks:
        raise JobError(
            "metrics and callbacks of a resumed run are those of its job",
            hint="leave them out; with a model object they are given again",
        )
    if (launch := find_launch(waits=wait)) is not None:
        watching = partial(_watch_launched, progress=progress)
        return _as_run(train_to_end(open_run(run.dir), launch, watch=watching)).wait()
    started = default_client().resume(str(run.dir), detach=not wait)
    if wait:
        watch(
            started.dir,
            title=started.task,
            since=started.cursor,
            progress=progress and not started.is_queued,
        )
        return run.wait()
    return run


def submit(
    job: str | Path | Job,
    *,
    overrides: Sequence[str] = (),
    plan: Plan | None = None,
    priority: int = 0,
    team: str = "",
    min_devices: int | None = None,
    max_devices: int | None = None,
    deadline: str | None = None,
    budget: float | None = None,
    rehearse: bool = True,
) -> Run:
    """Queue a job for the pool, and return; the pool starts it in its turn.

    Args:
        job: A file or a job.
        overrides: Changes, as after ``--set``.
        plan: A plan that ``yunlu.plan`` returned: its choices are pinned.
        priority: Higher goes first.
        team: Team whose quota it uses.
        min_devices: Fewest devices it starts on.
        max_devices: Most devices it is given.
        deadline: When it should be finished: ``90min``, ``36h``, ``1d 12h`` from now.
        budget: Most it may cost, in dollars; it is paused when that is spent.
        rehearse: Before a pool on other machines gets it, run a step on fake tensors, to find its errors.
    """
    queued = default_client().submit(
        validate(job, overrides=overrides),
        source=source_of(job),
        plan=plan,
        priority=priority,
        team=team,
        min_devices=min_devices,
        max_devices=max_devices,
        deadline=deadline,
        budget=budget,
        rehearse=rehearse,
    )
    return Run(Path(queued.dir))


def _is_live(model: Any) -> bool:
    return model is not None and not isinstance(model, str | Path | Mapping | ModelSpec)


def _live_job(model: Any, name: str | None, train_options: Mapping[str, Any]) -> Job:
    kind = type(model).__name__
    mapping = {
        "name": name,
        "task": lifecycle.IN_PROCESS,
        "model": {"name": kind},
        "data": {"train": lifecycle.IN_PROCESS},
        "train": read_options(train_options),
        "devices": 1,
    }
    job = job_from_mapping(mapping, where="train()")
    return job if name else job.model_copy(update={"name": kind.lower()})


def _live_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Checked before anything is trained."""
    return import_module(_CALLBACKS).open_callbacks(callbacks)


def _by_name(given: Any, key: str, form: str) -> list[str] | None:
    """Names for a job: it goes to another process, which imports them."""
    if given is None or (key == "callbacks" and not given):
        return None
    names = [given] if isinstance(given, str) or not isinstance(given, list | tuple) else given
    for name in names:
        if not isinstance(name, str):
            shown = getattr(name, "__name__", type(name).__name__)
            raise JobError(
                f"{key}: {shown} is an object; a job is trained in a process of its own, which imports "
                "what it calls",
                hint=f"put it in a module and name it: {key}=['{form}']",
            )
    return list(names)


def _live_task(**parts: Any) -> Any:
    try:
        objects = import_module(_LIVE_TASK)
    except ModuleNotFoundError as error:
        raise missing_part(error.name or "torch", "train", "Training in this process") from error
    return objects.ObjectTask(**parts)


def _train_elsewhere(
    job: Job, source: Path | None, *, plan: Plan | None = None, wait: bool, progress: bool
) -> Run:
    if (launch := find_launch(job, waits=wait)) is not None:
        pinned, submitted = (job, None) if launch.rank else resolve_plan(job, plan)
        watching = partial(_watch_launched, progress=progress)
        run = train_to_end(pinned, launch, source=source, plan=submitted, watch=watching)
        return _as_run(run).wait()
    started = default_client().train(job, source=source, plan=plan, detach=not wait)
    run = Run(Path(started.dir))
    if not wait:
        return run
    watch(started.dir, title=started.task, since=started.cursor, progress=progress)
    return run.wait()


def _watch_launched(store: RunStore, since: LogCursor, *, progress: bool) -> None:
    watch(store.address, title=read_job(store).task, since=since, progress=progress)


def _train_here(store: RunStore, live: Any, *, callbacks: Sequence[Any], progress: bool) -> Run:
    with watch_here(store.address, title="in this process", progress=progress):
        _run_worker(store, live, callbacks)
    return _as_run(store).wait()


def _run_worker(store: RunStore, live: Any, callbacks: Sequence[Any]) -> None:
    try:
        import_module(_WORKER).run(store.address, task=live, callbacks=callbacks)
    finally:
        record = lifecycle.read_record(store)
        if record.state.is_active:  # an interrupt came between two of its events
            move(store, record, RunState.STOPPED, reason="interrupted")


def _is_own(model: Path) -> bool:
    """Whether a run of ours in our home exported the model: its job is ours too."""
    store = open_if_run(model.parent)
    is_home = model.is_relative_to(read_settings().home.absolute())
    return store is not None and is_home and not store.foreign_owner


def _as_run(store: RunStore) -> Run:
    return Run(Path(store.address))
