"""Runs of processes that torchrun, srun or mpirun started: one run for all of them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil

from yunlu.core.errors import JobError, StoreError, TrainingError
from yunlu.executors.external_launcher import (
    current_launch,
    forward_signals,
    run_follower,
    worker_command,
)
from yunlu.executors.worker_process import require_training, start_worker
from yunlu.jobs import service
from yunlu.jobs.follow import end_of, follow
from yunlu.jobs.run import error_of
from yunlu.runs.documents import read_job
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.core.launch import LaunchInfo
    from yunlu.jobs.run import RunRecord
    from yunlu.runs.run_store import RunStore

_REST_S = 30.0
"""What a launcher ended rests within moments."""
_POLL_S = 0.1


def find_launch(job: Job | None = None, *, waits: bool = True) -> LaunchInfo | None:
    """This process's place in a launch of several; refuses what does not go with it."""
    place = current_launch()
    if place is None:
        return None
    if not waits:
        raise JobError(
            f"{place.by} ends its workers when the command that it started returns.",
            hint="leave out --detach or wait=False",
        )
    if job is not None and job.devices not in {"auto", place.size}:
        raise JobError(
            f"the job says devices: {job.devices}, and {place.by} started {place.size} workers",
            hint=f"leave devices out, or start {job.devices}",
        )
    return place


def begin(job: Job, place: LaunchInfo, *, source: Path | None = None) -> RunStore:
    """On rank 0: start the run, or go on with it where the launcher starts us again."""
    require_training()
    former = find_former(job, place)
    if former is not None:
        return go_on(former)
    run = service.submit(job, source=source)
    run.write(Document.LAUNCH, json.dumps(identify(place)))
    service.start(run, worker_command(), own_session=False)
    return run


def go_on(run: RunStore) -> RunStore:
    """On rank 0: another life for a run; where it is finished, the others are told so."""
    if _wait_for_rest(run).state is RunState.FINISHED:
        start_worker(run, worker_command(), own_session=False)
    else:
        service.resume(run, command=worker_command(), own_session=False)
    return run


def join() -> tuple[RunStore | None, int]:
    """On every other rank: train to the end; the run, if it was met, and an exit code."""
    part = run_follower()
    run = None if part.path is None else open_run(part.path)
    return run, 0 if part.code == 0 else 1


def see_through(job: Job | RunStore, place: LaunchInfo, *, source: Path | None = None) -> RunStore:
    """On any rank: train a job, or go on with a run, to its end; every rank gets the same run."""
    if place.rank:
        return _join_or_raise(place)
    run = begin(job, place, source=source) if isinstance(job, Job) else go_on(job)

    def stop() -> (
        None
    ):  # not inside the signal: what it interrupts may hold the lock that this takes
        threading.Thread(target=service.request_stop, args=(run,), daemon=True).start()

    with forward_signals(stop):
        for _ in follow(run, since=end_of(run)):
            pass
    return run


def _join_or_raise(place: LaunchInfo) -> RunStore:
    run, code = join()
    if run is not None and code == 0:
        return run
    if run is not None and not _wait_for_rest(run).state.is_active:
        error = error_of(event for event, _ in run.read_events())
        if error is not None:
            raise error
    raise TrainingError(f"worker {place.rank} of {place.size} failed", hint="its output tells more")


def find_former(job: Job, place: LaunchInfo) -> RunStore | None:
    """The run that an earlier start of this launch trained."""
    ours = identify(place)
    for record in service.list_runs():
        run = open_run(service.home() / record.id)
        try:
            theirs = json.loads(run.read(Document.LAUNCH) or b"")
            saved = read_job(run)
        except (OSError, ValueError, StoreError):  # of no launch
            continue
        named = {"name": saved.name}  # a run has a name, even where its job has none
        if (job if job.name else job.model_copy(update=named)) == saved and _is_again(ours, theirs):
            return run
    return None


def _is_again(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if ours["by"] != theirs.get("by") or ours["id"] != theirs.get("id") or not ours["id"]:
        return False
    if ours["asker"] == theirs.get("asker"):
        return False  # one program that trains the same job twice
    # The agent of torchrun outlives those it starts; Slurm's number stays when a job is requeued.
    is_same_agent = ours["by"] == "torchrun" and ours["agent"] == theirs.get("agent")
    return is_same_agent or (ours["restarts"] > 0 and ours["id"] != "none")


def identify(place: LaunchInfo) -> dict[str, Any]:
    """What tells a launch from others: kept with the run it began."""
    host = socket.gethostname()
    parent = psutil.Process().ppid()
    try:
        since = psutil.Process(parent).create_time()
    except psutil.Error:  # nobody's child
        since = 0.0
    return {
        "by": place.by,
        "id": place.id,
        "restarts": place.restarts,
        "agent": f"{host} {parent} {since:.0f}",
        "asker": f"{host} {os.getpid()}",
    }


def _wait_for_rest(run: RunStore) -> RunRecord:
    deadline = time.monotonic() + _REST_S
    record = service.read_record(run)
    while record.state.is_active and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        record = service.read_record(run)
    return record
