"""The calls: train, finetune, plan, submit, resume, and the runs they make."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from yunlu.core.errors import JobError, StoreError, missing_part
from yunlu.jobs import service
from yunlu.jobs.job_input import build_job, merge, plain, read_options
from yunlu.jobs.follow import end_of, follow
from yunlu.jobs.launch import find_launch, see_through
from yunlu.jobs.run import error_of, move
from yunlu.jobs.base_model import BaseModel, find_base_model
from yunlu.planning.plan import Plan
from yunlu.runs.events import Evaluated, Event
from yunlu.runs.home import open_run
from yunlu.runs.states import RunState
from yunlu.scheduler.control import is_queued_again
from yunlu.scheduler.queue import enqueue, read_options, withdraw
from yunlu.spec.job import Job, ModelSpec
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.search.options import PlanOptions
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.goal import GoalSpec

_LIVE_TASK = "yunlu.training.tasks.python_objects"
_WORKER = "yunlu.training.worker"


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run, looked at from outside: every property reads what its files say now."""

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
        """Where it stands."""
        return service.read_record(self._files).state

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
        """What was decided and foretold, once it is."""
        path = self._files.plan
        return Plan.model_validate_json(path.read_bytes()) if path.exists() else None

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until it rests; raise the worker's error if it failed or was lost."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in follow(self._files, since=end_of(self._files)):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} did not rest within {timeout_s:g} s")
        if self.state in {RunState.FAILED, RunState.LOST}:
            raise error_of(self.events()) or StoreError(f"{self.id} is {self.state}")
        return self

    def stop(self, *, now: bool = False) -> Run:
        """Ask it to save and stop, and wait; ``now`` ends it without saving."""
        withdraw(self._files)  # else the pool would go on with it
        service.stop(self._files, now=now)
        return self

    def resume(self, *, wait: bool = True) -> Run:
        """Give it another life, from its newest good checkpoint; in the pool, if it came from there."""
        if not is_queued_again(self._files):
            service.resume(self._files)
        return self.wait() if wait else self

    def events(self) -> list[Event]:
        """All that happened, in order."""
        return [event for event, _ in self._files.read_events()]

    def history(self) -> list[dict[str, Any]]:
        """One record per step; a step that a resumed life did again stands once."""
        from yunlu.jobs.run_log import read_run_log  # noqa: PLC0415 (used by few)

        return list(read_run_log(self._files).records)

    def report(self) -> Path:
        """Write the report, and say where the page is."""
        from yunlu.render.run_report.write import write_report  # noqa: PLC0415 (used by few)

        write_report(self._files)
        return self._files.report_html

    @property
    def _files(self) -> RunStore:
        return open_run(self.dir)


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
    wait: bool = True,
    **train_options: Any,
) -> Run:
    """Train a job and return its run.

    Args:
        job: A job file or a ``Job``. Without it, say ``model``, ``data`` and ``task``.
        model: A name as in a job file, or a model object, which is trained in this process.
        data: A path or name as in a job file; with a model object, the samples themselves.
        loss: With a model object: what to minimise.
        metrics: With a model object: what else to measure.
        task: The task's name.
        overrides: ``a.b=c``, as with ``--set``.
        name: Names the run.
        devices: Workers that share the training, one for each device.
        wait: Return when the run rests (and raise if it failed), or at once.
        train_options: Keys of the job's ``train`` part, such as ``epochs=3``; ``lr`` is the
            optimiser's.
    """
    if _is_live(model):
        if job is not None or task is not None or overrides:
            raise JobError(
                "a model object brings its own task: job, task and overrides do not go with it"
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
        made = _live_job(model, name, train_options)
        run = service.submit(made)
        return _train_here(run, live)
    parts = {"model": model, "data": data, "task": task, "name": name, "devices": devices}
    asked = build_job(job, overrides, train_options, **parts)
    return _train_elsewhere(asked, source_of(job), wait=wait)


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
    **train_options: Any,
) -> Run:
    """Go on from a trained model with other data, and return the new run.

    Args:
        start: A run or its id, a model directory, or ``hf:NAME``. Its model, tokenizer and
            whatever else its weights depend on are taken over.
        job: A job file, where ``model`` may be left out, or a ``Job``. Without it, say ``data``.
        data: A path or name as in a job file.
        task: The task's name; the start's own when not said.
        adapter: ``"lora"``, or a mapping with its rank and targets; without it every weight is trained.
        overrides: ``a.b=c``, as with ``--set``.
        name: Names the run.
        devices: Workers that share the training, one for each device.
        wait: Return when the run rests (and raise if it failed), or at once.
        train_options: Keys of the job's ``train`` part, as with ``train``.
    """
    parts = {"data": data, "task": task, "name": name, "devices": devices}
    asked = finetuning_job(start, job, overrides, train_options, adapter=adapter, **parts)
    return _train_elsewhere(asked, source_of(job), wait=wait)


