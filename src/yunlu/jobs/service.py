"""The life of a job: submit, start, stop, resume, find. Each move is one event of the run."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, TrainingError
from yunlu.core.files import sync_directory, write_atomically
from yunlu.core.rundir import EventKind, RunDir
from yunlu.core.settings import read_settings
from yunlu.core.states import RunState
from yunlu.jobs.run import (
    RunRecord,
    error_of,
    log_tail,
    move,
    new_record,
    settle,
    worker_of,
)
from yunlu.pool.crew import end_workers
from yunlu.pool.local import (
    WorkerProcess,
    count_gpus,
    launch_lock,
    program_for,
    record_worker,
    recorded_worker,
    require_training,
    start_worker,
    this_process,
    worker_lock_is_free,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.core.rundir import Event
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job

IN_PROCESS = "python:objects"
"""The task of a run made of live Python objects: only their own process can train it."""

_POLL_S = 0.1
_STALE_S = 3600
_LEAVE_S = 10


def home() -> Path:
    """Where runs live."""
    return read_settings().home


def submit(job: Job, *, source: Path | None = None) -> RunDir:
    """Make the directory of a new run, pending; a half-made one never shows."""
    from yunlu.jobs.store import Store  # noqa: PLC0415 (the database is slow to import)

    require_training()
    with Store(home()) as store:  # opened first: a store that cannot be used takes no run
        _sweep(store.home)
        try:
            run_dir = _publish(job, source, store.home)
        except OSError as error:
            raise StoreError(f"the run cannot be written to {store.home}: {error}") from error
        store.refresh(run_dir)
    return run_dir


def start(
    run_dir: RunDir, command: Sequence[str] | None = None, *, own_session: bool = True
) -> WorkerProcess:
    """Start the worker of a pending run; ``own_session`` as with ``start_worker``."""
    with _launching(run_dir):
        record, worker = read_record(run_dir), recorded_worker(run_dir)
        if record.state is not RunState.PENDING or (worker is not None and worker.detached):
            raise StoreError(f"{run_dir.id} was started before: it is {record.state}")
        return _begin(run_dir, command, own_session=own_session)


def resume(
    run: str | RunDir, *, command: Sequence[str] | None = None, own_session: bool = True
) -> RunDir:
    """Give a resting run another life, from its newest good checkpoint."""
    run_dir = run if isinstance(run, RunDir) else find(run)
    with _launching(run_dir):
        _refuse_live(run_dir)
        _reopen(run_dir)
        _begin(run_dir, command, own_session=own_session)
    return run_dir


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
        worker = worker_of(run_dir, record)
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


def _publish(job: Job, source: Path | None, parent: Path) -> RunDir:
    name = job.name or _slug(source.stem if source else job.task)
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    try:
        aside.chmod(0o755)
        _fill(RunDir(aside), job.model_copy(update={"name": name}), source)
        # A run's directory is never empty, so the rename fails rather than replace one.
        path = aside.rename(parent / f"{_slug(name)}-{secrets.token_hex(3)}")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(parent)
    return RunDir(path)


def _fill(run_dir: RunDir, job: Job, source: Path | None) -> None:
    write_atomically(run_dir.job, job.model_dump_json(indent=2))
    if source is not None:
        shutil.copyfile(source, run_dir.job_source)
    record_worker(run_dir, this_process())
    state, directory = RunState.PENDING.value, str(Path.cwd())
    run_dir.emit(EventKind.STATE, state=state, reason="submitted", directory=directory)


def _sweep(parent: Path) -> None:
    """Remove what a submit that crashed long ago left behind."""
    for path in parent.glob(".new-*"):
        with suppress(FileNotFoundError):  # published while we looked
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"


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


def _begin(
    run_dir: RunDir, command: Sequence[str] | None, *, own_session: bool = True
) -> WorkerProcess:
    try:
        words, directory = command or _program_of(run_dir), _directory_of(run_dir)
        return start_worker(run_dir, words, directory=directory, own_session=own_session)
    except BaseException as error:
        reason = f"its worker could not be started: {error}"
        move(run_dir, read_record(run_dir), RunState.FAILED, reason=reason)
        raise


def _program_of(run_dir: RunDir) -> tuple[str, ...]:
    # Who only asks after a run, stops or resizes it, need not wait for these.
    from yunlu.planning.layouts import count_devices  # noqa: PLC0415
    from yunlu.spec.job import Job  # noqa: PLC0415

    job = Job.model_validate_json(run_dir.job.read_bytes())
    devices = count_devices(job, gpus=count_gpus())
    is_asynchronous = job.communication.method == "asynchronous"
    return program_for(devices, spares=job.spares, is_asynchronous=is_asynchronous)


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
