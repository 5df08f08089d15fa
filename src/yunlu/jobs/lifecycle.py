"""The life of a job: submit, start, stop, resume, find. Each move is one event of the run."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, TrainingError
from yunlu.core.settings import read_settings
from yunlu.executors.registry import executor_of, is_elsewhere, is_held, open_executor
from yunlu.executors.lease_record import read_record as read_leases
from yunlu.executors.worker_group import kill_workers
from yunlu.executors.worker_process import (
    WorkerProcess,
    count_gpus,
    is_asynchronous,
    launch_lock,
    program_for,
    record_worker,
    recorded_worker,
    require_training,
    start_worker,
    this_process,
    worker_lock_is_free,
)
from yunlu.jobs.run import (
    RunRecord,
    error_of,
    log_tail,
    move,
    new_record,
    settle,
    worker_of,
)
from yunlu.jobs.run_creation import create_run
from yunlu.runs.documents import not_a_run, read_job, read_plan, write_job
from yunlu.runs.fold import read_view
from yunlu.runs.home import find_runs, open_run, remove_stale, temporary_run
from yunlu.runs.run_store import Area, Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.executors.executor import Executor, ResizeResult
    from yunlu.hardware.fleet import Placement
    from yunlu.planning.plan import Plan
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

IN_PROCESS = "python:objects"
"""The task of a run made of live Python objects: only their own process can train it."""

_POLL_S = 0.1
_LEAVE_S = 10


def home() -> Path:
    """Where runs live."""
    return read_settings().home


def submit(job: Job, *, source: Path | None = None) -> RunStore:
    """Make the directory of a new run, pending; a half-made one never shows."""
    from yunlu.jobs.run_index import RunIndex  # noqa: PLC0415 (the database is slow to import)

    require_training()
    with RunIndex(home()) as store:  # opened first: a store that cannot be used takes no run
        remove_stale(store.home)
        try:
            run = create_run(job, source, store.home)
        except OSError as error:
            raise StoreError(f"the run cannot be written to {store.home}: {error}") from error
        store.refresh(run)
    return run


def start(
    run: RunStore,
    command: Sequence[str] | None = None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    """Start the worker of a pending run, or have an executor give it devices.

    Args:
        run: The run.
        command: Another program instead of the worker.
        own_session: As with ``start_worker``.
        on: Who gives it its devices; without a word, it takes those of this machine.
        placement: Which devices of the executor.
    """
    with _launching(run):
        record, worker = read_record(run), recorded_worker(run)
        is_started = worker is not None and worker.detached
        if not is_started and is_elsewhere(run):
            is_started = is_held(run)
        if record.state is not RunState.PENDING or is_started:
            raise StoreError(f"{run.id} was started before: it is {record.state}")
        if on is not None and record.task == IN_PROCESS:
            raise StoreError(
                f"{run.id} is made of live Python objects, which only their own process can train"
            )
        return _begin(run, command, own_session=own_session, on=on, placement=placement)


def resume(
    run: str | RunStore,
    *,
    command: Sequence[str] | None = None,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> RunStore:
    """Give a resting run another life, from its newest good checkpoint.

    A run that an executor gave its devices gets them from there again, if nothing else is said.
    """
    store = find(run) if isinstance(run, str) else run
    with _launching(store):
        _refuse_live(store)
        if on is None and command is None:
            on, placement = _last_place(store)
        _reopen(store)
        _begin(store, command, own_session=own_session, on=on, placement=placement)
    return store


def change_placement(run: RunStore, placement: Placement) -> ResizeResult:
    """Give a run that an executor started other devices, live where that can be.

    Where the answer is ``restart`` nothing has happened: stop it, and resume it with the placement.
    """
    executor = executor_of(run)
    if executor is None:
        raise StoreError(
            f"{run.id} was not started by an executor: nobody can give it other devices",
            hint=f"yunlu resize {run.id} --devices N",
        )
    return executor.resize(run, placement)


def reopen(run: RunStore) -> None:
    """Make a resting run pending again, to be trained by the process that asks."""
    with _launching(run):
        _reopen(run)


def request_stop(run: RunStore, *, now: bool = False) -> RunRecord:
    """Ask the worker to save and stop, or end it at once; does not wait for it."""
    with launch_lock(run, wait=True):
        record = read_record(run)
        if not record.state.is_active:
            return record
        executor = executor_of(run) if is_elsewhere(run) else None
        worker = None if executor else worker_of(run, record)
        if worker is not None and not worker.detached and record.state is RunState.PENDING:
            return move(run, record, RunState.STOPPED, reason="stopped before it was started")
        if worker is not None and not worker.detached and worker.is_alive():
            raise StoreError(
                f"{run.id} is trained inside the Python process {worker.pid}",
                hint="interrupt it there (Ctrl-C): it saves and stops",
            )
        # A worker that trains says itself that it is stopping; one that only starts may not yet
        # listen, and one that is killed says nothing.
        if record.state is not RunState.STOPPING and (now or record.state is not RunState.RUNNING):
            record = move(run, record, RunState.STOPPING, reason="asked to stop")
    if executor is not None:
        executor.stop(run, now=now)
        return record
    if worker is not None:
        _signal(worker, now=now)
    if now:  # after a takeover workers are not in the group of their supervisor
        kill_workers(run)
    return record


def stop(run: str | RunStore, *, now: bool = False) -> RunRecord:
    """Stop a run and wait until it rests. A run that rests already is left alone."""
    store = find(run) if isinstance(run, str) else run
    record = settle(store, request_stop(store, now=now))
    while record.state.is_active:
        time.sleep(_POLL_S)
        record = settle(store, record)
    return record


def find(text: str) -> RunStore:
    """The run with this id, a unique beginning of it, or the ``last`` one."""
    records = list_runs()
    if not records:
        raise StoreError(f"there are no runs in {home()}", hint="start one: yunlu train JOB")
    ids = [record.id for record in records]
    if text in {"last", "latest"}:
        return _open(ids[0])
    matches = [text] if text in ids else [run_id for run_id in ids if run_id.startswith(text)]
    if len(matches) == 1:
        return _open(matches[0])
    if matches:
        raise StoreError(
            f"{text!r} could be any of {len(matches)} runs: {_listing(matches)}",
            hint="give more letters of the id",
        )
    raise StoreError(f"there is no run {text!r}", hint=f"the newest are {_listing(ids)}")


def list_runs() -> list[RunRecord]:
    """All runs, newest first, as they stand now."""
    if not home().is_dir():
        return []
    from yunlu.jobs.run_index import FullDiskError, RunIndex  # noqa: PLC0415 (slow to import: a database)

    try:
        with RunIndex(home()) as store:
            return store.reconcile()
    except FullDiskError:
        # The index is a shortcut: on a full disk the runs still tell about themselves.
        every = [read_record(run) for run in find_runs(home(), having=Document.JOB)]
        return sorted(every, key=lambda record: record.created_at, reverse=True)


def read_record(run: RunStore) -> RunRecord:
    """Where one run stands now, read from its own events."""
    record = new_record(run)
    if record is None:
        raise not_a_run(run)
    return settle(run, record)


def make_plan(
    job: Job,
    *,
    command: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Plan:
    """Let a worker plan the job without training it; leaves no run behind."""
    require_training()
    with temporary_run("yunlu-plan-") as run:
        write_job(run, job)
        worker = start_worker(run, command, plan_only=True)
        offset = 0
        try:
            alive = True
            while alive:
                alive = worker.is_alive()  # looked at before reading: the last words are read
                for event, after in run.read_events(offset=offset):
                    offset = after
                    if on_event is not None:
                        on_event(event)
                time.sleep(_POLL_S if alive else 0)
        finally:
            worker.kill()
        return _read_plan(run, worker)


def _refuse_live(run: RunStore) -> None:
    if read_record(run).task == IN_PROCESS:
        raise StoreError(
            f"{run.id} was trained from live Python objects, which only Python can bring back",
            hint=f"yunlu.resume({run.id!r}, model=..., data=..., loss=...)",
        )


def _reopen(run: RunStore) -> None:
    """Make a resting run pending again; refuse what cannot or must not live again."""
    record = read_record(run)
    if record.state is RunState.FINISHED:
        raise StoreError(
            f"{run.id} is finished: there is nothing to resume",
            hint=f"its model is in {run.location(Area.MODEL)}",
        )
    if record.state.is_active or not _worker_left(run):
        raise StoreError(
            f"{run.id} has a worker: it is {record.state}",
            hint=f"yunlu logs -f {run.id} watches it, yunlu stop {run.id} stops it",
        )
    # Until the worker exists, whoever starts it answers for the run.
    record_worker(run, this_process())
    move(run, record, RunState.PENDING, reason="resumed")


def _last_place(run: RunStore) -> tuple[Executor | None, Placement | None]:
    """With whom the run was last, and which devices it had there."""
    record = read_leases(run)
    if record is None or not record.placement:
        return None, None
    return open_executor(record.address), record.placement


def _begin(
    run: RunStore,
    command: Sequence[str] | None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    try:
        directory = _directory_of(run)
        if on is not None and placement is not None:
            _leave_executor(run, but=on.address)
            on.start(run, placement, directory=directory)
            return recorded_worker(run) or this_process()
        _leave_executor(run)
        words = command or _program_of(run)
        return start_worker(run, words, directory=directory, own_session=own_session)
    except BaseException as error:
        reason = f"its worker could not be started: {error}"
        move(run, read_record(run), RunState.FAILED, reason=reason)
        raise


def _leave_executor(run: RunStore, *, but: str | None = None) -> None:
    """Give back what another executor still holds for a run that goes on without it."""
    executor = executor_of(run)
    if executor is not None and executor.address != but:
        executor.stop(run, now=True)
        run.remove(Document.LEASES)


def _program_of(run: RunStore) -> tuple[str, ...]:
    # Who only asks after a run, stops or resizes it, need not wait for these.
    from yunlu.planning.layouts import count_devices  # noqa: PLC0415

    job = read_job(run)
    devices = count_devices(job, gpus=count_gpus())
    is_served = is_asynchronous(run, job.communication.method)
    return program_for(devices, spares=job.spares, is_asynchronous=is_served)


@contextmanager
def _launching(run: RunStore) -> Generator[None]:
    try:
        with launch_lock(run, wait=False):
            yield
    except BlockingIOError as error:
        raise StoreError(f"{run.id} is just being started or stopped elsewhere") from error


def _worker_left(run: RunStore) -> bool:
    """Whether no worker holds the run; one that has just said its last word gets time to leave."""
    deadline = time.monotonic() + _LEAVE_S
    while not worker_lock_is_free(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _directory_of(run: RunStore) -> Path | None:
    """Where the run was submitted: relative paths in its job start there."""
    directory = read_view(run).directory
    return Path(directory) if directory else None


def _signal(worker: WorkerProcess, *, now: bool) -> None:
    try:
        if now:
            worker.kill()
        else:
            worker.stop()
    except PermissionError as error:
        raise StoreError(f"the worker (process {worker.pid}) belongs to another user") from error


def _open(run_id: str) -> RunStore:
    return open_run(home() / run_id)


def _listing(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")


def _read_plan(run: RunStore, worker: WorkerProcess) -> Plan:
    error = error_of(event for event, _ in run.read_events())
    if error is not None:
        raise error
    plan = read_plan(run)
    if plan is None:
        words = "\n".join(log_tail(run)) or "it printed nothing"
        raise TrainingError(
            f"the worker ended with exit code {worker.exit_code()} before it had a plan:\n{words}"
        )
    return plan
