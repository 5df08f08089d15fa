"""Externally launched runs (torchrun, srun, mpirun): one run for all processes."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, StoreError, TrainingError
from yunlu.core.launch import detect_launch
from yunlu.core.limits import decode_json
from yunlu.core.processes import forward_signals, start_process, start_time
from yunlu.core.settings import launch_variables
from yunlu.executors.worker_process import require_training, start_worker
from yunlu.jobs import lifecycle
from yunlu.jobs.run import error_of
from yunlu.jobs.run_log import end_of, follow
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, read_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.core.launch import LaunchInfo
    from yunlu.jobs.run_log import LogCursor
    from yunlu.jobs.run_record import RunRecord
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore

_END_S = 30.0
"""A run ended by its launcher is recorded as ended within moments."""
_POLL_S = 0.1


def find_launch(job: Job | None = None, *, waits: bool = True) -> LaunchInfo | None:
    """Rank of this process in an external launch; rejects options that do not go with one."""
    launch = current_launch()
    if launch is None:
        return None
    if not waits:
        raise JobError(
            f"{launch.launcher} ends its workers when the command that it started returns.",
            hint="leave out --detach or wait=False",
        )
    if job is not None and job.devices not in {"auto", launch.size}:
        raise JobError(
            f"the job says devices: {job.devices}, and {launch.launcher} started {launch.size} workers",
            hint=f"leave devices out, or start {job.devices}",
        )
    return launch


def start_run(
    job: Job, launch: LaunchInfo, *, source: Path | None = None, plan: Plan | None = None
) -> RunStore:
    """On rank 0: start a run, or resume the one of an earlier start of this launch."""
    require_training()
    previous = find_previous_run(job, launch)
    if previous is not None:
        return resume_run(previous)
    run = lifecycle.submit(job, source=source, plan=plan)
    run.write(Document.LAUNCH, json.dumps(identify(launch)))
    lifecycle.start(run, worker_command(), own_session=False)
    return run


def resume_run(run: RunStore) -> RunStore:
    """On rank 0: resume a run; if it has finished, tell the other ranks."""
    if _wait_until_ended(run).state is RunState.FINISHED:
        start_worker(run, worker_command(), own_session=False)
    else:
        lifecycle.resume(run, command=worker_command(), own_session=False)
    return run


def join_run() -> tuple[RunStore | None, int]:
    """On other ranks: train to the end; returns the run, if known, and an exit code."""
    result = run_follower()
    run = None if result.path is None else open_run(result.path)
    return run, 0 if result.code == 0 else 1


def _wait_quietly(run: RunStore, since: LogCursor) -> None:
    for _ in follow(run, since=since):
        pass


def train_to_end(
    job: Job | RunStore,
    launch: LaunchInfo,
    *,
    source: Path | None = None,
    plan: Plan | None = None,
    watch: Callable[[RunStore, LogCursor], None] = _wait_quietly,
) -> RunStore:
    """On any rank: train a job, or resume a run, to its end; every rank returns the same run.

    ``watch`` is called on rank 0 with the run and the place to begin at, and returns at its end.
    """
    if launch.rank:
        return _join_or_raise(launch)
    is_new = isinstance(job, Job)
    run = start_run(job, launch, source=source, plan=plan) if is_new else resume_run(job)

    def stop() -> None:  # not in the handler: the interrupted code may hold the lock
        threading.Thread(target=lifecycle.request_stop, args=(run,), daemon=True).start()

    with forward_signals(stop):
        watch(run, end_of(run))
    return run


def _join_or_raise(launch: LaunchInfo) -> RunStore:
    run, code = join_run()
    if run is not None and code == 0:
        return run
    if run is not None and not _wait_until_ended(run).state.is_active:
        error = error_of(event for event, _ in run.read_events())
        if error is not None:
            raise error
    raise TrainingError(f"worker {launch.rank} of {launch.size} failed", hint="see its output")


def find_previous_run(job: Job, launch: LaunchInfo) -> RunStore | None:
    """The run of an earlier start of this launch."""
    ours = identify(launch)
    for record in lifecycle.list_runs():
        run = open_run(lifecycle.home() / record.id)
        try:
            theirs = decode_json(run.read(Document.LAUNCH) or b"")
            saved = read_job(run)
        except (OSError, ValueError, StoreError):  # not an externally launched run
            continue
        with_name = {"name": saved.name}  # a run has a name even if its job has none
        if (job if job.name else job.model_copy(update=with_name)) == saved and _is_restart(
            ours, theirs
        ):
            return run
    return None


def _is_restart(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if (
        ours["launcher"] != theirs.get("launcher")
        or ours["id"] != theirs.get("id")
        or not ours["id"]
    ):
        return False
    if ours["asker"] == theirs.get("asker"):
        return False  # one program trains the same job twice
    # torchrun's agent outlives its workers; Slurm keeps the id of a requeued job.
    is_same_agent = ours["launcher"] == "torchrun" and ours["agent"] == theirs.get("agent")
    return is_same_agent or (ours["restarts"] > 0 and ours["id"] != "none")


def identify(launch: LaunchInfo) -> dict[str, Any]:
    """Identity of a launch, stored with the run it started."""
    host = socket.gethostname()
    parent = os.getppid()
    try:
        since = start_time(parent)
    except OSError:  # of another process namespace
        since = 0.0
    return {
        "launcher": launch.launcher,
        "id": launch.id,
        "restarts": launch.restarts,
        "agent": f"{host} {parent} {since:.2f}",
        "asker": f"{host} {os.getpid()}",
    }


def _wait_until_ended(run: RunStore) -> RunRecord:
    deadline = time.monotonic() + _END_S
    record = lifecycle.read_record(run)
    while record.state.is_active and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        record = lifecycle.read_record(run)
    return record


_WORKER = (sys.executable, "-m", "yunlu.training.worker", "--launched")
_run_indices = itertools.count()
"""Runs trained by this process; all ranks count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """Result of a worker on a rank other than 0."""

    path: Path | None
    """Directory of the run, if rank 0 shared it."""
    code: int


def current_launch() -> LaunchInfo | None:
    """Rank of this process in an external launch; None if it was started alone."""
    return detect_launch(launch_variables())


def worker_command() -> tuple[str, ...]:
    """Command of rank 0 for the next run; the run's directory is appended."""
    return (*_WORKER, "--parent", str(os.getpid()), "--run-index", str(next(_run_indices)))


def run_follower() -> ChildResult:
    """Train the run of rank 0 until it ends."""
    child = start_process([*worker_command(), "-"], is_piped=True, own_group=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    with forward_signals(child.terminate), child.stdout as lines:
        path = os.fsdecode(lines.readline().strip())
        code = child.wait()
    return ChildResult(path=Path(path) if path else None, code=code)
