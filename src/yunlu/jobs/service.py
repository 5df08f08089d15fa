"""The life of a job: submit, start, stop, resume, find. Each move is one event of the run."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, TrainingError
from yunlu.core.files import write_atomically
from yunlu.core.settings import read_settings
from yunlu.executors.finding import executor_of, is_elsewhere, is_held, open_executor
from yunlu.executors.record import RECORD
from yunlu.executors.record import read_record as read_leases
from yunlu.executors.worker_group import end_workers
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
from yunlu.jobs.publishing import publish, sweep
from yunlu.jobs.run import (
    RunRecord,
    error_of,
    log_tail,
    move,
    new_record,
    settle,
    worker_of,
)
from yunlu.runs.run_dir import RunDir
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.executors.executor import Executor, Resized
    from yunlu.hardware.fleet import Placement
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_dir import Event
    from yunlu.spec.job import Job

IN_PROCESS = "python:objects"
"""The task of a run made of live Python objects: only their own process can train it."""

_POLL_S = 0.1
_LEAVE_S = 10


def home() -> Path:
    """Where runs live."""
    return read_settings().home


def submit(job: Job, *, source: Path | None = None) -> RunDir:
    """Make the directory of a new run, pending; a half-made one never shows."""
    from yunlu.jobs.store import Store  # noqa: PLC0415 (the database is slow to import)

    require_training()
    with Store(home()) as store:  # opened first: a store that cannot be used takes no run
        sweep(store.home)
        try:
            run_dir = publish(job, source, store.home)
        except OSError as error:
            raise StoreError(f"the run cannot be written to {store.home}: {error}") from error
        store.refresh(run_dir)
    return run_dir


def start(
    run_dir: RunDir,
    command: Sequence[str] | None = None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    """Start the worker of a pending run, or have an executor give it devices.

    Args:
        run_dir: The run.
        command: Another program instead of the worker.
        own_session: As with ``start_worker``.
        on: Who gives it its devices; without a word, it takes those of this machine.
        placement: Which devices of the executor.
    """
    with _launching(run_dir):
        record, worker = read_record(run_dir), recorded_worker(run_dir)
        is_started = worker is not None and worker.detached
        if not is_started and is_elsewhere(run_dir):
            is_started = is_held(run_dir)
        if record.state is not RunState.PENDING or is_started:
            raise StoreError(f"{run_dir.id} was started before: it is {record.state}")
        if on is not None and record.task == IN_PROCESS:
            raise StoreError(
                f"{run_dir.id} is made of live Python objects, which only their own process can train"
            )
        return _begin(run_dir, command, own_session=own_session, on=on, placement=placement)


def resume(
    run: str | RunDir,
    *,
    command: Sequence[str] | None = None,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> RunDir:
    """Give a resting run another life, from its newest good checkpoint.

    A run that an executor gave its devices gets them from there again, if nothing else is said.
    """
    run_dir = run if isinstance(run, RunDir) else find(run)
    with _launching(run_dir):
        _refuse_live(run_dir)
        if on is None and command is None:
            on, placement = _last_place(run_dir)
        _reopen(run_dir)
        _begin(run_dir, command, own_session=own_session, on=on, placement=placement)
    return run_dir


def place(run_dir: RunDir, placement: Placement) -> Resized:
    """Give a run that an executor started other devices, live where that can be.

    Where the answer is ``restart`` nothing has happened: stop it, and resume it with the placement.
    """
    executor = executor_of(run_dir)
    if executor is None:
        raise StoreError(
            f"{run_dir.id} was not started by an executor: nobody can give it other devices",
            hint=f"yunlu resize {run_dir.id} --devices N",
        )
    return executor.resize(run_dir, placement)


def reopen_here(run_dir: RunDir) -> None:
    """Make a resting run pending again, to be trained by the process that asks."""
    with _launching(run_dir):
        _reopen(run_dir)


def request_stop(run_dir: RunDir, *, now: bool = False) -> RunRecord:
    """Ask the worker to save and stop, or end it at once; does not wait for it."""
    with launch_lock(run_dir, wait=True):
        record = read_record(run_dir)
        if not record.state.is_active:
            return record
        executor = executor_of(run_dir) if is_elsewhere(run_dir) else None
        worker = None if executor else worker_of(run_dir, record)
        if worker is not None and not worker.detached and record.state is RunState.PENDING:
            return move(run_dir, record, RunState.STOPPED, reason="stopped before it was started")
        if worker is not None and not worker.detached and worker.is_alive():
            raise StoreError(
                f"{run_dir.id} is trained inside the Python process {worker.pid}",
                hint="interrupt it there (Ctrl-C): it saves and stops",
            )
        # A worker that trains says itself that it is stopping; one that only starts may not yet
        # listen, and one that is killed says nothing.
        if record.state is not RunState.STOPPING and (now or record.state is not RunState.RUNNING):
            record = move(run_dir, record, RunState.STOPPING, reason="asked to stop")
    if executor is not None:
        executor.stop(run_dir, now=now)
        return record
    if worker is not None:
        _signal(worker, now=now)
    if now:  # after a takeover workers are not in the group of their supervisor
        end_workers(run_dir)
    return record


def stop(run: str | RunDir, *, now: bool = False) -> RunRecord:
    """Stop a run and wait until it rests. A run that rests already is left alone."""
    run_dir = run if isinstance(run, RunDir) else find(run)
    record = settle(run_dir, request_stop(run_dir, now=now))
    while record.state.is_active:
        time.sleep(_POLL_S)
        record = settle(run_dir, record)
    return record


def find(text: str) -> RunDir:
    """The run with this id, a unique beginning of it, or the ``last`` one."""
    records = list_runs()
    if not records:
        raise StoreError(f"there are no runs in {home()}", hint="start one: yunlu train JOB")
    ids = [record.id for record in records]
    if text in {"last", "latest"}:
        return _run_dir(ids[0])
    matches = [text] if text in ids else [run_id for run_id in ids if run_id.startswith(text)]
    if len(matches) == 1:
        return _run_dir(matches[0])
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
    from yunlu.jobs.store import FullDiskError, Store  # noqa: PLC0415 (slow to import: a database)

    try:
        with Store(home()) as store:
            return store.reconcile()
    except FullDiskError:
        # The index is a shortcut: on a full disk the runs still tell about themselves.
        every = [read_record(RunDir(job.parent)) for job in home().glob("*/job.json")]
        return sorted(every, key=lambda record: record.created_at, reverse=True)


def read_record(run_dir: RunDir) -> RunRecord:
    """Where one run stands now, read from its own events."""
    record = new_record(run_dir)
    if record is None:
        raise StoreError(f"{run_dir.path} is not a run: its job.json is missing or torn")
    return settle(run_dir, record)


def make_plan(
    job: Job,
    *,
    command: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Plan:
    """Let a worker plan the job without training it; leaves no run behind."""
    require_training()
    with tempfile.TemporaryDirectory(prefix="yunlu-plan-") as directory:
        run_dir = RunDir(Path(directory))
        write_atomically(run_dir.job, job.model_dump_json())
        worker = start_worker(run_dir, command, plan_only=True)
        offset = 0
        try:
            alive = True
            while alive:
                alive = worker.is_alive()  # looked at before reading: the last words are read
                for event, after in run_dir.read_events(offset=offset):
                    offset = after
                    if on_event is not None:
                        on_event(event)
                time.sleep(_POLL_S if alive else 0)
        finally:
            worker.kill()
        return _read_plan(run_dir, worker)


def _refuse_live(run_dir: RunDir) -> None:
    if read_record(run_dir).task == IN_PROCESS:
        raise StoreError(
            f"{run_dir.id} was trained from live Python objects, which only Python can bring back",
            hint=f"yunlu.resume({run_dir.id!r}, model=..., data=..., loss=...)",
        )


def _reopen(run_dir: RunDir) -> None:
    """Make a resting run pending again; refuse what cannot or must not live again."""
    record = read_record(run_dir)
    if record.state is RunState.FINISHED:
        raise StoreError(
            f"{run_dir.id} is finished: there is nothing to resume",
            hint=f"its model is in {run_dir.model}",
        )
    if record.state.is_active or not _worker_left(run_dir):
        raise StoreError(
            f"{run_dir.id} has a worker: it is {record.state}",
            hint=f"yunlu logs -f {run_dir.id} watches it, yunlu stop {run_dir.id} stops it",
        )
    # Until the worker exists, whoever starts it answers for the run.
    record_worker(run_dir, this_process())
    move(run_dir, record, RunState.PENDING, reason="resumed")


def _last_place(run_dir: RunDir) -> tuple[Executor | None, Placement | None]:
    """With whom the run was last, and which devices it had there."""
    record = read_leases(run_dir)
    if record is None or not record.placement:
        return None, None
    return open_executor(record.address), record.placement


def _begin(
    run_dir: RunDir,
    command: Sequence[str] | None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    try:
        directory = _directory_of(run_dir)
        if on is not None and placement is not None:
            _leave_executor(run_dir, but=on.address)
            on.start(run_dir, placement, directory=directory)
            return recorded_worker(run_dir) or this_process()
        _leave_executor(run_dir)
        words = command or _program_of(run_dir)
        return start_worker(run_dir, words, directory=directory, own_session=own_session)
    except BaseException as error:
        reason = f"its worker could not be started: {error}"
        move(run_dir, read_record(run_dir), RunState.FAILED, reason=reason)
        raise


def _leave_executor(run_dir: RunDir, *, but: str | None = None) -> None:
    """Give back what another executor still holds for a run that goes on without it."""
    executor = executor_of(run_dir)
    if executor is not None and executor.address != but:
        executor.stop(run_dir, now=True)
        (run_dir.path / RECORD).unlink()


def _program_of(run_dir: RunDir) -> tuple[str, ...]:
    # Who only asks after a run, stops or resizes it, need not wait for these.
    from yunlu.planning.layouts import count_devices  # noqa: PLC0415
    from yunlu.spec.job import Job  # noqa: PLC0415

    job = Job.model_validate_json(run_dir.job.read_bytes())
    devices = count_devices(job, gpus=count_gpus())
    is_served = is_asynchronous(run_dir, job.communication.method)
    return program_for(devices, spares=job.spares, is_asynchronous=is_served)


@contextmanager
def _launching(run_dir: RunDir) -> Generator[None]:
    try:
        with launch_lock(run_dir, wait=False):
            yield
    except BlockingIOError as error:
        raise StoreError(f"{run_dir.id} is just being started or stopped elsewhere") from error


def _worker_left(run_dir: RunDir) -> bool:
    """Whether no worker holds the run; one that has just said its last word gets time to leave."""
    deadline = time.monotonic() + _LEAVE_S
    while not worker_lock_is_free(run_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _directory_of(run_dir: RunDir) -> Path | None:
    """Where the run was submitted: relative paths in its job start there."""
    for event, _ in run_dir.read_events():
        directory = event.data.get("directory")
        return Path(directory) if directory else None
    return None


def _signal(worker: WorkerProcess, *, now: bool) -> None:
    try:
        if now:
            worker.kill()
        else:
            worker.stop()
    except PermissionError as error:
        raise StoreError(f"the worker (process {worker.pid}) belongs to another user") from error


def _run_dir(run_id: str) -> RunDir:
    return RunDir(home() / run_id)


def _listing(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")


def _read_plan(run_dir: RunDir, worker: WorkerProcess) -> Plan:
    error = error_of(event for event, _ in run_dir.read_events())
    if error is not None:
        raise error
    if not run_dir.plan.exists():
        words = "\n".join(log_tail(run_dir)) or "it printed nothing"
        raise TrainingError(
            f"the worker ended with exit code {worker.exit_code()} before it had a plan:\n{words}"
        )
    from yunlu.planning.plan import Plan  # noqa: PLC0415 (as above)

    return Plan.model_validate_json(run_dir.plan.read_bytes())
