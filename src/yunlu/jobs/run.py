"""Record of a run for the index, kept up to date with its events and its worker process."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import TrainingError, YunluError, error_of_code
from yunlu.core.limits import decode_json
from yunlu.core.processes import describe_exit
from yunlu.core.secrets import mask
from yunlu.executors import memory_limits
from yunlu.executors.registry import is_elsewhere, is_held, last_reason
from yunlu.executors.worker_process import (
    WorkerProcess,
    launch_lock,
    recorded_worker,
    running_workers,
    worker_lock_is_free,
)
from yunlu.jobs.run_record import UNREADABLE, RunRecord, RunScan, describe_problem
from yunlu.runs.events import ErrorRaised, StateChanged, is_step
from yunlu.runs.fold import advance, fold
from yunlu.runs.home import find_links, find_runs
from yunlu.runs.run_store import WORKER_LOG, Document, Log, log_end
from yunlu.runs.states import RunState, check_move

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from yunlu.runs.events import Event, StepMetrics
    from yunlu.runs.run_store import RunStore

_TAIL_BYTES = 32_768
MEMORY = "memory"
"""Error code of a run that was killed for exceeding its memory limit."""
_MORE_MEMORY = "say what it needs (train.memory_gb), or give it more devices (--min-devices)"


def scan_directly(home: Path) -> RunScan:
    """Read all runs of a home without its index."""
    records: list[RunRecord] = []
    problems = find_links(home)
    for run in find_runs(home):
        try:
            record = new_record(run)
            if record is not None:
                records.append(detect_lost(run, record))
        except UNREADABLE as error:
            problems[run.id] = describe_problem(error)
    newest_first = sorted(records, key=lambda record: record.created_at, reverse=True)
    return RunScan(records=tuple(newest_first), problems=problems)


def new_record(run: RunStore) -> RunRecord | None:
    """A record that has read no event yet; None where the directory is not a run."""
    try:
        content = decode_json(run.read(Document.JOB) or b"", replace_lone=True)
        job, stat = content, run.stat(Document.JOB)
        created_at = stat.modified_at if stat else 0.0
        name = job.get("name") or run.id.rpartition("-")[0] or run.id
        task, model = str(job["task"]), str(job["model"]["name"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return RunRecord(
        id=run.id,
        name=name,
        task=task,
        model=model,
        created_at=created_at,
        updated_at=created_at,
    )


def replay(run: RunStore, record: RunRecord) -> RunRecord:
    """The record after the events that came since; from the start if the log was replaced."""
    if record.offset > log_end(run, Log.EVENTS):
        record = new_record(run) or record.model_copy(update={"offset": 0})
    offset = record.offset
    for event, after in run.read_events(offset=offset):
        record, offset = advance(record, event, is_first=offset == 0), after
    record = record.model_copy(update={"offset": offset})
    step = last_step(run) if record.state.is_active else None
    if step is not None and step > (record.step or 0):
        record = record.model_copy(update={"step": step})
    return record


def advance_record(record: RunRecord, event: Event, offset: int) -> RunRecord:
    """The record after one more event; pure."""
    advanced = advance(record, event, is_first=record.offset == 0)
    return advanced.model_copy(update={"offset": offset})


def detect_lost(run: RunStore, record: RunRecord) -> RunRecord:
    """Update the record; if the worker vanished, append that to the run's events.

    A run of another user is only read: its state is what its events say.
    """
    record = replay(run, record)
    if not record.state.is_active or run.foreign_owner or worker_is_alive(run, record):
        return record
    try:
        with launch_lock(run, wait=False):
            record = replay(run, record)  # its last events may have arrived meanwhile
            if record.state.is_active and not worker_is_alive(run, record):
                record = _reap(run, record)
    except BlockingIOError:  # another process is starting or reaping its worker
        pass
    return record


def _reap(run: RunStore, record: RunRecord) -> RunRecord:
    """Record the end of a run whose worker could not; the caller holds its lock."""
    outgrown = memory_limits.report_exceeded(run.id) if not is_elsewhere(run) else None
    if outgrown is not None:
        run.emit(ErrorRaised(code=MEMORY, message=outgrown, hint=_MORE_MEMORY))
        memory_limits.forget(run.id)
        return move(run, record, RunState.FAILED, seen_at=_last_sign(run))
    # A worker that was asked to stop and is gone has stopped, if not gracefully.
    verdict = RunState.STOPPED if record.state is RunState.STOPPING else RunState.LOST
    text = _last_words(run, record)
    return move(run, record, verdict, reason=text, seen_at=_last_sign(run))


def _last_sign(run: RunStore) -> float:
    """When the worker last wrote: its loss may be noticed hours later."""
    stats = (run.stat(Log.EVENTS), run.stat(Log.METRICS))
    return max(stat.modified_at for stat in stats if stat is not None)


def move(run: RunStore, record: RunRecord, state: RunState, **data: Any) -> RunRecord:
    """Change the state, if the transition table allows it, by one event. The caller holds its lock."""
    check_move(record.state, state)
    run.emit(StateChanged(state=state, **data))
    return replay(run, record)


def worker_is_alive(run: RunStore, record: RunRecord) -> bool:
    """Whether a process is responsible for the run: by its identity, or by the lock it holds."""
    if is_elsewhere(run):
        return is_held(run) or not worker_lock_is_free(run)
    worker = worker_of(run, record)
    if (worker is not None and worker.is_alive()) or not worker_lock_is_free(run):
        return True
    # A worker group whose supervisor died continues, and starts another one within seconds.
    return any(True for _ in running_workers(run))


def worker_of(run: RunStore, record: RunRecord) -> WorkerProcess | None:
    """The process that reported to work on the run, else the one that was started for it."""
    recorded = recorded_worker(run)
    if record.pid is None or record.process_started_at is None:
        return recorded
    if recorded is not None and recorded.pid == record.pid:
        return recorded  # start time measured in the same way as ours: the best identity
    if recorded is not None and recorded.process_started_at > record.process_started_at:
        return recorded  # a supervisor that took over within the same attempt
    return WorkerProcess(
        pid=record.pid,
        process_started_at=record.process_started_at,
        host=recorded.host if recorded else socket.gethostname(),
        detached=False,
    )


def error_of(events: Iterable[Event]) -> YunluError | None:
    """Why the last attempt failed or was lost, as the error that the worker raised."""
    view = fold(events)
    if view.state is RunState.LOST:
        return TrainingError(view.reason or "the worker vanished")
    if view.error is None:
        return None
    error = view.error
    return error_of_code(error.code, error.message, hint=error.hint, traceback=error.traceback)


def last_step(run: RunStore) -> int | None:
    """The newest step in the metrics."""
    tail = recent_metrics(run)
    return tail[-1]["step"] if tail else None


def recent_metrics(run: RunStore) -> list[StepMetrics]:
    """The last few metric records, without reading the whole file."""
    tail = run.read(Log.METRICS, offset=-_TAIL_BYTES) or b""
    return list(_whole_records(tail.splitlines(keepends=True)))


def remaining_s(run: RunStore, record: RunRecord) -> float | None:
    """Remaining time at the recent pace."""
    recent = recent_metrics(run)
    if record.state is not RunState.RUNNING or len(recent) < 2 or not record.steps:
        return None
    first, last = recent[0], recent[-1]
    if last["step"] <= first["step"]:  # a resume lies between them
        return None
    pace_s = (last["at"] - first["at"]) / (last["step"] - first["step"])
    return max(0.0, (record.steps - last["step"]) * pace_s)


def log_tail(run: RunStore, lines: int = 20) -> list[str]:
    """The last lines the worker printed."""
    tail = run.read(WORKER_LOG, offset=-_TAIL_BYTES) or b""
    return [mask(line) for line in tail.decode(errors="replace").splitlines()[-lines:]]


def _last_words(run: RunStore, record: RunRecord) -> str:
    if is_elsewhere(run):
        return last_reason(run)
    worker = worker_of(run, record)
    if worker is None or (record.state is RunState.PENDING and not worker.detached):
        return "the process that submitted the run ended before its worker was started"
    code = worker.exit_code()
    if code is None:
        return f"the worker (process {worker.pid}) vanished without a word"
    if code < 0:
        note = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return f"the worker (process {worker.pid}) was {describe_exit(code)}{note}"
    return f"the worker (process {worker.pid}) {describe_exit(code)} without a word"


def _whole_records(lines: list[bytes]) -> Iterator[StepMetrics]:
    for line in lines:
        try:
            record = decode_json(line, replace_lone=True)
        except ValueError:  # half a line, at the end or after a crash
            continue
        if is_step(record):
            yield record