def finetuning_job(
    start: str | Path | Run,
    job: str | Path | Job | None = None,
    overrides: Sequence[str] = (),
    train_options: Mapping[str, Any] = {},
    *,
    adapter: Any = None,
    **parts: Any,
) -> Job:
    """The whole job that fine-tuning a start amounts to."""
    begun = find_base_model(start.dir if isinstance(start, Run) else start)
    options = read_options(train_options)
    if isinstance(job, str | Path):
        job = _load_without_model(job, begun, overrides)
    elif overrides:
        raise JobError("overrides go with a job file; say the values as arguments instead")
    mapping = {} if job is None else job.model_dump(mode="json", exclude_unset=True)
    mapping |= {key: plain(value) for key, value in parts.items() if value is not None}
    if begun.task is not None:
        mapping.setdefault("task", begun.task)
    said = mapping.get("model", {})
    mapping["model"] = begun.choose_model(
        said if adapter is None else {**said, "adapter": plain(adapter)}
    )
    if options:
        mapping["train"] = merge(mapping.get("train") or {}, options)
    return begun.complete(job_from_mapping(mapping, where="finetune()" if job is None else "job"))


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
    """Foretell without training: on what a job could run, how, and what it would take.

    Args:
        job: A job file or a ``Job``. Without it, say ``model``, ``data`` and ``task``.
        top: How many options to return.
        goal: Keys of the job's ``goal`` part: ``{"budget": 50, "deadline": "36h", "gpu": "H100"}``.
        measure: Instead let a worker measure the job on this machine, and return its ``Plan``.
        model: A name as in a job file.
        data: A path or name as in a job file.
        task: The task's name.
        overrides: ``a.b=c``, as with ``--set``.
        devices: Workers that share the training, one for each device.
        train_options: Keys of the job's ``train`` part, as with ``train``.
    """
    if _is_live(model):
        raise JobError("a model object cannot be planned apart from training it: use yunlu.train")
    parts = {"model": model, "data": data, "task": task, "devices": devices}
    asked = build_job(job, overrides, train_options, **parts)
    if goal is not None:
        said = {**asked.goal.model_dump(mode="json"), **plain(goal)}
        asked = job_from_mapping({**asked.model_dump(mode="json"), "goal": said})
    if measure:
        return service.make_plan(asked)
    from yunlu.jobs.outlook import foresee  # noqa: PLC0415 (arrays are slow to import)

    return foresee(asked, top=top)


def validate(job: str | Path | Job, *, overrides: Sequence[str] = ()) -> Job:
    """The job, if it is valid; else an error that names every fault."""
    return build_job(job, overrides, {})


def runs() -> list[Run]:
    """All runs, newest first."""
    home = service.home()
    return [Run(home / record.id) for record in service.list_runs()]


def load_run(run_id: str) -> Run:
    """The run with this id, a unique beginning of it, or the ``last`` one."""
    return Run(Path(service.find(run_id).address))


