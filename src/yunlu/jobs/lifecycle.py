"""Lifecycle of a run: create, submit, start, stop, resume, resize, find. Each state change is an event."""

from __future__ import annotations

import re
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, TrainingError
from yunlu.core.secrets import mask_job_text
from yunlu.core.value import Value
from yunlu.executors.executor import ExecutorError
from yunlu.executors.lease_executor import read_record as read_leases
from yunlu.executors.registry import executor_of, is_elsewhere, is_held, remember_address
from yunlu.executors.worker_process import (
    WorkerProcess,
    count_gpus,
    is_asynchronous,
    kill_workers,
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
    detect_lost,
    error_of,
    log_tail,
    move,
    new_record,
    scan_directly,
    worker_of,
)
from yunlu.jobs.run_record import RunRecord, RunScan
from yunlu.runs.events import StateChanged
from yunlu.runs.fold import read_view
from yunlu.runs.home import (
    is_run_id,
    new_run,
    open_if_run,
    open_run,
    private_home,
    remove_stale,
    temporary_run,
)
from yunlu.runs.run_store import (
    Area,
    Document,
    not_a_run,
    read_job,
    read_plan,
    require_own,
    write_job,
    write_submitted_plan,
)
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group, send_request
from yunlu.spec.credentials import refuse_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.executors.executor import Executor, ResizeResult
    from yunlu.hardware.fleet import Placement
    from yunlu.planning.plan import Plan
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

IN_PROCESS = "python:objects"
"""Task of a run made of Python objects: only the process that holds them can train it."""

_POLL_S = 0.1
_WORKER_EXIT_S = 10
"""How long a worker that reported its end may take to exit."""


def home() -> Path:
    """Directory of all runs."""
    return private_home()


def submit(job: Job, *, source: Path | None = None, plan: Plan | None = None) -> RunStore:
    """Create a pending run and index it; a plan is kept with it, for the worker to refine."""
    from yunlu.jobs.run_index import RunIndex  # noqa: PLC0415 (the database is slow to import)

    require_training()
    with RunIndex(home()) as index:  # opened first: no run is created in a home that cannot be used
        remove_stale(index.home)
        try:
            run = create_run(job, source, index.home, plan)
        except OSError as error:
            raise StoreError(f"the run cannot be written to {index.home}: {error}") from error
        index.refresh(run)
    return run