def resume(
    run_id: str,
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    wait: bool = True,
) -> Run:
    """Give a stopped, failed or lost run another life.

    A run of live objects needs the same objects again.
    """
    if model is not None:
        run = service.find(run_id)
        live = _live_task(model=model, data=data, loss=loss, metrics=metrics)
        service.reopen_here(run)
        return _train_here(run, live)
    if (place := find_launch(waits=wait)) is not None:
        return Run(Path(see_through(service.find(run_id), place).address)).wait()
    return Run(Path(service.find(run_id).address)).resume(wait=wait)


def submit(
    job: str | Path | Job,
    *,
    overrides: Sequence[str] = (),
    priority: int = 0,
    team: str = "",
    min_devices: int | None = None,
    max_devices: int | None = None,
    deadline: str | None = None,
    budget: float | None = None,
) -> Run:
    """Queue a job for the pool, and return; it starts when a pool is up and it is its turn.

    Args:
        job: A file or a job.
        overrides: Changes, as after ``--set``.
        priority: Higher goes first.
        team: Whose devices it uses.
        min_devices: It does not start on fewer.
        max_devices: It is never given more.
        deadline: When it should be done: ``90min``, ``36h``, ``1d 12h`` from now.
        budget: What it may cost, in dollars; it is paused when that is spent.
    """
    asked = read_options(
        priority=priority,
        team=team,
        min_devices=min_devices,
        max_devices=max_devices,
        deadline=deadline,
        budget_dollars=budget,
    )
    run = enqueue(validate(job, overrides=overrides), asked, source=source_of(job))
    return Run(Path(run.address))


def source_of(job: str | Path | Job | None) -> Path | None:
    """The file a job came from; ``jobs.py:name`` names one inside a file."""
    if job is None or isinstance(job, Job):
        return None
    return Path(re.sub(r"(?<=\.py):\w+$", "", str(job)))


def _is_live(model: Any) -> bool:
    return model is not None and not isinstance(model, str | Path | Mapping | ModelSpec)


def _load_without_model(job: str | Path, begun: BaseModel, overrides: Sequence[str]) -> Job:
    """The job of a file that may leave its model to the start."""
    try:
        return load_job(job, overrides=overrides)
    except InvalidJobError:  # if it lacked a name only, this is its cure; else it is told again
        own = f"model.name={json.dumps(begun.model.name)}"
        return load_job(job, overrides=(own, *overrides))


def _live_job(model: Any, name: str | None, train_options: Mapping[str, Any]) -> Job:
    kind = type(model).__name__
    mapping = {
        "name": name,
        "task": service.IN_PROCESS,
        "model": {"name": kind},
        "data": {"train": service.IN_PROCESS},
        "train": read_options(train_options),
        "devices": 1,
    }
    job = job_from_mapping(mapping, where="train()")
    return job if name else job.model_copy(update={"name": kind.lower()})


def _live_task(**parts: Any) -> Any:
    try:
        objects = import_module(_LIVE_TASK)
    except ModuleNotFoundError as error:
        raise missing_part(error.name or "torch", "train", "Training in this process") from error
    return objects.ObjectTask(**parts)


def _train_elsewhere(job: Job, source: Path | None, *, wait: bool) -> Run:
    if (place := find_launch(job, waits=wait)) is not None:
        return Run(see_through(job, place, source=source).path).wait()
    store = service.submit(job, source=source)
    service.start(store)
    run = Run(Path(store.address))
    return run.wait() if wait else run


def _train_here(run: RunStore, live: Any) -> Run:
    try:
        import_module(_WORKER).run(run.address, task=live)
    finally:
        record = service.read_record(run)
        if record.state.is_active:  # an interrupt came between two of its own words
            move(run, record, RunState.STOPPED, reason="interrupted")
    return Run(Path(run.address)).wait()