def start(
    run: RunStore,
    command: Sequence[str] | None = None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    """Start the worker of a pending run, here or on the devices of an executor.

    Args:
        run: The run.
        command: Program to start instead of the worker.
        own_session: As with ``start_worker``.
        on: Executor that provides the devices. Default: processes of this machine.
        placement: Devices of the executor.
    """
    require_own(run)
    with _launch_claim(run):
        record, worker = read_record(run), recorded_worker(run)
        is_started = worker is not None and worker.detached
        if not is_started and is_elsewhere(run):
            is_started = is_held(run)
        if record.state is not RunState.PENDING or is_started:
            raise StoreError(f"{run.id} was started before: it is {record.state}")
        if on is not None and record.task == IN_PROCESS:
            raise StoreError(
                f"{run.id} is made of Python objects, which only their own process can train",
                hint="leave out the executor",
            )
        return _launch(run, command, own_session=own_session, on=on, placement=placement)


def resume(
    run: str | RunStore,
    *,
    command: Sequence[str] | None = None,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> RunStore:
    """Start another attempt at a run that ended, from its newest good checkpoint.

    Default devices: those that its executor gave it last.
    """
    store = find(run) if isinstance(run, str) else run
    require_own(store)
    with _launch_claim(store):
        _refuse_python_objects(store)
        if on is None and command is None:
            on, placement = _last_placement(store)
        _reopen(store)
        _launch(store, command, own_session=own_session, on=on, placement=placement)
    return store


def change_placement(run: RunStore, placement: Placement) -> ResizeResult:
    """Move a run to other devices of its executor, without a restart where possible.

    If the result is ``restart``, nothing was changed: stop the run, then resume it with the placement.
    """
    require_own(run)
    executor = executor_of(run)
    if executor is None:
        raise StoreError(
            f"{run.id} was not started by an executor, so its devices cannot be changed",
            hint=f"yunlu resize {run.id} --devices N",
        )
    return executor.resize(run, placement)


def reopen(run: RunStore) -> None:
    """Make a run that ended pending again, to be trained by this process."""
    require_own(run)
    with _launch_claim(run):
        _reopen(run)


def request_stop(run: RunStore, *, now: bool = False) -> RunRecord:
    """Ask the worker to save and stop, or kill it; does not wait."""
    require_own(run)
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
        # A training worker emits this state itself; a starting worker may not handle signals yet, and
        # a killed worker emits nothing.
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
    """Stop a run and wait until it is no longer active; nothing to do where it is not."""
    store = find(run) if isinstance(run, str) else run
    record = detect_lost(store, request_stop(store, now=now))
    while record.state.is_active:
        time.sleep(_POLL_S)
        if is_elsewhere(store) and (executor := executor_of(store)) is not None:
            with suppress(ExecutorError):  # mute for the moment
                executor.status(store)  # ends leases that should have left by now
        record = detect_lost(store, record)
    return record


def find(name: str) -> RunStore:
    """Find a run by its id, a unique prefix of it, or ``last``."""
    if is_run_id(name) and (run := open_if_run(home() / name)) is not None and new_record(run):
        return run  # however many others there are
    scan = scan_runs()
    records = scan.records
    if name in scan.problems:
        raise StoreError(f"the run {name} cannot be read: {scan.problems[name]}")
    if not records:
        raise StoreError(f"there are no runs in {home()}", hint="start one: yunlu train JOB")
    ids = [record.id for record in records]
    if name in {"last", "latest"}:
        return _open(ids[0])
    matches = [name] if name in ids else [run_id for run_id in ids if run_id.startswith(name)]
    if len(matches) == 1:
        return _open(matches[0])
    if matches:
        raise StoreError(
            f"{name!r} is the prefix of {len(matches)} runs: {_join_ids(matches)}",
            hint="give more letters of the id",
        )
    raise StoreError(f"there is no run {name!r}", hint=f"the newest are {_join_ids(ids)}")


def list_runs() -> list[RunRecord]:
    """Current records of all runs that can be read, newest first."""
    return list(scan_runs().records)


def scan_runs() -> RunScan:
    """Current records of all runs, newest first; and what is wrong with those that cannot be read."""
    if not home().is_dir():
        return RunScan()
    from yunlu.jobs.run_index import FullDiskError, RunIndex  # noqa: PLC0415 (slow to import: a database)

    try:
        with RunIndex(home()) as index:
            return index.reconcile()
    except FullDiskError:
        # The index is derived from the runs: on a full disk they are read one by one.
        return scan_directly(home())


def read_record(run: RunStore) -> RunRecord:
    """Current record of a run, read from its events."""
    record = new_record(run)
    if record is None:
        raise not_a_run(run)
    return detect_lost(run, record)


def make_plan(
    job: Job,
    *,
    command: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Plan:
    """Plan a job in a worker without training it; leaves no run behind."""
    require_training()
    with temporary_run("yunlu-plan-") as run:
        write_job(run, job)
        worker = start_worker(run, command, plan_only=True)
        offset = 0
        try:
            alive = True
            while alive:
                alive = (
                    worker.is_alive()
                )  # checked before reading, so that its last events are read
                for event, after in run.read_events(offset=offset):
                    offset = after
                    if on_event is not None:
                        on_event(event)
                time.sleep(_POLL_S if alive else 0)
        finally:
            worker.kill()
        return _collect_plan(run, worker)


def _refuse_python_objects(run: RunStore) -> None:
    if read_record(run).task == IN_PROCESS:
        raise StoreError(
            f"{run.id} was trained from Python objects, which only Python can provide again",
            hint=f"yunlu.resume({run.id!r}, model=..., data=..., loss=...)",
        )


def _reopen(run: RunStore) -> None:
    """Make a run that ended pending again; refuse one that is finished or has a worker."""
    record = read_record(run)
    if record.state is RunState.FINISHED:
        raise StoreError(
            f"{run.id} is finished: there is nothing to resume",
            hint=f"its model is in {run.location(Area.MODEL)}",
        )
    if record.state.is_active or not _await_worker_exit(run):
        raise StoreError(
            f"{run.id} has a worker: it is {record.state}",
            hint=f"yunlu logs -f {run.id} watches it, yunlu stop {run.id} stops it",
        )
    # Until the worker exists, this process is answerable for the run.
    record_worker(run, this_process())
    move(run, record, RunState.PENDING, reason="resumed")


def _last_placement(run: RunStore) -> tuple[Executor | None, Placement | None]:
    """The last executor of the run, and its devices there."""
    record = read_leases(run)
    if record is None or not record.placement:
        return None, None
    return executor_of(run), record.placement


def _launch(
    run: RunStore,
    command: Sequence[str] | None,
    *,
    own_session: bool = True,
    on: Executor | None = None,
    placement: Placement | None = None,
) -> WorkerProcess:
    try:
        directory = _working_directory(run)
        if on is not None and placement is not None:
            remember_address(on.address)
            _release_executor(run, unless=on.address)
            on.start(run, placement, directory=directory)
            return recorded_worker(run) or this_process()
        _release_executor(run)
        program = command or _choose_program(run)
        return start_worker(run, program, directory=directory, own_session=own_session)
    except BaseException as error:
        reason = f"its worker could not be started: {error}"
        move(run, read_record(run), RunState.FAILED, reason=reason)
        raise


def _release_executor(run: RunStore, *, unless: str | None = None) -> None:
    """Release what another executor still holds for a run that continues without it."""
    record = read_leases(run)
    if record is not None and record.address != unless:
        executor = executor_of(run)
        assert executor is not None
        executor.stop(run, now=True)
        run.remove(Document.LEASES)


def _choose_program(run: RunStore) -> tuple[str, ...]:
    # Slow to import: only a start needs it.
    from yunlu.planning.layouts import count_devices  # noqa: PLC0415

    job = read_job(run)
    devices = count_devices(job, gpus=count_gpus())
    is_async = is_asynchronous(run, job.communication.method)
    return program_for(devices, spares=job.spares, is_asynchronous=is_async)


@contextmanager
def _launch_claim(run: RunStore) -> Generator[None]:
    try:
        with launch_lock(run, wait=False):
            yield
    except BlockingIOError as error:
        raise StoreError(
            f"{run.id} is just being started or stopped by another process",
            hint="try again in a moment",
        ) from error


def _await_worker_exit(run: RunStore) -> bool:
    """Whether no worker holds the run, once a worker that reported its end had time to exit."""
    deadline = time.monotonic() + _WORKER_EXIT_S
    while not worker_lock_is_free(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _working_directory(run: RunStore) -> Path | None:
    """Directory from which the run was submitted: the base of relative paths in its job."""
    directory = read_view(run).directory
    return Path(directory) if directory else None


def _signal(worker: WorkerProcess, *, now: bool) -> None:
    try:
        if now:
            worker.kill()
        else:
            worker.stop()
    except PermissionError as error:
        raise StoreError(
            f"the worker (process {worker.pid}) belongs to another user",
            hint="ask that user to stop the run",
        ) from error


def _open(run_id: str) -> RunStore:
    return open_run(home() / run_id)


def _join_ids(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")


def _collect_plan(run: RunStore, worker: WorkerProcess) -> Plan:
    error = error_of(event for event, _ in run.read_events())
    if error is not None:
        raise error
    plan = read_plan(run)
    if plan is None:
        output = "\n".join(log_tail(run)) or "it printed nothing"
        raise TrainingError(
            f"the worker ended with exit code {worker.exit_code()} before it had a plan:\n{output}"
        )
    return plan


def create_run(job: Job, source: Path | None, home: Path, plan: Plan | None = None) -> RunStore:
    """Create a pending run; it appears in its home whole or not at all."""
    refuse_credentials(job.model_dump(mode="json", exclude_unset=True), "job")
    name = job.name or _slug(source.stem if source else job.task)
    run_id = f"{_slug(name)}-{secrets.token_hex(3)}"
    with new_run(home, run_id) as run:
        if plan is not None:
            write_submitted_plan(run, plan)
        _fill(run, job.model_copy(update={"name": name}), source)
    return open_run(home / run_id)


def _fill(run: RunStore, job: Job, source: Path | None) -> None:
    write_job(run, job)
    if source is not None:
        text = source.read_bytes().decode(errors="replace")
        run.write(Document.JOB_SOURCE, mask_job_text(text))
    record_worker(run, this_process())
    submitted = StateChanged(state=RunState.PENDING, reason="submitted", directory=str(Path.cwd()))
    run.emit(submitted)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"


class WorkerResize(Value):
    """Accepted change of the number of workers."""

    text: str
    layout: str
    """Parallel layout for the new number."""


def resize(run: RunStore, *, devices: int) -> WorkerResize:
    """Ask the supervisor of a run to continue with this number of workers."""
    if devices < 1:
        raise StoreError(
            f"a run needs at least one worker, not {devices}", hint="for example: --devices 2"
        )
    require_own(run)
    record = read_record(run)
    if record.state not in {RunState.PLANNING, RunState.RUNNING}:
        hint = f"resume it first: yunlu resume {run.id}" if record.state.can_resume else None
        raise StoreError(f"{run.id} is {record.state}: it has no workers to resize", hint=hint)
    if run.has(Area.SERVERS):  # read by the supervisor of asynchronous workers
        run.write(Document.TARGET_WORKERS, str(devices))
        return WorkerResize(text=f"{devices} workers from now on", layout=f"dp{devices}")
    if is_elsewhere(run):
        raise StoreError(
            f"the devices of {run.id} belong to a cluster",
            hint=f"the pool allocates them; see: yunlu pool why {run.id}",
        )
    group = read_worker_group(run)
    if group is None:
        raise StoreError(
            f"{run.id} is trained by one plain worker without a supervisor, which no worker can join",
            hint="start it with --devices 2 or more: then it can shrink and grow",
        )
    answer = send_request(group, {"kind": "resize", "devices": devices})
    if not answer.get("is_accepted"):
        raise StoreError(f"{run.id} was not resized: {answer.get('text')}")
    return WorkerResize(text=str(answer.get("text")), layout=str(answer.get("layout")))
